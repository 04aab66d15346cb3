from __future__ import annotations

import weakref
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module

from steadytorch.runtime import benchmark_mode as switch
from steadytorch.runtime.weights import Weights

ON_OUTPUTS = module.register_module_forward_hook


pytestmark = pytest.mark.usefixtures("host_way")


def countless():
    """A parameter without a version that writes could raise."""
    with torch.inference_mode():
        return nn.Parameter(torch.ones(2), requires_grad=False)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)).eval()


@pytest.fixture
def weights(model):
    weights = Weights(model)
    weights.remember()
    return weights


def test_an_untouched_model_has_not_changed(model, weights):
    model(torch.ones(3, 2))
    model.zero_grad()
    model[0].weight.requires_grad_(False)
    assert not weights.changed()


def test_hooks_that_stand_in_another_order_than_they_were_added_in_are_no_change(model, weights):
    model[0].register_forward_hook(lambda *given: None)
    model[0].register_forward_hook(lambda *given: None, prepend=True)
    weights.remember()
    assert not weights.changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[2].weight.requires_grad_(False).mul_(2),
        lambda model: model[1].num_batches_tracked.add_(1),
        lambda model: model[1].half(),
        lambda model: model.double(),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: setattr(model[0], "bias", None),
        lambda model: delattr(model[1], "running_mean"),
        lambda model: model.append(nn.ReLU()),
        lambda model: model.pop(2),
        lambda model: model[1].register_buffer("more", torch.ones(1)),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: torch.utils.swap_tensors(model[0].bias, nn.Parameter(torch.ones(2))),
        lambda model: torch.utils.swap_tensors(model[0].bias.requires_grad_(False), countless()),
        lambda model: model._modules.update(a=model._modules.pop("0")),
        lambda model: model[0].register_forward_hook(lambda *given: None),
        lambda model: model[2].register_forward_pre_hook(lambda *given: None),
        lambda model: model[1].train(),
        lambda model: delattr(model[1], "training"),
        lambda model: model[0]._parameters.update(offset=model[0]._parameters.pop("bias")),
    ],
)
def test_every_change_is_seen_until_it_is_remembered(model, weights, change):
    change(model)
    assert weights.changed()
    assert weights.changed()
    weights.remember()
    assert not weights.changed()


MOVES = {
    "half": lambda model: model.half().float(),
    "scaled": lambda model: model._apply(lambda t: t * 2 if t.is_floating_point() else t),
    "data": lambda model: [setattr(p, "data", p.data * 2) for p in model.parameters()],
}


@pytest.mark.parametrize("move", MOVES)
def test_tensors_that_are_moved_twice_are_seen(move):
    """Their memory is given out again, and they may have the addresses that they had."""
    for _ in range(20):
        model = nn.Linear(64, 64, bias=False)
        weights = Weights(model)
        weights.remember()
        MOVES[move](model)
        MOVES[move](model)
        assert weights.changed()


def test_other_storage_at_the_same_address_is_seen():
    model, memory = nn.Linear(4, 4, bias=False), bytearray(64)

    def place() -> int:
        model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(4, 4)
        return model.weight.data_ptr()

    weights, before = Weights(model), place()
    weights.remember()
    assert not weights.changed()
    assert place() == before
    assert weights.changed()
    weights.remember()
    assert not weights.changed()


def test_the_memory_of_what_is_replaced_is_not_held(model, weights):
    freed = weakref.ref(model[0].weight.untyped_storage())
    model[0].weight.data = torch.ones(2, 2)
    assert freed() is None
    assert weights.changed()


def test_a_middle_layer_that_moves_is_seen(model, weights):
    model[1].weight.data = model[1].weight.data.clone()
    assert weights.changed()


@pytest.mark.parametrize("register", [module.register_module_forward_pre_hook, ON_OUTPUTS])
def test_a_hook_on_all_modules_is_a_change_and_so_is_its_going(weights, register):
    handle = register(lambda *given: None)
    assert weights.changed()
    weights.remember()
    assert not weights.changed()
    handle.remove()
    assert weights.changed()


@pytest.mark.filterwarnings("ignore:benchmark mode comes late")
def test_switching_benchmark_mode_is_no_change(weights, monkeypatch):
    monkeypatch.setattr(switch, "why_not", lambda: "")
    with switch.benchmark_mode(True):
        assert not weights.changed()
        weights.remember()
    assert not weights.changed()


IN_INFERENCE_MODE = {
    "written": lambda model: model[0].weight.mul_(3),
    "statistics": lambda model: model[1].running_mean.add_(1),
    "loaded": lambda model: model.load_state_dict(
        {n: t + 1 for n, t in model.state_dict().items()}
    ),
    "moved": lambda model: setattr(model[0].weight, "data", model[0].weight.clone()),
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "freed": lambda model: model.double().float(),
}


@pytest.mark.parametrize("change", IN_INFERENCE_MODE)
def test_inference_tensors_are_watched(change, host_way):
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
        model[0].mask = torch.ones(2)
    weights = Weights(model)
    weights.remember()
    assert bool(weights.interpreted_for) is (host_way == "interpreted")
    assert not weights.changed()
    with torch.inference_mode():
        IN_INFERENCE_MODE[change](model)
    assert weights.changed()
    assert weights.rewritten()
    weights.remember()
    assert not weights.changed()


def test_loading_equal_values_beside_inference_tensors_is_forgiven(model):
    with torch.inference_mode():
        model.register_buffer("mask", torch.ones(2))
    weights = Weights(model)
    weights.remember()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        assert weights.expect(state)
        model.load_state_dict(state)
    assert weights.changed()
    assert weights.is_forgiven()
    assert not weights.changed()


def test_a_model_without_weights_never_changes():
    weights = Weights(nn.ReLU())
    weights.remember()
    assert not weights.changed()


# -- of a model that trains -------------------------------------------------------------------


@pytest.fixture
def training(model):
    weights = Weights(model.train(), contents=False)
    weights.remember()
    return weights


def test_steps_and_loaded_weights_are_no_change(model, training):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()})
    assert not training.changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[2].weight.requires_grad_(False),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: setattr(model[0], "bias", None),
        lambda model: delattr(model[1], "running_mean"),
        lambda model: model.append(nn.ReLU()),
        lambda model: model[1].eval(),
        lambda model: model[0].register_forward_hook(lambda *given: None),
    ],
)
def test_another_model_is_a_change(model, training, change):
    change(model)
    assert training.changed()
    training.remember()
    assert not training.changed()


# -- writes that raise no version -----------------------------------------------------------------


def by_fused(kind, **settings):
    def step(model):
        optimizer = kind(model.parameters(), lr=0.1, fused=True, **settings)
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()

    return step


def of_statistics(model):
    norm = model[1]
    functional.batch_norm(torch.randn(8, 2), norm.running_mean, norm.running_var, training=True)


def averaged(model):
    source = [torch.randn_like(p) for p in model.parameters()]
    for own, other in zip(model.parameters(), source, strict=True):
        own.data.copy_(own.data.lerp(other, 0.1))


UNCOUNTED = {
    "fused Adam": by_fused(torch.optim.Adam),
    "fused AdamW": by_fused(torch.optim.AdamW),
    "fused SGD": by_fused(torch.optim.SGD),
    "fused Adagrad": by_fused(torch.optim.Adagrad),
    "statistics": of_statistics,
    "average": averaged,
    "data in place": lambda model: model[2].weight.data.add_(0.1),
    "data by an operator": lambda model: exec("w.data += 1", {"w": model[0].weight}),
    "foreach on data": lambda model: torch._foreach_add_([p.data for p in model.parameters()], 1.0),
    "NumPy": lambda model: model[0].weight.detach().numpy().fill(3),
    "DLPack": lambda model: torch.from_dlpack(model[0].weight.detach()).zero_(),
    "storage": lambda model: model[0].weight.untyped_storage().fill_(1),
    "an integer": lambda model: model[1].num_batches_tracked.data.add_(1),
}


@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_that_raise_no_version_are_seen(model, weights, write):
    UNCOUNTED[write](model)
    assert weights.changed()
    assert weights.rewritten()


def test_a_partial_write_is_seen_by_one_of_the_next_looks():
    model = nn.Linear(256, 256)
    weights = Weights(model)
    weights.remember()
    model.weight.data[:64] += 1
    assert weights.rewritten()
    assert any(weights.changed() for _ in range(10_000))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.complex128, torch.int8])
def test_every_width_of_elements_is_read(dtype):
    model = nn.Module()
    model.register_buffer("held", torch.ones(3, 5, dtype=dtype).t())
    model.register_buffer("none", torch.ones(0, dtype=dtype))
    weights = Weights(model)
    weights.remember()
    assert not weights.changed()
    model.held.data.mul_(3)
    assert weights.changed()


def test_the_step_of_an_optimizer_over_other_tensors_is_no_change(weights):
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not weights.changed()


def test_steps_are_recorded_once(model, weights):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.step()
    assert weights.changed()
    assert weights._announced == [torch.optim.SGD]
    weights.remember()
    assert not weights.changed()
    optimizer.step()
    assert weights.changed()


def test_a_step_that_moves_nothing_yet_counts(model, weights):
    """On a GPU the write may not have happened when the values are looked at."""
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    assert weights.changed()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_an_optimizer_may_be_compiled_beside_watched_weights(model, weights):
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before, compiled = other.bias.detach().clone(), torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        compiled()
    torch.testing.assert_close(other.bias, before - 0.2)
    assert not weights.changed()


# -- plain attributes -----------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tensor, self.rate, self.name = torch.ones(2), 0.5, "plain"
        self.table = {"inner": {"tensor": torch.ones(2)}, "rate": 1}
        self.rows = [torch.ones(2), (torch.ones(2), [torch.ones(2)])]
        self.window, self.chosen = deque([torch.ones(2)]), {1, 2}
        self.loose = [nn.Linear(2, 2)]
        self.layer.mask = torch.ones(2)


PLAIN = {
    "written": lambda m: m.tensor.mul_(3),
    "written past its version": lambda m: m.tensor.data.mul_(3),
    "written in a dictionary": lambda m: m.table["inner"]["tensor"].mul_(3),
    "written in a list": lambda m: m.rows[0].mul_(3),
    "written in a tuple in a list": lambda m: m.rows[1][0].mul_(3),
    "written in a list in a tuple": lambda m: m.rows[1][1][0].mul_(3),
    "written in a deque": lambda m: m.window[0].mul_(3),
    "written in a layer of PyTorch's": lambda m: m.layer.mask.mul_(3),
    "weights of a loose module": lambda m: m.loose[0].weight.data.mul_(3),
    "a loose module's mode": lambda m: m.loose[0].eval(),
    "replaced": lambda m: setattr(m, "tensor", torch.zeros(2)),
    "a number": lambda m: setattr(m, "rate", 0.7),
    "a string": lambda m: setattr(m, "name", "other"),
    "a new attribute": lambda m: setattr(m, "scale", 2),
    "a deleted one": lambda m: delattr(m, "rate"),
    "a number in a dictionary": lambda m: m.table.update(rate=2),
    "a new entry": lambda m: m.table["inner"].update(more=1),
    "a longer list": lambda m: m.rows.append(1),
    "an item replaced": lambda m: m.rows.__setitem__(0, torch.ones(2)),
    "a set": lambda m: m.chosen.add(3),
    "a deque": lambda m: m.window.append(1),
    "forward": lambda m: setattr(m, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", PLAIN)
def test_a_change_of_what_modules_hold_as_plain_attributes_is_seen(change):
    model = Plain()
    weights = Weights(model)
    weights.remember()
    assert not weights.changed()
    PLAIN[change](model)
    assert weights.changed()
    weights.remember()
    assert not weights.changed()


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scale, self.rows = 1.0, [1.0]


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrised(make):
    model = nn.Sequential(make())
    nn.utils.parametrize.register_parametrization(model[0], "weight", Twice())
    return model


def quantised():
    return torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(2, 2)).eval(), {nn.Linear}, dtype=torch.qint8
    )


def set_quantised(model):
    weight, bias = model[0]._weight_bias()
    model[0].set_weight_bias(
        torch.quantize_per_tensor(weight.dequantize(), 4.0, 0, torch.qint8), bias
    )


MADE = {
    "parametrised": lambda: parametrised(Scaled),
    "parametrised layer": lambda: parametrised(lambda: nn.Linear(2, 2)),
    "weight norm": lambda: nn.Sequential(nn.utils.weight_norm(Scaled())),
    "weight norm of a layer": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2))),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(Scaled())),
    "quantised": quantised,
}
OF_ALL = {
    "number": lambda m: setattr(m[0], "out_features", 3),
    "forward": lambda m: setattr(m[0], "forward", lambda x: 7 * x),
    "added": lambda m: setattr(m[0], "more", 1),
    "removed": lambda m: delattr(m[0], "in_features"),
}
OF_SOME = {
    ("parametrised", "scale"): lambda m: setattr(m[0], "scale", 3.0),
    ("parametrised", "list"): lambda m: m[0].rows.append(1),
    ("weight norm", "scale"): lambda m: setattr(m[0], "scale", 3.0),
    ("weight norm", "list"): lambda m: m[0].rows.append(1),
    ("spectral norm", "epsilon"): lambda m: setattr(m[0].parametrizations.weight[0], "eps", 1.0),
    ("quantised", "weight"): set_quantised,
}
OF_MADE = {(kind, change): OF_ALL[change] for kind in MADE for change in OF_ALL} | OF_SOME


@pytest.mark.filterwarnings("ignore")  # deprecations of PyTorch's
@pytest.mark.parametrize("case", OF_MADE, ids=", ".join)
def test_attributes_of_layers_that_pytorch_rebuilt_are_watched(case):
    model = MADE[case[0]]().eval()
    weights = Weights(model)
    weights.remember()
    model(torch.ones(1, 2))
    assert not weights.changed()
    OF_MADE[case](model)
    assert weights.changed()
    weights.remember()
    assert not weights.changed()


# -- modules outside of the tree ------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x):
        return DEEPER(x)


class Outer(nn.Module):
    """Calls modules of an object and of a global; the latter calls another one."""

    def __init__(self):
        super().__init__()
        self.held = SimpleNamespace(head=nn.Linear(2, 2))

    def forward(self, x):
        return INNER(self.held.head(x))


INNER, DEEPER = Inner(), nn.Linear(2, 2)

OUTSIDE = {
    "written": lambda m: m.held.head.weight.detach().mul_(3),
    "loaded": lambda m: m.held.head.load_state_dict(nn.Linear(2, 2).state_dict()),
    "replaced": lambda m: setattr(m.held.head, "bias", None),
    "mode": lambda m: m.held.head.eval(),
    "hook": lambda m: INNER.register_forward_hook(lambda *given: None),
    "written deeper": lambda m: DEEPER.weight.data.add_(1),
    "optimizer": lambda m: torch.optim.SGD(DEEPER.parameters(), fused=True).step(),
}


@pytest.mark.parametrize("change", OUTSIDE)
def test_modules_that_code_reads_elsewhere_are_watched(change):
    model = Outer()
    weights = Weights(model)
    weights.remember()
    assert not weights.changed()
    OUTSIDE[change](model)
    assert weights.changed()
    weights.remember()
    assert not weights.changed()


# -- dictionaries and objects outside of the tree -------------------------------------------------


TABLE, MANY, OPTIONS = {0: 1.0}, {f"k{i}": 1.0 for i in range(100)}, {}
CONFIG = SimpleNamespace()


class Reading(nn.Module):
    """Reads entries and attributes, some of which are absent at first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.config = SimpleNamespace(table={0: 1.0}, rows={1: [1.0]})
        self.user = UserDict(scale=1.0)

    def forward(self, x):
        scale = TABLE[0] * MANY["k90"] * OPTIONS.get("scale", 1.0) * self.user["scale"]
        scale = scale * (3.0 if hasattr(self.config, "flag") else 1.0) * self.gain()
        return self.layer(x) * scale * self.config.table[0] * self.config.rows[1][0] * of_config()

    def gain(self):
        return 1.0


class Computing(Reading):
    def gain(self):
        return getattr(self.config, "gain", 1.0)


def of_config():
    return getattr(CONFIG, "factor", 1.0)


READ = {
    "key that is a number": lambda m: m.config.table.update({0: 5.0}),
    "list under a number": lambda m: m.config.rows[1].append(2.0),
    "attribute added": lambda m: setattr(m.config, "flag", 1),
    "UserDict": lambda m: m.user.update(scale=4.0),
    "UserDict gains an entry": lambda m: m.user.update(more=4.0),
    "number in a global dictionary": lambda m: TABLE.update({0: TABLE[0] + 1}),
    "entry after many": lambda m: MANY.update(k90=MANY["k90"] + 1),
    "entry added": lambda m: OPTIONS.update(scale=3.0),
    "entry removed": lambda m: OPTIONS.clear(),
    "attribute of a global added": lambda m: setattr(CONFIG, "factor", 2.0),
}


@pytest.mark.parametrize("change", READ)
@pytest.mark.parametrize("kind", [Reading, Computing])
def test_dictionaries_and_objects_that_code_reads_are_watched(kind, change):
    CONFIG.__dict__.clear()
    OPTIONS.clear()
    if change == "entry removed":
        OPTIONS["scale"] = 2.0
    model = kind()
    weights = Weights(model)
    weights.remember()
    model(torch.ones(1, 2))
    assert not weights.changed()
    READ[change](model)
    assert weights.changed()
    weights.remember()
    assert not weights.changed()


def test_an_attribute_that_code_does_not_ask_for_is_no_change():
    model = Reading()
    weights = Weights(model)
    weights.remember()
    model.config.other = 1
    assert not weights.changed()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_a_hook_computes_at_each_call_is_no_change():
    class Own(nn.Linear):
        pass

    model = nn.utils.weight_norm(Own(2, 2))
    weights = Weights(model)
    weights.remember()
    model(torch.ones(1, 2))
    assert not weights.changed()
    model.weight_g.data.mul_(2)
    assert weights.changed()
