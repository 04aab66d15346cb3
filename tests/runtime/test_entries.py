from __future__ import annotations

import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch
from torch import nn

from steadytorch.errors import PlanError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import entries
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import BUILDING, RESOLVING, TAKEN, ServingOptions
from steadytorch.runtime.module import TunedModule

from .conftest import CANDIDATES, FROZEN, NO_PLAN, answer, copy_into, entries_of, other_weights

LIVE = (TransformSpec("inference_mode"),)
FLAGGED = (TransformSpec("cudnn_deterministic"),)


class Script:
    """Resolves by a list of answers, the last one for good."""

    def __init__(self, *answers):
        self.answers, self.seen = list(answers), []

    def __call__(self, context):
        self.seen.append(context)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_a_resolution_with_again_is_resolved_again(model, x):
    ready = iter([False, True])
    waiting = Resolution(None, "not yet", again=lambda: next(ready))
    script = Script(waiting, Resolution(LIVE))
    tuned = TunedModule(model, script)
    for _ in range(5):
        assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().calls == {"untouched: not yet": 2, "tuned": 3}
    assert len(script.seen) == 2
    (served,) = tuned.report().signatures
    assert (served.hits, served.others) == (3, 2)


def test_a_changing_detail_is_reported_as_it_is_now(model, x, caplog):
    seen = []
    tuned = TunedModule(model, Script(Resolution(None, "withheld", lambda: f"{len(seen)} of them")))
    tuned(x)
    assert "withheld: 0 of them" in caplog.text
    seen.append(x)
    assert [served.detail for served in tuned.report().signatures] == ["1 of them"]


def test_the_resolver_gets_the_whole_call(model, x):
    script = Script(Resolution(None))
    TunedModule(model, script)(x, scale=2.0)
    (context,) = script.seen
    assert context.model is model
    assert context.args[0] is x
    assert context.kwargs == {"scale": 2.0}


def test_strict_a_miss_raises_at_each_call_and_the_model_is_not_run(x):
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError

    missing = Script(Resolution(None, detail="torch was 1, is 2"))
    tuned = TunedModule(Never().eval(), missing, options=ServingOptions(strict=True))
    for _ in range(2):
        with pytest.raises(PlanError, match=r"no stored plan for Never \(.*\): torch was 1, is 2"):
            tuned(x)
    assert tuned.report().calls == {f"raised: {NO_PLAN.removeprefix('untouched: ')}": 2}


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


def test_refresh_checks_again_whether_the_plan_fits(model, x):
    reasons = iter(["it does not fit", None, None])  # asked again before the executor is built
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
    (entry,) = entries_of(tuned)
    assert entry.is_replay is (static is not None)


def test_options_default_to_the_safe_ones():
    assert ServingOptions() == (False, None, False, False, False, False, None)


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

    tuned = TunedModule(model, lambda context: Resolution(FROZEN, prebuilt=baked))
    assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().hits == 1
    change(model, x)
    for _ in range(2):
        assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().hits == 1
    tuned.refresh()
    assert torch.equal(answer(tuned, x), answer(model, x))
    # Where the change is a hook, nothing is frozen any more.
    assert tuned.report().hits == len(asked) <= 2


def test_a_source_that_fails_leaves_the_model_untouched(model, x, caplog):
    tuned = TunedModule(model, lambda context: Resolution(FROZEN, prebuilt=lambda task: 1 / 0))
    assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().hits == 0
    assert "division by zero" in caplog.text


def test_a_reason_is_warned_of_once_and_further_details_are_for_debugging(model, x, caplog):
    caplog.set_level(logging.DEBUG, "steadytorch")
    script = Script(*[Resolution(None, "withheld", f"{n} of them") for n in (1, 2, 3)])
    tuned = TunedModule(model, script)
    for size in (1, 2, 1):
        tuned(x[:size])
        tuned(x[:size, :, :4])
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "withheld" in r.getMessage()]
    assert said == [
        ("WARNING", "running untouched: withheld: 1 of them"),
        ("DEBUG", "running untouched: withheld: 2 of them"),
        ("DEBUG", "running untouched: withheld: 3 of them"),
        ("DEBUG", "running untouched: withheld: 3 of them"),
    ]


# -- other threads do not wait --------------------------------------------------------------------


class Gated:
    """Lets one thread in at first sight and holds it there until it may go on."""

    def __init__(self, do):
        self.do, self.entered, self.may_go_on, self.calls = do, Event(), Event(), 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 1:
            self.entered.set()
            assert self.may_go_on.wait(60)
        return self.do(*args, **kwargs)


@pytest.fixture
def elsewhere():
    """Makes a call in another thread and pauses it halfway."""
    with ThreadPoolExecutor(1) as pool:
        gates = []

        def call(gate, tuned, x):
            gates.append(gate)
            future = pool.submit(answer, tuned, x)
            assert gate.entered.wait(60)
            return future

        yield call
        for gate in gates:
            gate.may_go_on.set()


def finished(gate, future):
    gate.may_go_on.set()
    return future.result(60)


def test_while_an_executor_is_built_other_threads_run_untouched(model, x, monkeypatch, elsewhere):
    known = TunedModule(model, Script(Resolution(LIVE)))
    known(x)
    build = Gated(entries.build)
    monkeypatch.setattr(entries, "build", build)
    tuned, other = (TunedModule(model, Script(Resolution(LIVE))) for _ in range(2))
    future = elsewhere(build, tuned, x)
    for each in (tuned, other, known):
        for batch in (x, x, x[:1]):
            assert torch.equal(answer(each, batch), answer(model, batch))
    building, taken = f"untouched: {BUILDING}", f"untouched: {TAKEN}"
    assert tuned.report().calls == {building: 2, taken: 1}
    assert other.report().calls == {taken: 3}
    assert known.report().calls == {"tuned": 3, taken: 1}
    assert torch.equal(finished(build, future), answer(model, x))
    for each in (tuned, other):
        for batch in (x, x[:1]):
            answer(each, batch)
    assert tuned.report().calls == {"tuned": 3, building: 2, taken: 1}
    assert other.report().calls == {"tuned": 2, taken: 3}
    assert build.calls == 4


def test_while_a_plan_is_looked_for_other_threads_run_untouched_or_their_own(model, x, elsewhere):
    resolve = Gated(lambda context: Resolution(LIVE))
    tuned = TunedModule(model, resolve)
    future = elsewhere(resolve, tuned, x)
    for batch in (x, x[:1], x):
        assert torch.equal(answer(tuned, batch), answer(model, batch))
    assert tuned.report().calls == {f"untouched: {RESOLVING}": 2, "tuned": 1}
    assert torch.equal(finished(resolve, future), answer(model, x))
    assert tuned.report().hits == 2
    assert resolve.calls == 2


@pytest.mark.parametrize("canary", [True, False])
def test_while_an_executor_is_checked_other_threads_run_untouched(
    model, x, monkeypatch, elsewhere, canary
):
    def build(*args):
        executor = unpatched(*args)
        return replace(executor, call=gate if gate.calls == 0 else executor.call)

    unpatched, gate = entries.build, Gated(model)
    monkeypatch.setattr(entries, "build", build)
    tuned = TunedModule(model, Script(Resolution(LIVE)), options=ServingOptions(canary=canary))
    future = elsewhere(gate, tuned, x)
    for batch in (x, x[:1]):
        assert torch.equal(answer(tuned, batch), answer(model, batch))
    assert tuned.report().calls[f"untouched: {TAKEN}"] == 2
    finished(gate, future)


def test_strict_other_threads_wait_to_know_whether_it_is_a_miss(x, elsewhere):
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError

    resolve = Gated(lambda context: Resolution(None))
    tuned = TunedModule(Never().eval(), resolve, options=ServingOptions(strict=True))
    future = elsewhere(resolve, tuned, x)
    with ThreadPoolExecutor(1) as pool:
        also = pool.submit(tuned, x)
        resolve.may_go_on.set()
        for each in (future, also):
            with pytest.raises(PlanError, match="no plan for these inputs"):
                each.result(60)
    assert resolve.calls == 1


def test_while_flags_are_set_building_and_calling_take_turns(model, x, monkeypatch, elsewhere):
    build = Gated(entries.build)
    flagged = TunedModule(model, Script(Resolution(FLAGGED)))
    answer(flagged, x)
    monkeypatch.setattr(entries, "build", build)
    tuned = TunedModule(model, Script(Resolution(LIVE)))
    future = elsewhere(build, tuned, x)
    with ThreadPoolExecutor(1) as pool:
        also = pool.submit(answer, tuned, x[:1])
        assert torch.equal(finished(build, future), answer(model, x))
        also.result(60)
    assert tuned.report().calls == {"tuned": 2}
    flagged.close()


@pytest.mark.parametrize("where", ["resolve", "build"])
def test_interrupted_work_is_done_by_a_later_call(model, x, monkeypatch, where):
    def interrupted(*given):
        raise KeyboardInterrupt

    def resolve(context):
        return interrupted() if where == "resolve" else Resolution(LIVE)

    tuned = TunedModule(model, lambda context: resolve(context))
    with monkeypatch.context() as patch:
        patch.setattr(entries, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuned(x)
    where = ""
    assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().calls == {"tuned": 1}


def test_closing_during_a_look_up_builds_nothing(model, x, monkeypatch, elsewhere):
    built = []
    monkeypatch.setattr(entries, "build", lambda *given: built.append(given))
    resolve = Gated(lambda context: Resolution(LIVE))
    tuned = TunedModule(model, resolve)
    future = elsewhere(resolve, tuned, x)
    tuned.close()
    assert torch.equal(finished(resolve, future), answer(model, x))
    assert built == []
    assert tuned.report().signatures == ()


def test_a_pending_look_up_is_not_evicted(model, x, monkeypatch, elsewhere):
    monkeypatch.setattr(entries, "MOST_REMEMBERED", 2)
    resolve = Gated(lambda a: Resolution(LIVE if a.args[0].shape == x.shape else None))
    tuned = TunedModule(model, resolve)
    future = elsewhere(resolve, tuned, x)
    for size in range(3, 8):
        answer(tuned, x[:, :, :size])
    finished(resolve, future)
    assert tuned.report().hits == 1
