from __future__ import annotations

import numpy as np

from steadytorch.findings.finding import Abstention
from steadytorch.rules.memory_growth import NAME, rule

from ..findings.cases import noise, the, timed

MIB = 1 << 20


def growing(rise, start=1000 * MIB):
    times = noise(1000)
    total = float(np.sum(times))
    return timed(times, device="cpu", resident_bytes=lambda at: start + rise * (at / total))


def test_growth_is_reported_by_step():
    found = the(rule(growing(500 * MIB)))
    assert found.id == NAME
    assert "0.524 MB a step" in found.title


def test_little_or_unsteady_growth_is_not():
    assert rule(growing(20 * MIB)) == ()
    assert rule(growing(0)) == ()
    times = noise(1000)
    sawtooth = timed(times, device="cpu", resident_bytes=lambda at: 10**9 + at % 10**9)
    assert rule(sawtooth) == ()


def test_a_heap_that_fills_up_is_no_leak():
    times = noise(1000)
    total = float(np.sum(times))
    filling = timed(
        times,
        device="cpu",
        resident_bytes=lambda at: 1000 * MIB + 500 * MIB * (1 - np.exp(-5 * at / total)),
    )
    assert rule(filling) == ()
    step = timed(times, device="cpu", resident_bytes=lambda at: 10**9 * (1 + (at > at[-1] / 2)))
    assert rule(step) == ()


def test_growth_that_the_heap_holds_free_is_no_leak():
    times = noise(1000)
    total = float(np.sum(times))

    def grown(free):
        return timed(
            times,
            device="cpu",
            resident_bytes=lambda at: 1000 * MIB + 500 * MIB * (at / total),
            heap_free_bytes=lambda at: free * MIB * (at / total),
        )

    assert rule(grown(free=500)) == ()
    assert the(rule(grown(free=100))).confidence == "high"
    assert the(rule(growing(500 * MIB))).confidence == "medium"  # free bytes unknown


def test_without_a_recording_it_abstains():
    assert isinstance(rule(timed(noise(100), unknown={"resident_bytes": "no"})), Abstention)
