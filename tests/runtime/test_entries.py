from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from steadytorch.errors import PlanError
from steadytorch.runtime import entries
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import Options
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms.base import TransformSpec

from .conftest import CANDIDATES, FROZEN, NO_PLAN, answer, copy_into, other_weights

LIVE = (TransformSpec("inference_mode"),)


class Script:
    """Resolves by a list of answers, the last one for good."""

    def __init__(self, *answers):
        self.answers, self.seen = list(answers), []

    def __call__(self, arrival):
        self.seen.append(arrival)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_an_answer_that_asks_to_be_asked_again_is(model, x):
    ready = iter([False, False, True])
    waiting = Resolution(None, "not yet", again=lambda: next(ready))
    script = Script(waiting, Resolution(LIVE))
    tuned = TunedModule(model, script)
    for _ in range(5):
        assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().calls == {"untouched: not yet": 2, "tuned": 3}
    assert len(script.seen) == 2


def test_the_resolver_is_told_the_whole_call(model, x):
    script = Script(Resolution(None))
    TunedModule(model, script)(x, scale=2.0)
    (arrival,) = script.seen
    assert arrival.model is model
    assert arrival.args[0] is x
    assert arrival.kwargs == {"scale": 2.0}


def test_an_error_is_raised_at_each_call_and_the_model_not_run(x):
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError

    tuned = TunedModule(Never().eval(), Script(Resolution(None, error=PlanError("none"))))
    for _ in range(2):
        with pytest.raises(PlanError, match="none"):
            tuned(x)
    assert tuned.report().hits == 0


def test_details_are_logged_once_and_shown(model, x, caplog):
    tuned = TunedModule(model, Script(Resolution(None, detail="torch was 1, is 2")))
    for batch in (x, x[:1], x):
        tuned(batch)
    assert caplog.text.count("torch was 1, is 2") == 1
    assert [s.detail for s in tuned.report().signatures] == ["torch was 1, is 2"] * 2


def test_keywords_in_another_order_share_one_executor(flexible, x):
    tuned = TunedModule(flexible, Script(Resolution(LIVE)))
    tuned({"left": x}, times=2, mode="a")
    tuned({"left": x}, mode="a", times=2)
    (served,) = tuned.report().signatures
    assert served.hits == 2


def test_refreshed_it_serves_the_new_weights(model, x, serving):
    tuned = TunedModule(model, serving(CANDIDATES["all"], x))
    tuned(x)
    copy_into(model, x)
    tuned(x)
    tuned.refresh()
    torch.testing.assert_close(tuned(x), answer(model, x))
    assert tuned.report().hits == 2


def test_refreshing_asks_anew_whether_anything_fits(model, x):
    reasons = iter(["it does not fit", None])
    tuned = TunedModule(model, Script(Resolution(LIVE)), lambda model: next(reasons))
    tuned(x)
    tuned.refresh()
    tuned(x)
    assert tuned.report().calls == {"untouched: it does not fit": 1, "tuned": 1}


def test_refreshing_follows_the_mode_of_the_model(model, x):
    tuned = TunedModule(model.train(), Script(Resolution(None)))
    tuned.eval()
    tuned(x)
    tuned.refresh()
    tuned(x)
    assert tuned.report().calls[NO_PLAN] == 1


@pytest.mark.parametrize("static", [None, ((1,), {})])
def test_static_inputs_tell_a_replay(model, x, static, monkeypatch):
    build = entries.build
    monkeypatch.setattr(entries, "build", lambda *args: replace(build(*args), static=static))
    tuned = TunedModule(model, Script(Resolution(LIVE)))
    tuned(x)
    (entry,) = tuned._found.values()
    assert entry.is_replay is (static is not None)


def test_options_default_to_the_safe_ones():
    assert Options() == (False, None, False, False)


@pytest.mark.parametrize(
    "change",
    [
        copy_into,
        lambda model, x: model.load_state_dict(other_weights(model)),
        lambda model, x: model.register_forward_hook(lambda *given: None),
    ],
)
def test_code_that_was_made_before_is_never_served_with_other_weights(model, x, change):
    asked = []

    def baked(task):
        asked.append(copy.deepcopy(task.workload.untouched))
        return asked[-1].forward

    tuned = TunedModule(model, lambda arrival: Resolution(FROZEN, prebuilt=baked))
    assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().hits == 1
    change(model, x)
    for _ in range(2):
        assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().hits == 1
    tuned.refresh()
    assert torch.equal(answer(tuned, x), answer(model, x))
    assert (tuned.report().hits, len(asked)) == (2, 2)


def test_a_source_that_fails_leaves_the_model_untouched(model, x, caplog):
    tuned = TunedModule(model, lambda arrival: Resolution(FROZEN, prebuilt=lambda task: 1 / 0))
    assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().hits == 0
    assert "division by zero" in caplog.text
