from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.measure.causes import MINOR_FAULT_NS
from steadytorch.rules.allocation_in_loop import NAME, rule

from ..findings.cases import (
    MS,
    US,
    launch,
    never,
    noise,
    op,
    runtime,
    steadily,
    step,
    the,
    timed,
    traced,
)


def _steps(call="cudaMalloc", marked=True, within=(0, 1, 2, 3)):
    """Steps that call the driver for 400 us before they launch."""
    events = []
    for k in range(4):
        at = 5 * k * MS
        if marked:
            events.append(step(k + 3, at, at + 5 * MS))
        if k in within:
            events.append(runtime(call, at + 10 * US, at + 410 * US))
        ran = (at + 500 * US, at + 5 * MS)
        events += launch("k", call=(at + 490 * US, at + 495 * US), gpu=ran, correlation=k + 1)
    return events


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemMap"])
def test_calls_of_the_driver_in_steady_steps_are_found(call):
    found = the(rule(traced(_steps(call))))
    assert found.id == NAME
    assert found.cost_ns == pytest.approx(400 * US)
    assert found.recoverable_ns[1] == pytest.approx(400 * US, rel=0.05)


@pytest.mark.parametrize("call", ["cudaMallocAsync", "cudaMemcpyAsync", "cuMemsetD32Async"])
def test_stream_ordered_allocation_and_copies_are_none(call):
    assert rule(traced(_steps(call))) == ()


def test_the_first_step_may_fill_the_cache():
    assert rule(traced(_steps(within=(0,)))) == ()


def test_without_marks_early_calls_may_be_the_warm_up():
    assert isinstance(rule(traced(_steps(marked=False, within=(0,)))), Abstention)
    late = the(rule(traced(_steps(marked=False, within=(0, 3)))))
    assert late.confidence == "low"


def test_segments_requested_while_samples_are_taken_are_found():
    case = timed(noise(500), allocator_device_calls=steadily(20))
    found = the(rule(case))
    assert "without the profiler" in found.evidence[0]
    assert found.slices == ()


def test_segments_requested_at_the_start_alone_are_not():
    case = timed(noise(500), allocator_device_calls=lambda at: (at > 30 * MS) * 3)
    assert rule(case) == ()


def test_page_faults_that_take_a_good_part_of_the_step_are_found_on_the_cpu():
    per_second = 0.2 * 1e9 / MINOR_FAULT_NS
    found = the(rule(timed(noise(500), device="cpu", minor_faults=steadily(per_second))))
    assert found.cost_ns == pytest.approx(0.2 * 3 * MS, rel=0.05)
    assert "jemalloc" in found.fix


def test_the_usual_faults_are_not():
    assert rule(timed(noise(500), device="cpu", minor_faults=steadily(20_000))) == ()
    assert rule(timed(noise(500), device="cpu", minor_faults=never)) == ()


def test_what_was_not_recorded_is_not_judged():
    for case in (Case(), timed(noise(50), device="cpu"), traced([op("aten::mm", 0, 9)])):
        assert isinstance(rule(case), Abstention)
