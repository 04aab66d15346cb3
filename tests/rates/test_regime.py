from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from steadytorch.ledger.ledger import CPU_SLICES, SLICES, Ledger, Owned
from steadytorch.rates.regime import REGIMES, regime_of
from steadytorch.results.explain import Line, Roofline
from steadytorch.traces.steps import Step


def ledger(kind="gpu", **slices):
    """A ledger of one step of these slices."""
    names = SLICES if kind == "gpu" else CPU_SLICES
    filled = {name: slices.get(name, 0) for name in names}
    step = Step(0, "ProfilerStep#0", 0, sum(filled.values()), filled)
    none = np.empty(0, np.int64)
    return Ledger(
        (step,), Owned(none, none, none, none), None, kind, np.zeros(1, np.int64), names, 0
    )


def lines(memory, compute, share):
    each = [("memory", memory), ("compute", compute)]
    return Roofline(
        lines=tuple(
            Line(name=b, count=1, time_ns=t, share=0.5, known_ns=t, bound=b) for b, t in each
        ),
        steps=1,
        busy_ns=memory + compute,
        known_ns=memory + compute,
        least_ns=0,
        share_of_limit=share,
    )


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ({"gpu_kernel": 8, "idle_launch": 92}, "launch-bound"),
        (
            {"gpu_kernel": 56, "gpu_memcpy": 1, "idle_data_wait": 33, "idle_launch": 10},
            "input-bound",
        ),
        (
            {"gpu_kernel": 60, "idle_synchronisation": 30, "idle_launch": 10},
            "synchronisation-bound",
        ),
        ({"gpu_kernel": 60, "idle_compile": 20, "idle_gc": 20}, "host-bound"),
        ({"gpu_kernel": 10, "idle_launch": 27, "unknown": 63}, "unclassified"),
        ({"gpu_kernel": 30, "gpu_communication": 60, "idle_launch": 10}, "communication-bound"),
        ({"gpu_kernel": 30, "gpu_memcpy": 60, "gpu_memset": 5, "idle_launch": 5}, "copy-bound"),
        ({"gpu_kernel": 97, "idle_launch": 3}, "kernel-bound"),
    ],
)
def test_what_takes_the_step_names_the_regime(slices, expected):
    assert regime_of(ledger(**slices)) == expected


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ({"cpu_compute": 30, "cpu_python": 70}, "python-bound"),
        ({"cpu_compute": 60, "cpu_data_wait": 40}, "input-bound"),
        ({"cpu_compute": 60, "cpu_waiting": 40}, "synchronisation-bound"),
        ({"cpu_elementwise": 20, "cpu_copy": 80}, "copy-bound"),
        ({"cpu_compute": 90, "cpu_elementwise": 10}, "kernel-bound"),
    ],
)
def test_on_the_cpu_operators_and_what_delays_them_do(slices, expected):
    assert regime_of(ledger("cpu", **slices)) == expected


@pytest.mark.parametrize(
    ("memory", "compute", "share", "expected"),
    [
        (70, 30, 0.6, "memory-bound"),
        (30, 70, 0.6, "compute-bound"),
        (30, 70, 0.2, "kernel-bound"),
        (30, 70, None, "kernel-bound"),
    ],
)
def test_kernels_near_a_limit_are_bound_by_it(memory, compute, share, expected):
    assert regime_of(ledger(gpu_kernel=100), lines(memory, compute, share)) == expected


def test_limits_of_a_small_part_of_the_time_name_no_regime():
    known = lines(30, 10, 0.9)
    slow = replace(known, busy_ns=2 * known.known_ns + 1)
    assert regime_of(ledger(gpu_kernel=100), known) == "memory-bound"
    assert regime_of(ledger(gpu_kernel=100), slow) == "kernel-bound"


def test_data_from_a_cache_is_not_bound_by_memory():
    seen = lines(70, 30, 3.0)
    memory, compute = seen.lines
    cached = replace(memory, share_of_limit=3.5)
    assert regime_of(ledger(gpu_kernel=100), replace(seen, lines=(cached,))) == "kernel-bound"
    both = replace(seen, lines=(cached, compute))
    assert regime_of(ledger(gpu_kernel=100), both) == "compute-bound"


def test_without_steps_nothing_is_told():
    assert regime_of(None) == "unclassified"
    assert regime_of(ledger()) == "unclassified"


def test_every_regime_has_words():
    assert all(REGIMES.values())
