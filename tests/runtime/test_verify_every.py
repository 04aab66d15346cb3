"""Every N-th call is compared with the untouched model."""

from __future__ import annotations

import threading
from weakref import WeakSet

import pytest
import torch
from torch import nn

from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import canary, probation, settings
from steadytorch.runtime.entries import ServingOptions, parse_verify_every
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.trained import TrainedModule

from .conftest import CANDIDATES, COPYING, Network, always, answer, entries_of

LAYOUT = (TransformSpec("channels_last"),)


def checked(model, candidate, every, **options):
    return TunedModule(
        model,
        always(candidate),
        options=ServingOptions(verify_every=every, canary=False, **options),
    )


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 10.0


@pytest.mark.parametrize("name", COPYING)
def test_a_change_out_of_sight_is_found_by_the_next_check(model, x, name):
    tuned = checked(model, CANDIDATES[name], 4)
    answer(tuned, x)  # watched, and none of the calls that are counted
    model.norm.__class__ = Shifted
    expected = answer(model, x)
    found = [answer(tuned, x) for _ in range(6)]
    assert not any(torch.allclose(each, expected, atol=0.05) for each in found[:3])
    assert all(torch.equal(each, expected) for each in found[3:])
    reasons = "".join(tuned.report().fallbacks)
    assert "demoted: wrong: output 0 is off by" in reasons


@pytest.mark.usefixtures("hooked_anyway")
def test_what_agrees_is_served_on_and_the_checks_are_counted(model, x):
    calls = []
    model.register_forward_hook(lambda *given: calls.append(1))
    tuned = checked(model, CANDIDATES["inference_mode"], 3)
    for _ in range(10):
        assert torch.equal(answer(tuned, x), answer(model, x))
    report = tuned.report()
    assert (report.checked, report.hits, report.misses) == (3, 10, 0)
    assert len(calls) == 10 + 10 + 3
    assert "compared with the untouched model every 3 calls: 3 so far" in str(report)


def test_by_default_nothing_is_checked_and_the_report_says_how(model, x):
    tuned = TunedModule(model, always(LAYOUT))
    for _ in range(5):
        answer(tuned, x)
    assert (tuned.report().checked, tuned.report().verify_every) == (0, None)
    assert "verify_every=1000" in str(tuned.report())


class Cached(Network):
    def forward(self, x, cache):
        cache["calls"] = cache["calls"] + 1
        return super().forward(x)


def test_a_checked_call_writes_once_to_what_its_caller_passed(x):
    torch.manual_seed(0)
    tuned, cache = checked(Cached().eval(), LAYOUT, 1), {"calls": torch.zeros(())}
    for n in range(5):
        answer(tuned, x, cache)
        assert cache["calls"] == n + 1
    assert tuned.report().checked == 4
    assert tuned.report().hits == 5


def test_where_others_are_busy_a_call_goes_unchecked(model, x):
    tuned = checked(model, LAYOUT, 1)
    answer(tuned, x)
    with settings.TURNS:
        thread = threading.Thread(target=answer, args=(tuned, x))
        thread.start()
        thread.join(60)
    assert (tuned.report().checked, tuned.report().hits) == (0, 2)


TOO_LARGE: WeakSet[nn.Module] = WeakSet()
"""Not a list, whose items would be watched because the model reads it."""


class Large(Network):
    def forward(self, x):
        if self in TOO_LARGE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_without_memory_for_the_model_the_executor_answers(x):
    model = Large().eval()
    tuned = checked(model, LAYOUT, 1)
    expected = answer(tuned, x)
    TOO_LARGE.add(model)
    assert torch.equal(answer(tuned, x), expected)
    assert tuned.report().hits == 2


def test_training_steps_are_gone_through_anew(model, x):
    tuned = TrainedModule(
        model.train(), always(LAYOUT), options=ServingOptions(trains=True, verify_every=3)
    )
    before = [b.clone() for b in model.buffers()]
    for _ in range(5):
        tuned(x).sum().backward()
    assert (tuned.report().checked, tuned.report().hits) == (1, 5)
    assert int(model.norm.num_batches_tracked) == int(before[-1]) + 5
    (entry,) = entries_of(tuned)
    object.__setattr__(entry.executor, "call", lambda x: model(x) * 3)
    for _ in range(2):
        tuned(x)
    assert "wrong: output 0 is off" in str(tuned.report())


@pytest.mark.parametrize("every", [0, -1, 1.5, "10", True])
def test_what_is_no_number_of_calls_is_refused(every):
    with pytest.raises(UsageError, match="verify_every must be a number of calls, 1 or more, got"):
        parse_verify_every(every)


def test_random_numbers_of_other_threads_are_not_taken_for_the_model_s(model, x, monkeypatch):
    tuned = checked(model, LAYOUT, 1)
    answer(tuned, x)
    monkeypatch.setattr(probation.Draws, "happened", lambda self: True)
    for _ in range(3):
        answer(tuned, x)
    assert (tuned.report().off, tuned.report().checked, tuned.report().hits) == (None, 3, 4)


@pytest.mark.parametrize("at", ["the executor", "the comparison"])
def test_without_memory_for_both_answers_the_plan_stays(model, x, monkeypatch, at):
    tuned = checked(model, LAYOUT, 1)
    expected = answer(tuned, x)
    (entry,) = entries_of(tuned)
    call, calls = entry.call, []

    def full(*given):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(*given)

    if at == "the executor":
        entry.call = full
    else:
        monkeypatch.setattr(canary, "disagreement", full)
    assert torch.equal(answer(tuned, x), expected)
    assert (tuned.report().checked, tuned.report().hits, tuned.report().misses) == (1, 2, 0)
