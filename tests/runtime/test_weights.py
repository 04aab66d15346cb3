from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
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


def test_inference_tensors_are_left_out():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    weights = Weights(model)
    weights.remember()
    assert not weights.changed()
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert weights.changed()


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
