from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.finding import Case
from steadytorch.findings.growth import growth

from .cases import MS, launch, noise, step, timed, traced


def _kernels(lengths_ms, extra=0):
    """Steps with one kernel each, `extra` more in the last."""
    events, at, number = [], 0, 0
    for index, length in enumerate(lengths_ms):
        runs = 1 + (extra if index == len(lengths_ms) - 1 else 0)
        end = at + int(length * MS) + MS
        events.append(step(index + 1, at, end))
        for run in range(runs):
            number += 1
            begin = at + 2000 + run * int(length * MS / runs)
            gpu = (begin, begin + int(length * MS / runs))
            events += launch("k", call=(at + run, at + run + 1), gpu=gpu, correlation=number)
        at = end
    return events


def test_steps_that_only_ever_get_slower_are_seen():
    found = growth(timed(noise(200) * np.geomspace(1, 4, 200)))
    assert found is not None
    assert found.last_ns > 2 * found.first_ns


def test_kernels_that_take_longer_from_step_to_step_are_seen():
    found = growth(traced(_kernels([1, 1.1, 1.3, 1.9, 3.0])))
    assert found is not None
    assert found.blocks == 5


def test_more_kernels_are_more_work():
    assert growth(traced(_kernels([1, 1.1, 1.3, 1.9, 3.0], extra=3))) is None


def test_nothing_to_look_at_does_not_grow():
    assert growth(Case()) is None
    assert growth(traced(_kernels([1, 2, 5]))) is None


@given(st.integers(0, 10_000))
def test_noise_does_not_grow(seed):
    times = 3 * MS * np.exp(0.3 * np.random.default_rng(seed).standard_normal(300))
    assert growth(timed(times)) is None
