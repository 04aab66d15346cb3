from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.runtime.module import TunedModule

from .conftest import (
    CANDIDATES,
    Network,
    answer,
    other_weights,
)


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


def test_what_is_registered_is_registered_with_the_model(model, tuned):
    tuned.register_buffer("mask", torch.ones(1))
    tuned.extra = nn.Linear(1, 1)
    tuned.scale = nn.Parameter(torch.ones(1))
    assert {"mask", "scale", "extra.weight"} <= model.state_dict().keys()
    assert tuned.state_dict().keys() == model.state_dict().keys()


def test_state_is_loaded_into_the_model(model, tuned):
    other = other_weights(model)
    assert tuned.load_state_dict(other).missing_keys == []
    assert torch.equal(model.head.bias, other["head.bias"])


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
