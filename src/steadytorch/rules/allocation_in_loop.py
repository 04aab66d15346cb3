"""Find memory that steady-state steps allocate from the driver or the operating system."""

from __future__ import annotations

from steadytorch.findings.figures import duration, many, percent, variance_of
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.gpu_events import no_trace
from steadytorch.findings.host_calls import owned_ns, spent_ns, steady, tally, unmarked
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.measure.causes import ALLOCATOR, MINOR_FAULT_NS, PAGE_FAULT
from steadytorch.traces.evidence import by_name
from steadytorch.traces.steps import CALLS

NAME = "allocation-in-loop"
LEAST_FAULTS = 0.05
"""Minimum share of a CPU step spent in page faults, at the minimum cost of a fault. Below it,
caches and the kernel's batching hide the cost."""
PAGE_BYTES = 4096
_FAULTS = "the number of page faults"

# Excluded: stream-ordered allocation (cudaMallocAsync, cuMemAllocAsync), which is meant for loops.
_CALLS = (
    r"(cuda|hip)(Malloc|Free)(Host|Array|Managed|Pitch|3D)?"
    r"|(cuda|hip)Host(Alloc|Malloc|Free|Register|Unregister)"
    r"|cuMem(Alloc|AllocHost|AllocManaged|AllocPitch|Free|FreeHost|HostAlloc|HostRegister"
    r"|HostUnregister|Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree)(_v\d+)?"
)


def rule(case: Case) -> Verdict:
    """Report driver or system allocations in steady-state steps; on a GPU, one is enough.

    On a GPU, the allocations are driver calls, which may wait for the device. GPU allocations
    appear in the trace, or as segments that PyTorch's caching allocator requested during timing. On
    a CPU, they appear as page faults: freed memory was returned to the system and is faulted in
    again page by page.

    Source: "Memory management", CUDA semantics, PyTorch documentation; for the CPU "Utilize memory
    allocators", PyTorch Performance Tuning Guide.
    """
    samples = samples_of(case)
    if samples is not None and not samples.on_gpu:
        return _on_cpu(samples)
    if samples is None and case.ledger is not None and case.ledger.kind == "cpu":
        return unrecorded(NAME, samples, "minor_faults", _FAULTS)
    segments = _segments(samples) if samples is not None else None
    if case.trace is None or case.ledger is None:
        if segments is None:
            return no_trace(NAME, "allocation")
        return (_on_gpu(case, samples, segments),) if segments else ()
    calls = by_name(case.trace, CALLS, _CALLS)
    late = steady(case.trace, case.ledger, calls)
    if len(late.rows) or segments:
        return (_on_gpu(case, samples, segments or 0),)
    unclear = late.early and not late.sure and segments is None
    return unmarked(NAME, "allocation") if unclear else ()


def _segments(samples: Samples) -> int | None:
    """Allocator segments requested or released; 0 if the samples' second half has none."""
    rises = samples.rises("allocator_device_calls")
    if rises is None:
        return None
    return int(rises.sum()) if rises[len(rises) // 2 :].any() else 0


def _on_gpu(case: Case, samples: Samples | None, segments: int) -> Finding:
    lines, spent, owned, sure = [], 0, 0, True
    if case.trace is not None and case.ledger is not None:
        late = steady(case.trace, case.ledger, by_name(case.trace, CALLS, _CALLS))
        if len(late.rows):
            spent = round(spent_ns(case.trace, late.rows) / late.steps)
            owned = owned_ns(case.trace, case.ledger, "idle_allocation", late.rows)
            owned, sure = round(owned / late.steps), late.sure or segments > 0
            per_step = f"{many(len(late.rows) / late.steps, 'call')} a step"
            lines.append(f"{per_step}, {duration(spent)}: {tally(case.trace, late.rows)}")
    varies = variance_of(case, "idle_allocation")
    if samples is not None and segments:
        places = samples.caused_by(ALLOCATOR)
        varies = samples.variance_share(places) or varies
        owned = max(owned, round(samples.excess_ns(places)))
        lines.append(
            f"{many(segments, 'segment')} requested from or returned to the driver in "
            f"{many(samples.steps, 'step')} timed without the profiler"
        )
    what = f"{duration(spent)} a step" if spent else many(segments, "segment")
    return Finding(
        id=NAME,
        source="synchronisation",
        title=f"steady steps allocate GPU memory from the driver: {what}",
        evidence=tuple(lines),
        slices=("idle_allocation",) if spent else (),
        cost_ns=max(spent, owned),
        recoverable_ns=(0, owned),
        variance_share=varies,
        confidence="high" if sure else "low",
        fix="Keep input shapes constant, or run the largest first. Reuse pinned buffers, remove "
        "torch.cuda.empty_cache() from the loop, and try "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        check="torch.cuda.memory_stats()['num_device_alloc'] does not rise during the loop",
        false_alarm="input shapes are larger than any before: their memory is allocated once, "
        "then cached.",
    )


def _on_cpu(samples: Samples) -> Verdict:
    rate = samples.rate("minor_faults")
    if rate is None:
        return unrecorded(NAME, samples, "minor_faults", _FAULTS)
    share = rate * MINOR_FAULT_NS
    per_step = rate * samples.elapsed_ns / samples.steps
    cost = round(per_step * MINOR_FAULT_NS)
    if share < LEAST_FAULTS:
        return ()
    size = per_step * PAGE_BYTES / 2**20
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"memory is returned to the system and faulted in again: {size:.0f} MiB a step, "
            f"at least {duration(cost)} ({percent(share)})",
            evidence=(
                f"{per_step:.0f} page faults a step, each at least {duration(MINOR_FAULT_NS)}",
                f"{many(per_step * samples.steps, 'fault')} in {many(samples.steps, 'step')}",
            ),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=samples.variance_share(samples.caused_by(PAGE_FAULT)),
            confidence="medium",
            fix="Preload jemalloc or tcmalloc (LD_PRELOAD): they keep freed memory. Or set "
            "MALLOC_TRIM_THRESHOLD_=-1 MALLOC_MMAP_MAX_=0 before the command: glibc keeps it then.",
            check="run `steady explain WORKLOAD` again with that allocator",
            false_alarm="the program maps new files or data in every step on purpose.",
        ),
    )
