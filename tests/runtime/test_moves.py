"""What is done to a model through its tuned module, or to a parent, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.runtime.entries import STALE, ServingOptions
from steadytorch.runtime.module import RELOADED, TunedModule

from .conftest import CANDIDATES, always, answer, other_weights

pytestmark = pytest.mark.usefixtures("host_way")

NOTHING = {
    "to": lambda tuned: tuned.to("cpu"),
    "to dtype": lambda tuned: tuned.to(torch.float32),
    "float": lambda tuned: tuned.float(),
    "cpu": lambda tuned: tuned.cpu(),
    "a parent's to": lambda tuned: nn.Sequential(tuned).to("cpu"),
    "eval": lambda tuned: tuned.eval(),
    "train and eval": lambda tuned: tuned.train().eval(),
    "requires_grad_": lambda tuned: tuned.requires_grad_(False),
    "apply": lambda tuned: tuned.apply(lambda module: None),
    "zero_grad": lambda tuned: tuned.zero_grad(),
    "the model's own to": lambda tuned: tuned.__wrapped__.to("cpu"),
}
"""These leave the model as it is."""
LOADS = {
    "its own": lambda tuned: tuned.load_state_dict(tuned.state_dict()),
    "a copy": lambda tuned: tuned.load_state_dict(
        {name: tensor.clone() for name, tensor in tuned.state_dict().items()}
    ),
    "twice": lambda tuned: [tuned.load_state_dict(tuned.state_dict()) for _ in range(2)],
    "by a parent": lambda tuned: (lambda p: p.load_state_dict(p.state_dict()))(
        nn.Sequential(tuned)
    ),
}


@pytest.fixture
def tuned(model, x):
    tuned = TunedModule(model, always(CANDIDATES["all"]))
    tuned(x)
    return tuned


@pytest.mark.parametrize("name", NOTHING)
def test_moves_and_loads_without_a_change_keep_the_plan(tuned, x, name):
    NOTHING[name](tuned)
    tuned(x)
    assert tuned.report().calls == {"tuned": 2}


@pytest.mark.parametrize("name", LOADS)
def test_loading_equal_values_costs_one_call(model, tuned, x, name):
    LOADS[name](tuned)
    for _ in range(2):
        torch.testing.assert_close(tuned(x), answer(model, x))
    assert tuned.report().calls == {"tuned": 2, f"untouched: {RELOADED}": 1}


AFTER = {
    "in place": lambda model: model.head.weight.detach().mul_(2),
    "past the version": lambda model: model.head.weight.data.mul_(2),
    "a hook": lambda model: model.head.register_forward_hook(lambda *given: given[2] * 2),
    "a mode": lambda model: model.norm.train(),
    "an attribute": lambda model: setattr(model, "scale", 2),
    "a module": lambda model: setattr(model, "head", nn.Linear(4, 2)),
    "a replaced parameter": lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(2))),
    "other weights": lambda model: model.load_state_dict(other_weights(model)),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("change", AFTER)
def test_a_change_after_such_a_load_is_seen(model, tuned, x, load, change):
    LOADS[load](tuned)
    AFTER[change](model)
    assert torch.equal(tuned(x), answer(model, x))
    assert tuned.report().fallbacks == {STALE: 1}


def test_other_values_end_the_use_of_the_plan(model, tuned, x):
    tuned.load_state_dict(other_weights(model))
    for _ in range(2):
        assert torch.equal(tuned(x), answer(model, x))
    assert tuned.report().off.startswith("weights were loaded after the plan was applied")


def test_a_move_before_the_first_call_checks_the_plan_again(model, x):
    fits = []

    def misfit(module):
        fits.append(module.head.weight.dtype)
        return None if fits[-1] is torch.float32 else "another type"

    tuned = TunedModule(model, always(CANDIDATES["all"]), misfit)
    tuned.double()
    assert tuned.report().off == "another type"
    tuned.float()
    tuned(x)
    assert tuned.report().calls == {"tuned": 1}
    tuned.close()
    tuned.to("cpu")
    assert tuned.report().off == "closed"


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", ["inference_mode", "channels_last", "all"])
@pytest.mark.parametrize("load", LOADS)
def test_such_a_load_ends_no_trial(model, x, name, load):
    tuned = TunedModule(model, always(CANDIDATES[name]), options=ServingOptions(canary=True))
    for _ in range(3):
        tuned(x)
    for _ in range(3):
        LOADS[load](tuned)
        for _ in range(6):
            torch.testing.assert_close(tuned(x), answer(model, x))
    report = tuned.report()
    assert report.off is None
    assert report.fallbacks.keys() <= {RELOADED, "the canary is checking the plan"}
    assert report.hits >= 3 + 3 * 5 - 5


def test_a_live_executor_stays_on_trial_after_outside_writes(model, x):
    live = CANDIDATES["inference_mode"]
    tuned = TunedModule(model, always(live), options=ServingOptions(canary=True))
    for _ in range(20):
        torch.testing.assert_close(tuned(x), answer(model, x))
        with torch.no_grad():
            model.head.weight.mul_(1.1)
        model.head.bias.data.add_(0.1)
    assert tuned.report().off is None
    assert tuned.report().hits >= 15


def test_a_move_to_where_the_model_is_after_others_have_written_to_it(model, x):
    tuned = TunedModule(model, always(CANDIDATES["inference_mode"]))
    tuned(x)
    with torch.no_grad():
        model.head.weight.mul_(2)
    for name in NOTHING:
        NOTHING[name](tuned)
        torch.testing.assert_close(tuned(x), answer(model, x))
    assert tuned.report().calls == {"tuned": 1 + len(NOTHING)}
