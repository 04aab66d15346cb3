from __future__ import annotations

import numpy as np
import pytest

from steadytorch.conv.choices import ATEN
from steadytorch.conv.decide import KEPT, STEADY, pick, stays
from steadytorch.conv.timing import BENCHMARK, SCREEN_ROUNDS, Measured
from steadytorch.errors import UnsupportedError


def field(**times: float | tuple[float, int]) -> list[Measured]:
    made = []
    for name, value in times.items():
        median, workspace = value if isinstance(value, tuple) else (value, 0)
        shown = {"aten": ATEN, "benchmark": BENCHMARK}.get(name, name)
        made.append(Measured(shown, median, workspace_bytes=workspace))
    return sorted(made, key=lambda m: m.median_ns or 0.0)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"eng1": 100.0, "eng2": 102.0, "aten": 150.0}, "eng1"),
        ({"eng1": (100.0, 64), "eng2": (100.9, 0), "aten": 150.0}, "eng2"),
        ({"eng2": 100.0, "eng1": 100.5, "aten": 150.0}, "eng1"),
        ({"eng1": 100.5, "aten": 100.0}, "eng1"),
        ({"eng1": 110.0, "aten": 100.0}, "aten"),
        ({"eng1": 110.0, "aten": 120.0, "benchmark": 90.0}, "eng1"),
        ({"aten": 100.0}, "aten"),
    ],
)
def test_the_smallest_workspace_within_the_band_wins_then_the_name(times, expected):
    assert pick(field(**times)).choice == expected


def timed(name: str, median: float, spread: float | None, workspace=0, runs=40) -> Measured:
    return Measured(name, median, spread, runs, workspace_bytes=workspace)


def test_within_the_band_what_takes_two_times_by_turns_is_left_to_whoever_has_nothing_else():
    # The figures of one convolution of the U-Net on an H200: by name alone the second would win.
    steady = timed("eng41_k25=1", 135.31, 0.0023, 64)
    jumping = timed("eng41_k25=0", 136.34, 0.0698)
    assert pick([steady, jumping]) is steady
    assert pick([steady, timed("eng41_k25=0", 136.34, STEADY)]).choice == "eng41_k25=0"
    assert pick([steady, timed("eng41_k25=0", 136.34, None)]).choice == "eng41_k25=0"
    few = timed("eng41_k25=0", 136.34, 0.0698, runs=SCREEN_ROUNDS)
    assert pick([steady, few]) is few
    # Beyond the noise band, time decides.
    far = timed("eng41_k25=1", 138.59, 0.0034)
    assert pick([jumping, far]) is jumping
    assert pick([jumping, timed("eng1", 136.9, 0.05)]).choice == "eng1"


def rounds(seed, count=40, tick_ns=0.5, **medians_ns):
    """Block times with these medians and 2 % scatter, on a coarse clock."""
    rng = np.random.default_rng(seed)
    shown = {"aten": ATEN, "benchmark": BENCHMARK}
    return {
        shown.get(name, name): (
            np.ceil(rng.normal(ns, 0.02 * ns, count) / tick_ns) * tick_ns
        ).tolist()
        for name, ns in medians_ns.items()
    }


def test_in_ten_of_ten_runs_engines_that_are_as_fast_do_not_take_turns():
    def run(seed):
        return rounds(seed, tick_ns=500, eng1=2_450, eng2=2_500, eng3=2_520, aten=4_000)

    assert all(stays(run(seed), "eng2") for seed in range(10))
    # Medians alone (kernels of 2.5 us, clock of 0.5 us) would have decided otherwise.
    medians = [{name: np.median(times) for name, times in run(s).items()} for s in range(10)]
    assert any(found["eng2"] > (1 + KEPT) * min(found.values()) for found in medians)


@pytest.mark.parametrize(("slower", "kept"), [(1.0, True), (1.029, True), (1.08, False)])
def test_an_earlier_choice_leaves_where_another_is_shown_to_be_clearly_faster(slower, kept):
    found = [
        stays(rounds(seed, eng1=20_000, eng2=slower * 20_000, aten=30_000), "eng2")
        for seed in range(10)
    ]
    assert found == [kept] * 10


def test_it_leaves_for_pytorchs_own_too_and_never_for_benchmark_mode():
    assert not stays(rounds(0, eng1=20_000, aten=10_000), "eng1")
    assert stays(rounds(0, eng1=20_000, aten=21_000, benchmark=10_000), "eng1")


def test_too_few_rounds_show_nothing():
    assert stays(rounds(0, count=SCREEN_ROUNDS, eng1=10_000, eng2=20_000), "eng2")


def test_only_rounds_that_both_ran_count():
    times = rounds(0, eng1=10_000, eng2=20_000)
    assert stays({**times, "eng1": times["eng1"][:SCREEN_ROUNDS]}, "eng2")


def test_an_earlier_choice_that_is_gone_does_not_stay():
    assert not stays(rounds(0, eng1=10_000), "eng9")


def test_nothing_that_was_timed_is_nothing_to_pick_from():
    with pytest.raises(UnsupportedError, match="timing failed"):
        pick(field(benchmark=100.0))
