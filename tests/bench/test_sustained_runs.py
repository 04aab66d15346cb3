from random import Random

import msgspec
import pytest

from steadytorch.bench.series import Series
from steadytorch.bench.sustained_runs import PROBE_S, ROUNDS, SUSTAINED_S, run_sustained
from steadytorch.device.recording import Recording, mask_of
from steadytorch.results.compare import SustainedRun, effect_of

MS = 1_000_000


def _series(level_ns, seconds, held=(), clocks=(1755, 1620)):
    """A run whose first half is 10 % faster, before the clock has settled."""
    count = round(seconds * 1e9 / level_ns)
    half = count // 2
    recording = Recording(
        device="cuda",
        interval_ns=10 * MS,
        clock_event_mask=(0, mask_of(held)),
        sm_clock_mhz=clocks,
    )
    return Series(
        durations_ns=[round(0.9 * level_ns)] * half + [level_ns] * (count - half),
        stretches=[(0, count)],
        host_ns=[],
        overhead_ns=0.0,
        group=1,
        resolved=False,
        recording=msgspec.to_builtins(recording),
    )


class Sides:
    def __init__(self, levels_ns, held=("power_cap",), held_side=1):
        self.levels_ns, self.held, self.held_side, self.asked = levels_ns, held, held_side, []

    def __call__(self, side, seconds):
        self.asked.append((side, seconds))
        held = self.held if side == self.held_side else ()
        return _series(self.levels_ns[side], seconds, held)


def test_without_a_power_limit_nothing_is_repeated():
    sides = Sides((10 * MS, 10 * MS), held=("gpu_idle",))
    assert run_sustained(sides, Random(0)) == ()
    assert sides.asked == [(0, PROBE_S), (1, PROBE_S)]


@pytest.mark.parametrize("held_side", [0, 1])
def test_both_sides_run_by_themselves_where_power_holds_either(held_side):
    sides = Sides((10 * MS, 12 * MS), held_side=held_side)
    found = run_sustained(sides, Random(0))
    assert sorted(run.side for run in found) == ["a"] * ROUNDS + ["b"] * ROUNDS
    assert [seconds for _, seconds in sides.asked[-len(found) :]] == [SUSTAINED_S] * len(found)


def test_the_order_within_a_round_is_drawn():
    orders = {
        tuple(run.side for run in run_sustained(Sides((10 * MS, 12 * MS)), Random(seed)))
        for seed in range(20)
    }
    assert len(orders) == 4


def test_only_what_the_clock_settled_at_counts():
    found = run_sustained(Sides((10 * MS, 12 * MS)), Random(0))
    assert {(d.side, d.median_ns, d.sm_clock_mhz) for d in found} == {
        ("a", 10 * MS, 1620),
        ("b", 12 * MS, 1620),
    }


def test_the_effect_is_the_mean_over_rounds():
    found = [SustainedRun("a", 10, 100, None), SustainedRun("b", 10, 110, None)]
    again = [SustainedRun("b", 10, 100 / 1.1, None), SustainedRun("a", 10, 100, None)]
    assert effect_of(found) == pytest.approx(0.1)
    assert effect_of([*found, *again]) == pytest.approx(0.0)
