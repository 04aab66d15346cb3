from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterable, Reversible, Sized

import pytest
import torch
from torch import nn

from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.module_proxy import ModuleProxy, as_module

from .conftest import CANDIDATES, Network, always, answer, other_weights


def test_parameters_buffers_and_state_are_the_models(model, tuned):
    assert list(tuned.state_dict()) == list(model.state_dict())
    assert [n for n, _ in tuned.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [id(p) for p in tuned.parameters()] == [id(p) for p in model.parameters()]
    assert [id(b) for b in tuned.buffers()] == [id(b) for b in model.buffers()]
    assert list(tuned.modules()) == list(model.modules())
    assert list(tuned.named_children()) == list(model.named_children())
    assert tuned.get_submodule("head") is model.head
    assert tuned.get_parameter("head.weight") is model.head.weight


def test_attributes_are_the_models(model, tuned):
    model.note = "kept"
    assert tuned.note == "kept"
    assert tuned.head is model.head
    tuned.number = 7
    assert model.number == 7
    with pytest.raises(AttributeError, match=r"Network.*no_such"):
        tuned.no_such  # noqa: B018


def test_attributes_are_deleted_from_the_model(model, tuned):
    model.note = "gone"
    del tuned.note
    assert not hasattr(model, "note")
    assert tuned.report().off == (
        "note was deleted after the plan was applied; refresh() serves tuned again"
    )
    del tuned.head
    assert "head" not in dict(model.named_children())
    with pytest.raises(AttributeError, match=r"Network.*no_such"):
        del tuned.no_such


def test_registering_registers_with_the_model(model, tuned):
    tuned.register_buffer("mask", torch.ones(1))
    tuned.extra = nn.Linear(1, 1)
    tuned.scale = nn.Parameter(torch.ones(1))
    assert {"mask", "scale", "extra.weight"} <= model.state_dict().keys()
    assert tuned.state_dict().keys() == model.state_dict().keys()


def test_state_is_loaded_into_the_model(model, tuned):
    other = other_weights(model)
    assert tuned.load_state_dict(other).missing_keys == []
    assert torch.equal(model.head.bias, other["head.bias"])


class Kept(nn.Linear):
    """Keeps more than tensors in its state, under names that were others once."""

    _version = 3

    def __init__(self):
        super().__init__(8, 2)
        self.kept = "as made"

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state

    def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
        self.version = metadata.get("version")
        if f"{prefix}w" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}w")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def test_a_parent_loads_into_the_model():
    model, other = Kept(), Kept()
    other.kept = "as saved"
    saved = nn.Sequential(stand_in(other)).state_dict()
    assert saved.keys() == nn.Sequential(other).state_dict().keys()
    assert saved._metadata == nn.Sequential(other).state_dict()._metadata
    saved["0.w"] = saved.pop("0.weight")
    tuned = stand_in(model)
    nn.Sequential(tuned).load_state_dict(saved)
    assert (model.kept, model.version) == ("as saved", 3)
    assert torch.equal(model.weight, other.weight)
    assert tuned.report().off is None  # nothing was built from the weights of before


def test_a_parent_loads_a_batch_norm_of_old():
    saved = nn.Sequential(nn.BatchNorm1d(4)).state_dict()
    del saved["0.num_batches_tracked"]
    saved._metadata["0"]["version"] = 1
    nn.Sequential(stand_in(nn.BatchNorm1d(4))).load_state_dict(saved)


@pytest.mark.parametrize("with_wrapper", [False, True])
@pytest.mark.parametrize("with_parent", [False, True])
def test_hooks_of_the_state_dict_run_once_wherever_they_are_registered(with_wrapper, with_parent):
    model, seen = nn.Linear(8, 2), []
    tuned = stand_in(model)
    registered = tuned if with_wrapper else model
    for name in (
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    ):
        register = getattr(registered, f"register_{name}_hook")
        register(lambda *given, name=name: seen.append(name))
    root = nn.Sequential(tuned) if with_parent else tuned
    saved = root.state_dict()
    assert seen == ["state_dict_pre", "state_dict_post"]
    root.load_state_dict(saved)
    assert seen[2:] == ["load_state_dict_pre", "load_state_dict_post"]


def test_apply_reaches_the_model_itself(x, serving):
    linear = nn.Linear(8, 2).eval()
    tuned = TunedModule(linear, serving(CANDIDATES["inference_mode"], x))
    seen = []
    assert tuned.apply(seen.append) is tuned
    assert seen == [linear]


def test_hooks_of_the_wrapper_run(x, tuned):
    seen = []
    tuned.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    tuned(x)
    assert seen == [(2, 2)]


class Watching:
    """Sees calls of a module that it holds."""

    def __init__(self, module):
        self.module, self.seen = module, []

    def see(self, module, *given):
        self.seen.append(module)


def test_a_deep_copy_has_the_wrappers_own_hooks(x, tuned):
    watching = Watching(tuned)
    kwargs = {"with_kwargs": True, "always_call": True}
    tuned.register_forward_pre_hook(watching.see)
    handle = tuned.register_forward_hook(watching.see, **kwargs)
    tuned.register_full_backward_hook(watching.see)
    copied = copy.deepcopy(watching)
    other = copied.module
    assert isinstance(other, TunedModule)
    other(x)
    assert copied.seen == [other, other]
    assert watching.seen == []
    handle.remove()
    other(x)
    assert copied.seen == [other] * 4
    assert other.report().calls == {"tuned": 2}
    tuned(x)
    assert watching.seen == [tuned]
    with pytest.raises(RuntimeError, match="both regular backward hooks and full"):
        other.register_backward_hook(watching.see)


def test_a_handle_that_is_copied_beside_the_module_removes_the_copys_hook(tuned):
    tuned.register_forward_hook(lambda *given: None)
    handle = tuned.register_forward_hook(lambda *given: None)
    other, copied = copy.deepcopy((tuned, handle))
    copied.remove()
    assert [len(each.__dict__["_forward_hooks"]) for each in (other, tuned)] == [1, 2]


@pytest.mark.usefixtures("hooked_anyway")
def test_hooks_of_the_model_run_in_the_executor(model, x, tuned):
    model.register_forward_hook(lambda module, args, output: output * 0)
    assert tuned(x).abs().max() == 0
    assert tuned.report().calls == {"tuned": 1}


class Collides(Network):
    """A model that has attributes of the wrapper's names."""

    def __init__(self):
        super().__init__()
        self._weights = "mine"
        self._off = "mine too"

    def report(self):
        return "the model's"

    def close(self):
        raise AssertionError("the model's own close")

    def forward(self, x):
        assert (self.report(), self._weights, self._off) == ("the model's", "mine", "mine too")
        return super().forward(x)


def test_the_wrappers_own_names_come_first_and_the_model_keeps_its_own(x, serving):
    model = Collides().eval()
    tuned = TunedModule(model, serving(CANDIDATES["all"], x))
    torch.testing.assert_close(tuned(x), answer(model, x))
    assert tuned.report().calls == {"tuned": 1}
    tuned.close()
    assert torch.equal(tuned(x), model(x))
    assert model.report() == "the model's"
    assert (model._weights, model._off) == ("mine", "mine too")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # scripting itself is deprecated
def test_a_scripted_model_is_served(x, serving):
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())).eval()
    tuned = TunedModule(scripted, serving(CANDIDATES["inference_mode"], x))
    assert torch.equal(tuned(x), answer(scripted, x))
    assert tuned.report().calls == {"tuned": 1}
    assert list(tuned.state_dict()) == list(scripted.state_dict())


def test_a_model_without_its_parameters_yet_is_run(x, serving):
    model = nn.LazyLinear(2)
    tuned = TunedModule(model.eval(), serving(CANDIDATES["inference_mode"], x))
    assert tuned(x).shape == (2, 3, 8, 2)
    assert torch.equal(tuned(x), model(x))


def stand_in(model):
    return TunedModule(model, always(CANDIDATES["inference_mode"]))


def test_the_call_signatures_are_the_models(model, tuned):
    assert inspect.signature(tuned.forward) == inspect.signature(model.forward)
    assert [*inspect.signature(tuned.forward).parameters] == ["x", "scale"]
    assert inspect.signature(tuned) == inspect.signature(model)
    assert tuned.forward.__name__ == "forward"
    assert "resolve" in inspect.signature(TunedModule).parameters


def test_the_signature_of_an_instance_forward_is_shown(model):
    model.forward = lambda images, *, scale=2.0: Network.forward(model, images, scale)
    assert str(inspect.signature(stand_in(model).forward)) == "(images, *, scale=2.0)"


def test_the_signature_of_a_callable_is_shown():
    def double(x, by=2):
        return x * by

    assert str(inspect.signature(stand_in(as_module(double)))) == "(x, by=2)"


def test_forward_itself_is_served_tuned(model, x, tuned):
    assert torch.equal(tuned.forward(x), tuned(x))
    assert tuned.report().calls == {"tuned": 2}


CONTAINERS = {
    "sequential": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    "list": lambda: nn.ModuleList([nn.Linear(8, 8), nn.ReLU()]),
    "dict": lambda: nn.ModuleDict({"0": nn.Linear(8, 8), "1": nn.ReLU()}),
    "parameters": lambda: nn.ParameterDict({"0": torch.ones(2), "1": torch.ones(1)}),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_are_the_models(kind):
    model = CONTAINERS[kind]()
    tuned, key = stand_in(model), 0 if kind in ("sequential", "list") else "0"
    assert len(tuned) == 2
    assert tuned[key] is model[key]
    assert [*tuned] == [*model]
    assert [*model][1] in tuned
    assert object() not in tuned
    for ability in (Sized, Iterable, Reversible):
        assert isinstance(tuned, ability) is isinstance(model, ability)
    del tuned[key]
    assert (len(tuned), len(model)) == (1, 1)


def test_layers_are_sliced_replaced_and_added_as_in_the_model(x):
    model = CONTAINERS["sequential"]().eval()
    tuned = stand_in(model)
    assert torch.equal(tuned(x), answer(model, x))
    assert [*tuned[:1]] == [model[0]]
    tuned[0] = nn.Linear(8, 4)
    assert tuned.report().off == (
        "__setitem__ was called after the plan was applied; refresh() serves tuned again"
    )
    assert torch.equal(tuned(x), model(x))
    before = tuned
    tuned += nn.Sequential(nn.Flatten())
    assert tuned is before
    assert type(model[-1]) is nn.Flatten
    assert type(tuned + nn.Sequential(nn.ReLU())) is nn.Sequential


@pytest.mark.parametrize("use", [len, iter, reversed, lambda m: m[0], lambda m: 0 in m])
def test_missing_special_methods_raise_type_error(model, tuned, use):
    for each in (model, tuned):
        with pytest.raises(TypeError):
            use(each)
    assert not [n for n in ("__len__", "__iter__", "__contains__") if hasattr(tuned, n)]
    assert not isinstance(tuned, Sized)
    assert bool(tuned)


class Opened(nn.Identity):
    """A model that is a context manager, and has a number."""

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *raised):
        self.is_open = False

    def __float__(self):
        return 0.5


def test_other_special_methods_are_the_models_and_what_they_return_of_it_is_the_wrapper():
    model = Opened()
    tuned = stand_in(model)
    with tuned as inside:
        assert inside is tuned
        assert model.is_open
    assert not model.is_open
    assert float(tuned) == 0.5


def test_copies_have_the_special_methods_of_their_models():
    tuned = stand_in(CONTAINERS["sequential"]().eval())
    for other in (copy.deepcopy(copy.deepcopy(tuned)), pickle.loads(pickle.dumps(tuned))):
        assert isinstance(other, TunedModule)
        assert type(other) is type(tuned)
        assert len(other) == 2
        assert repr(other) == repr(tuned)
    assert repr(tuned).startswith("TunedModule(Sequential(\n  (0): Linear(")


# -- the model's class --------------------------------------------------------------------------


class Pretrained(nn.Module):
    """What libraries look for before they save a model with its configuration."""

    def save_pretrained(self) -> str:
        return type(self).__name__


class Classifier(Pretrained):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)


def test_it_is_an_instance_of_the_models_class_and_of_its_own():
    tuned = TunedModule(Classifier().eval(), always(()))
    assert isinstance(tuned, Pretrained)
    assert isinstance(tuned, TunedModule)
    assert not isinstance(tuned, nn.Linear)
    assert tuned.__class__ is Classifier
    assert tuned._get_name() == "Classifier"
    assert tuned.save_pretrained() == "Classifier"
    assert "save_pretrained" in dir(tuned)
    assert type(tuned) is TunedModule
    assert repr(tuned).startswith("TunedModule(")


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda tuned: pickle.loads(pickle.dumps(tuned))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_keep_both_classes(copied):
    tuned = TunedModule(Classifier().eval(), always(()))
    made = copied(tuned)
    assert type(made) is TunedModule
    assert isinstance(made, Classifier)
    assert torch.equal(made(torch.ones(1, 3)), tuned(torch.ones(1, 3)))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace", "ignore:.*deprecated")
def test_compilers_accept_the_wrapper():
    model = Classifier().eval()
    tuned, x = TunedModule(model, always(())), torch.ones(1, 3)
    assert torch.equal(torch.compile(tuned, backend="eager")(x), model(x))
    scripted = torch.jit.trace(model, x)
    assert isinstance(TunedModule(scripted, always(())), torch.jit.ScriptModule)


def test_a_class_that_is_set_is_the_models():
    model = Classifier().eval()
    tuned = TunedModule(model, always(()))
    tuned.__class__ = type("Other", (Classifier,), {})
    assert type(model).__name__ == "Other"
    assert type(tuned) is TunedModule
    assert tuned.report().off == (
        "its class was changed after the plan was applied; refresh() serves tuned again"
    )


def test_a_function_lends_no_class():
    tuned = TunedModule(as_module(torch.neg), always(()))
    assert tuned.__class__ is TunedModule


# -- other methods ------------------------------------------------------------------------------


class Generator(Classifier):
    def generate(self, x, steps: int = 2):
        """Runs itself some times."""
        for _ in range(steps):
            self(x)
        return self._private()

    def _private(self):
        return "done"


def test_calls_of_other_methods_are_reported_as_untouched():
    model = Generator().eval()
    tuned, x = TunedModule(model, always(())), torch.ones(1, 3)
    assert tuned.generate(x) == tuned.generate(x, steps=1) == "done"
    tuned(x)
    tuned._private()
    report = tuned.report()
    assert report.methods == {"generate": 2}
    assert sum(report.calls.values()) == 1
    assert "other methods of the model run untouched: generate (2)" in str(report)


def test_a_wrapper_that_is_never_called_says_so_and_names_what_was_called():
    tuned, x = TunedModule(Generator().eval(), always(())), torch.ones(1, 3)
    assert str(tuned.report()).startswith("never called")
    tuned.generate(x)
    first, called = str(tuned.report()).splitlines()[:2]
    assert first == "never called: call this module in place of the model"
    assert called == "  other methods of the model run untouched: generate (1)"


def test_forward_of_the_wrapper_is_a_call_of_it():
    tuned, x = TunedModule(Generator().eval(), always(())), torch.ones(1, 3)
    tuned.forward(x)
    report = tuned.report()
    assert (sum(report.calls.values()), report.methods) == (1, {})


def test_a_forward_set_on_the_wrapper_is_called():
    tuned, x = TunedModule(Generator().eval(), always(())), torch.ones(1, 3)
    expected, served = tuned(x), tuned.forward
    tuned.forward = lambda *args: 2 * served(*args)  # as accelerate wraps it in autocast
    assert torch.equal(tuned(x), 2 * expected)
    assert sum(tuned.report().calls.values()) == 2


def test_a_mark_of_a_library_ends_no_plan():
    model = Generator().eval()
    tuned = TunedModule(model, always(()))
    tuned._is_accelerate_prepared = True
    assert tuned.report().off is None
    assert tuned._is_accelerate_prepared
    assert not hasattr(model, "_is_accelerate_prepared")


def test_looking_at_a_method_is_no_call_of_it():
    model = Generator().eval()
    tuned = TunedModule(model, always(()))
    assert hasattr(tuned, "generate")
    assert tuned.generate == tuned.generate
    assert tuned.generate.__self__ is model
    assert tuned.generate.__doc__ == "Runs itself some times."
    assert inspect.signature(tuned.generate) == inspect.signature(model.generate)
    assert inspect.ismethod(tuned.generate)
    assert pickle.loads(pickle.dumps(tuned.generate))(torch.ones(1, 3)) == "done"
    assert tuned.report().methods == {}


def test_a_method_that_raises_is_counted_and_raises():
    tuned = TunedModule(Generator().eval(), always(()))
    with pytest.raises(TypeError, match="missing 1 required"):
        tuned.generate()
    assert tuned.report().methods == {"generate": 1}


def test_compiled_methods_are_the_models():
    tuned = TunedModule(Generator().eval(), always(()))

    def step(x):
        return tuned.save_pretrained()

    assert torch.compile(step, backend="eager")(torch.ones(1)) == "Generator"


def test_no_method_is_looked_up_to_serve_a_call(monkeypatch):
    tuned = TunedModule(Generator().eval(), always(()))
    seen = []
    monkeypatch.setattr(ModuleProxy, "__getattr__", lambda self, name: seen.append(name))
    tuned(torch.ones(1, 3))
    tuned(torch.ones(1, 3))
    assert seen == []
