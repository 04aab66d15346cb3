import dataclasses

import pytest

from steadytorch.device.recording import Recording, mask_of
from steadytorch.errors import UsageError
from steadytorch.ledger.conditions import Conditions, join, unusual
from steadytorch.ledger.ledger import build_ledger

from ..traces import synthetic as syn

MS = 1_000_000


def joined(recording):
    """Conditions of three steps of 10 ms from 0 on, where the recording's 0 is the trace's 0."""
    read = syn.trace([syn.step(n, n * 10 * MS, (n + 1) * 10 * MS) for n in range(3)])
    return join(read, build_ledger(read), recording, offset_ns=read.origin_ns)


def recording(**channels):
    """Ticks every 5 ms from 0 to 30 ms."""
    at = tuple(range(0, 31 * MS, 5 * MS))
    return Recording(device="cuda", interval_ns=5 * MS, at_ns=at, **channels)


def test_levels_are_those_within_each_step():
    mask = mask_of(("power_cap",))
    idle = mask_of(("gpu_idle",))
    found = joined(
        recording(
            sm_clock_mhz=(1980, 1980, 1500, 1400, 1980, 1980, 1980),
            power_milliwatts=(300_000,) * 7,
            clock_event_mask=(idle, 0, mask, mask, 0, 0, 0),
            other_gpu_processes=(0, 0, 0, 0, 1, 2, 0),
        )
    )
    assert [c.sm_clock_mhz for c in found] == [1980, 1450, 1980]
    assert [c.power_watts for c in found] == [300, 300, 300]
    assert [c.reasons for c in found] == [(), ("power_cap",), ()]
    assert [c.other_gpu_processes for c in found] == [0, 0, 2]


def test_counters_are_what_they_rose_by_around_each_step():
    found = joined(
        recording(
            wait_ns=(0, 0, 0, 4 * MS, 4 * MS, 4 * MS, 4 * MS),
            compilations=(0, 0, 0, 0, 0, 1, 1),
        )
    )
    assert [c.wait_ns for c in found] == [0, 4 * MS, 0]
    assert [c.compilations for c in found] == [0, 0, 1]


def test_collections_count_by_their_time_within_a_step():
    found = joined(recording(gc_start_ns=(9 * MS,), gc_duration_ns=(3 * MS,), gc_generation=(2,)))
    assert [c.gc_ns for c in found] == [MS, 2 * MS, 0]


def test_what_was_not_recorded_is_none():
    found = joined(recording())[0]
    assert found == Conditions()


def test_a_step_between_two_ticks_takes_the_last_value_before_it():
    read = syn.trace([syn.step(0, 6 * MS, 7 * MS), syn.op("aten::add", 0, 1)])
    ledger = build_ledger(read)
    found = join(
        read, ledger, recording(sm_clock_mhz=(1, 2, 3, 4, 5, 6, 7)), offset_ns=read.origin_ns
    )
    assert found[0].sm_clock_mhz == 2


def test_a_trace_without_a_time_cannot_be_joined():
    read = dataclasses.replace(syn.trace([syn.step(0, 0, 10)]), origin_ns=None)
    with pytest.raises(UsageError, match="has no start time"):
        join(read, build_ledger(read), recording(), offset_ns=0)


def test_only_what_differs_from_the_median_step_is_told():
    usual = Conditions(sm_clock_mhz=1980, steal_ns=0, gc_ns=0, other_gpu_processes=0)
    odd = Conditions(
        sm_clock_mhz=1400, reasons=("power_cap",), steal_ns=20 * MS, gc_ns=MS, other_gpu_processes=1
    )
    assert unusual([usual, usual, odd], 0) == []
    assert unusual([usual, usual, odd], 2) == [
        "SM clock 1,400 MHz, usually 1,980 MHz (held by power_cap)",
        "other virtual machines took 20.000 ms of CPU time, usually 0.000 ms",
        "garbage collection took 1.000 ms, usually 0.000 ms",
        "other processes on the GPU: 1, usually 0",
    ]
