"""How many samples a figure rests on."""

from __future__ import annotations

import rival_timing
from rival_arms import Arm


def test_blocks_last_ten_milliseconds_at_least():
    assert rival_timing.block_count(0.1e6, 0.1e6) == 100
    assert rival_timing.block_count(1e6, 1e6) == 10
    assert rival_timing.block_count(20e6, 20e6) == 5
    assert rival_timing.block_count(20e6, 1e6) == 3


def test_samples_in_clumps_are_not_taken_for_independent_ones():
    alone = Arm("steadytorch", None, stage="ready")
    alone.blocks["period"] = [[1_000_000] * 743 + [2_000_000] * 7] * 2
    assert rival_timing.lacks(alone, "period")
    alone.blocks["period"] = [[1_000_000 + 7 * (i * 7919 % 1501) for i in range(1500)]]
    assert not rival_timing.lacks(alone, "period")
