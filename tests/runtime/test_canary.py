from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event

import pytest
import torch

from steadytorch.errors import UsageError
from steadytorch.runtime.canary import LOOKS, SPACING, Canary

from .bench import EXPECTED, Bench, X, once

# -- good plans --------------------------------------------------------------------------------


def test_a_faster_plan_is_kept():
    bench = Bench()
    canary = bench.canary()
    verdict, results = bench.until_settled(canary)
    assert verdict.kept
    assert verdict.reason.startswith("faster against the untouched model: -2")
    assert (verdict.judgement.verdict, verdict.judgement.pairs) == ("faster", LOOKS[0])
    assert verdict.probes == LOOKS[0] + 1
    assert all(torch.equal(result, EXPECTED) for result in results)
    assert canary.verdict == verdict


def test_an_undecided_plan_is_kept_and_the_detectable_effect_is_named():
    bench = Bench(tuned_ns=1000)
    verdict, _ = bench.until_settled(bench.canary())
    assert verdict.kept
    assert verdict.judgement.pairs == LOOKS[-1]
    assert "not shown to be slower" in verdict.reason
    assert "% more would have been found" in verdict.reason


@pytest.mark.parametrize("tuned_ns", [800, 1000])
def test_the_number_of_extra_calls_is_bounded(tuned_ns):
    bench = Bench(tuned_ns=tuned_ns)
    verdict, results = bench.until_settled(bench.canary())
    assert bench.calls.count("untouched") == verdict.probes <= 1 + LOOKS[-1]
    assert bench.calls.count("tuned") == len(results) + 1


def test_probes_are_spaced_and_in_random_order():
    bench = Bench()
    bench.until_settled(bench.canary())
    calls = " ".join(bench.calls).replace("untouched", "u").replace("tuned", "t").replace(" ", "")
    assert calls.startswith("utt" + "t" * (SPACING - 1))
    gaps = [len(gap) for gap in calls[3:].split("u")[:-1]]
    assert max(gaps) == SPACING + 1
    assert set(gaps) >= {SPACING - 1, SPACING}


def test_once_kept_only_the_executor_runs():
    bench = Bench()
    canary = bench.canary()
    verdict, _ = bench.until_settled(canary)
    bench.calls.clear()
    for _ in range(10):
        assert once(bench, canary)[1] == verdict
    assert bench.calls == ["tuned"] * 10


def test_the_first_check_is_not_timed():
    """What is slow when first called, as everything compiled is, is not judged by it."""
    bench = Bench()
    bench.tuned_ns = 1e9
    canary = bench.canary()
    once(bench, canary)
    bench.tuned_ns = 800
    assert bench.until_settled(canary)[0].judgement.estimate == pytest.approx(-0.2, abs=0.02)


# -- slow plans --------------------------------------------------------------------------------


def test_a_slower_plan_is_demoted_with_the_figures():
    bench = Bench(tuned_ns=1200)
    canary = bench.canary()
    verdict, results = bench.until_settled(canary)
    assert not verdict.kept
    assert verdict.reason.startswith("slower than the untouched model: +")
    assert verdict.judgement.low > 0.1
    assert "12 pairs" in verdict.reason
    assert all(torch.equal(result, EXPECTED) for result in results)
    bench.calls.clear()
    assert once(bench, canary)[1] == verdict
    assert bench.calls == ["untouched"]


def test_equals_are_rarely_called_slower():
    demoted = 0
    for seed in range(60):
        bench = Bench(tuned_ns=1000, seed=seed)
        verdict, _ = bench.until_settled(bench.canary(rng=Random(seed)))
        demoted += not verdict.kept
    assert demoted <= 3


def _spin(nanoseconds):
    end = time.perf_counter_ns() + nanoseconds
    while time.perf_counter_ns() < end:
        pass
    return X * 2


def test_a_plan_that_is_really_slow_is_demoted():
    canary, verdict = Canary(1e-4), None
    while verdict is None:
        result, verdict = canary.step(lambda: _spin(3_000_000), lambda: _spin(300_000), "cpu")
        assert torch.equal(result, EXPECTED)
    assert not verdict.kept
    assert verdict.judgement.low > 0


@pytest.mark.parametrize("options", [{"looks": ()}, {"spacing": 0}])
def test_invalid_settings_are_refused(options):
    with pytest.raises(UsageError, match="a canary needs"):
        Canary(1e-4, **options)


# -- threads -----------------------------------------------------------------------------------


def _while_a_probe_runs(bench, canary):
    """The calls of a second thread while the first is inside the executor."""
    entered, leave = Event(), Event()

    def blocking():
        entered.set()
        assert leave.wait(60)
        return X * 2

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(canary.step, blocking, lambda: X * 2, "cpu")
        assert entered.wait(60)
        bench.calls.clear()
        result, verdict = canary.step(bench.tuned, bench.untouched, "cpu")
        leave.set()
        assert torch.equal(first.result()[0], EXPECTED)
    assert torch.equal(result, EXPECTED)
    assert verdict is None
    return bench.calls


def test_before_the_first_check_other_threads_are_served_untouched():
    bench = Bench()
    assert _while_a_probe_runs(bench, bench.canary()) == ["untouched"]


def test_after_it_other_threads_are_served_tuned():
    bench = Bench()
    canary = bench.canary(spacing=1)
    once(bench, canary)
    assert _while_a_probe_runs(bench, canary) == ["tuned"]


def test_many_threads_settle_once_and_never_see_a_wrong_result():
    wrong = Event()
    canary = Canary(1e-4, spacing=1)

    def work(thread):
        seen = set()
        for _ in range(200):
            result, verdict = canary.step(
                lambda: X * 3 if wrong.is_set() else X * 2, lambda: X * 2, "cpu"
            )
            assert torch.equal(result, EXPECTED)
            seen.add(verdict)
        return seen - {None}

    wrong.set()
    with ThreadPoolExecutor(4) as pool:
        verdicts = set().union(*pool.map(work, range(4)))
    assert len(verdicts) == 1
    assert not verdicts.pop().kept
