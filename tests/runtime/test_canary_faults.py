from __future__ import annotations

from random import Random

import pytest
import torch

from steadytorch.runtime.canary import SPACING

from .bench import EXPECTED, Bench, X, once

# -- wrong plans -------------------------------------------------------------------------------


def _raises():
    raise RuntimeError("broken\nin several lines")


BUFFER = torch.empty(8)
WRONG = {
    "values": (lambda: X * 3, "wrong: output 0 is off by 5.0e-01"),
    "nan": (lambda: X * float("nan"), "NaN"),
    "dtype": (lambda: (X * 2).double(), "float64"),
    "shape": (lambda: (X * 2)[None], "shape"),
    "nesting": (lambda: (X * 2,), "containers"),
    "none": (lambda: None, "expected a tensor"),
    "buffer": (lambda: BUFFER.copy_(X * 2), "two calls return the same memory"),
    "view of a buffer": (
        lambda: BUFFER.copy_(X * 2).view(2, 4).view(8),
        "two calls return the same memory",
    ),
    "raises": (_raises, "the tuned executor raised RuntimeError: broken"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_demoted_at_once_and_the_answer_is_right(name):
    tuned, words = WRONG[name]
    bench = Bench(tuned)
    canary = bench.canary()
    result, verdict = once(bench, canary)
    assert torch.equal(result, EXPECTED)
    assert not verdict.kept
    assert words in verdict.reason
    assert "\n" not in verdict.reason
    for _ in range(3):
        assert torch.equal(once(bench, canary)[0], EXPECTED)
    assert bench.calls.count("untouched") == 4


@pytest.mark.parametrize("name", [name for name in WRONG if "buffer" not in name])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_goes_wrong_is_caught_by_a_probe_in_either_order(name, seed):
    tuned, words = WRONG[name]
    bench = Bench()
    canary = bench.canary(rng=Random(seed))
    once(bench, canary)
    for _ in range(SPACING - 1):
        once(bench, canary)
    bench.tuned_model = tuned
    result, verdict = once(bench, canary)
    assert torch.equal(result, EXPECTED)
    assert not verdict.kept
    assert words in verdict.reason


def test_a_plan_that_is_right_only_once_is_caught():
    answers = iter([X * 2, X * 3])
    bench = Bench(lambda: next(answers))
    result, verdict = once(bench, bench.canary())
    assert torch.equal(result, EXPECTED)
    assert not verdict.kept


def test_aliasing_is_allowed_where_it_was_asked_for():
    bench = Bench(WRONG["buffer"][0])
    assert bench.until_settled(bench.canary(alias_outputs=True))[0].kept


@pytest.mark.parametrize("inputs", [(), (X,)])
def test_memory_that_the_model_itself_returns_is_allowed(inputs):
    given = X if inputs else BUFFER
    bench = Bench(lambda: (given, X * 2), lambda: (given, X * 2))
    assert bench.until_settled(bench.canary(), inputs=inputs)[0].kept


def test_an_executor_that_writes_to_its_inputs_is_demoted_and_they_are_restored():
    given = torch.tensor([-1.0, float("nan"), 2.0])

    def tuned():
        result = given + 1
        given.zero_()
        return result

    before = given.clone()
    bench = Bench(tuned, lambda: given + 1)
    result, verdict = once(bench, bench.canary(), (given,))
    assert verdict.reason == "wrong: the tuned executor writes to its inputs"
    torch.testing.assert_close(given, before, equal_nan=True)
    torch.testing.assert_close(result, before + 1, equal_nan=True)


def test_inputs_made_in_inference_mode_are_restored_too():
    with torch.inference_mode():
        given = torch.ones(3)

    def tuned():
        with torch.inference_mode():
            given.zero_()
        raise RuntimeError("after writing")

    bench = Bench(tuned, lambda: given + 1)
    result, verdict = once(bench, bench.canary(), (given,))
    assert not verdict.kept
    assert given.tolist() == [1, 1, 1]
    assert result.tolist() == [2, 2, 2]


def test_a_model_that_writes_to_its_inputs_is_called_once():
    given = torch.ones(3)
    bench = Bench(lambda: given.add_(1).clone(), lambda: given.add_(1).clone())
    result, verdict = once(bench, bench.canary(), (given,))
    assert (result.tolist(), given.tolist()) == ([2, 2, 2], [2, 2, 2])
    assert bench.calls == ["untouched"]
    assert "the untouched model writes to its inputs" in verdict.reason


def test_not_twice_prevents_a_second_call():
    bench = Bench()
    canary = bench.canary(not_twice="the model draws random numbers")
    result, verdict = once(bench, canary)
    assert bench.calls == ["untouched"]
    assert torch.equal(result, EXPECTED)
    assert not verdict.kept
    assert verdict.reason == "cannot be verified: the model draws random numbers"


# -- faults ------------------------------------------------------------------------------------


def test_exceptions_of_the_model_propagate_without_a_verdict():
    bench = Bench(untouched=_raises)
    canary = bench.canary()
    with pytest.raises(RuntimeError, match="broken"):
        once(bench, canary)
    assert bench.calls == ["untouched"]
    assert canary.verdict is None
    bench.untouched_model = lambda: X * 2
    assert bench.until_settled(canary)[0].kept


@pytest.mark.parametrize("seed", range(3))
def test_inputs_that_both_sides_reject_raise_in_a_probe_too(seed):
    bench = Bench()
    canary = bench.canary(rng=Random(seed))
    for _ in range(SPACING):
        once(bench, canary)
    good, bench.tuned_model, bench.untouched_model = bench.tuned_model, _raises, _raises
    with pytest.raises(RuntimeError, match="broken"):
        once(bench, canary)
    assert canary.verdict is None
    bench.tuned_model = bench.untouched_model = good
    assert bench.until_settled(canary)[0].kept


def test_the_model_is_retried_without_the_tuned_result_if_memory_is_short():
    bench = Bench()
    canary = bench.canary(rng=Random(1))  # the executor goes first
    for _ in range(SPACING):
        once(bench, canary)
    failing = iter([True, False])
    bench.untouched_model = lambda: _raises() if next(failing) else X * 2
    bench.calls.clear()
    result, verdict = once(bench, canary)
    assert bench.calls == ["tuned", "untouched", "untouched"]
    assert torch.equal(result, EXPECTED)
    assert verdict.kept
    assert verdict.reason.startswith("not timed")


def test_inputs_that_cannot_be_copied_run_untouched():
    class Stubborn(torch.Tensor):
        def clone(self):
            raise RuntimeError("no room")

    bench = Bench()
    given = torch.ones(2).as_subclass(Stubborn)
    given.detach = lambda: given
    result, verdict = once(bench, bench.canary(), (given,))
    assert torch.equal(result, EXPECTED)
    assert "no copy of the inputs, RuntimeError: no room" in verdict.reason


def test_an_interrupt_leaves_the_canary_usable():
    def interrupt():
        raise KeyboardInterrupt

    bench = Bench(interrupt)
    canary = bench.canary()
    with pytest.raises(KeyboardInterrupt):
        once(bench, canary)
    bench.tuned_model = lambda: X * 2
    assert bench.until_settled(canary)[0].kept


def test_a_clock_that_stands_still_decides_nothing():
    bench = Bench(tuned_ns=0, untouched_ns=0)
    verdict, _ = bench.until_settled(bench.canary())
    assert verdict.kept
