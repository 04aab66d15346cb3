"""Find kernels that are loaded onto the GPU in steady-state steps."""

from __future__ import annotations

from steadytorch.findings.figures import duration, many, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import gpu_trace
from steadytorch.findings.host_calls import owned_ns, spent_ns, steady, tally, unmarked
from steadytorch.traces.events import Category
from steadytorch.traces.evidence import by_name

NAME = "lazy-loading"

_LOADS = (
    r"Lazy Function Loading|Runtime Triggered Module Loading|(cu|hip)ModuleLoad\w*"
    r"|(cuda|cu)LibraryLoad\w*"
)
_WHERE = (Category.OVERHEAD, Category.RUNTIME, Category.DRIVER)


def rule(case: Case) -> Verdict:
    """Report any kernel load in steady-state steps: a kernel is loaded at its first launch.

    Loading a kernel may wait for all work on the device. Source: "Lazy Loading", CUDA Programming
    Guide, which advises running kernels once before work that must be fast or concurrent.
    """
    seen = gpu_trace(case, NAME, "kernel loading")
    if isinstance(seen, Abstention):
        return seen
    trace, ledger = seen
    late = steady(trace, ledger, by_name(trace, _WHERE, _LOADS))
    if not len(late.rows):
        return unmarked(NAME, "kernel loading") if late.early and not late.sure else ()
    spent = round(spent_ns(trace, late.rows) / late.steps)
    owned = round(owned_ns(trace, ledger, "idle_compile", late.rows) / late.steps)
    half = "the second half of the trace"
    where = f"{late.hit} of {late.steps} steady steps" if late.sure else half
    return (
        Finding(
            id=NAME,
            source="compiler",
            title=f"{many(len(late.rows), 'kernel load')} in {where}: {duration(spent)} a step",
            evidence=(
                tally(trace, late.rows),
                f"the GPU is idle for {duration(owned)} of these {duration(spent)} a step",
            ),
            slices=("idle_compile",),
            cost_ns=max(spent, owned),
            recoverable_ns=(0, owned),
            variance_share=variance_of(case, "idle_compile"),
            confidence="high" if late.sure else "low",
            fix="Run every input shape and branch once before serving or timing. "
            "CUDA_MODULE_LOADING=EAGER loads all kernels at the start, but uses more memory.",
            check="run `steady explain` again after a longer warm-up",
            false_alarm="the profiled steps were still warming up, or met a new input shape that "
            "will recur.",
        ),
    )
