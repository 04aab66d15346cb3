"""Find cuDNN or Triton autotuning in steady-state steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steadytorch.findings.figures import duration, many
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import gpu_trace
from steadytorch.findings.host_calls import spent_ns, steady, unmarked
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import RANGES, by_name
from steadytorch.traces.intervals import innermost
from steadytorch.traces.steps import CALLS, gpu_rows, launch_rows

NAME = "autotuning-in-loop"
LEAST_LAUNCHES = 10
"""Minimum kernels of one convolution that indicate autotuning. PyTorch times up to ten plans
(`torch.backends.cudnn.benchmark_limit`), each of one to several kernels. Otherwise a convolution
runs its kernel and up to three layout conversions; its backward runs twice that."""
LEAST_KINDS = 5
"""Minimum distinct kernels among them. One kernel repeated is a loop over groups, or a solver."""
_PER_DIRECTION = 2
"""A backward pass tunes two gradients, so both thresholds double."""

_CONVOLUTION = r"aten::(cudnn|miopen)_convolution\w*|aten::_?convolution(_backward)?"
_TRITON = r".*(do_bench|benchmark_all_configs|CachingAutotuner\.benchmark).*"
_TUNING = ("gpu_kernel", "idle_allocation", "idle_synchronisation")
_TIMING = r"(cuda|cu|hip)Event(ElapsedTime|Synchronize)\w*"


@dataclass(frozen=True, eq=False)
class _Tuned:
    """Convolutions that ran autotuning. Arrays have shape (convolutions,).

    Attributes:
        rows: the convolutions.
        launches: kernels that each ran.
        kinds: distinct kernels among them.
        kernel_ns: kernel time of each.
        usual_ns: median kernel time of the other convolutions; 0 without any.
    """

    rows: np.ndarray
    launches: np.ndarray
    kinds: np.ndarray
    kernel_ns: np.ndarray
    usual_ns: float


def rule(case: Case) -> Verdict:
    """Report convolutions that launch many distinct kernels, and calls of Triton's autotuner.

    cuDNN's benchmark mode compares algorithms at every new input shape, which pays only if shapes
    recur. A single autotuning run in a steady-state step is reported.

    Source: "Enable cuDNN auto-tuner", PyTorch Performance Tuning Guide;
    `torch.backends.cudnn.benchmark_limit`, PyTorch documentation.
    """
    seen = gpu_trace(case, NAME, "autotuning")
    if isinstance(seen, Abstention):
        return seen
    trace, ledger = seen
    tuned = _tuned(trace, ledger.device)
    triton = by_name(trace, (*RANGES, Category.PYTHON), _TRITON)
    late, named = steady(trace, ledger, tuned.rows), steady(trace, ledger, triton)
    if not len(late.rows) and not len(named.rows):
        early = (late.early or named.early) and not late.sure
        return unmarked(NAME, "autotuning") if early else ()
    chosen = np.isin(tuned.rows, late.rows)
    extra = (tuned.kernel_ns[chosen] - tuned.usual_ns).clip(min=0).sum()
    cost = round((float(extra) + spent_ns(trace, named.rows)) / late.steps)
    mode = (case.notes or {}).get("cudnn_benchmark")
    what = many(len(late.rows), "convolution") if len(late.rows) else "Triton kernels"
    timed = bool(len(by_name(trace, CALLS, _TIMING)))
    return (
        Finding(
            id=NAME,
            source="compiler",
            title=f"autotuning in steady steps: {what}, {duration(cost)} a step",
            evidence=_lines(trace, tuned, chosen, named.rows, mode),
            slices=(
                *(_TUNING if len(late.rows) else ()),
                *(("idle_compile",) if len(named.rows) else ()),
            ),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high" if late.sure and (mode or timed or len(named.rows)) else "medium",
            fix="If input shapes keep changing, turn off torch.backends.cudnn.benchmark, or pad "
            "inputs to a few sizes and run each once beforehand. Stored plans need no timing.",
            check="run `steady explain WORKLOAD` with torch.backends.cudnn.benchmark = False",
            false_alarm="the shapes are new here and will recur: the timing is paid once.",
        ),
    )


def _tuned(trace: Trace, device: int) -> _Tuned:
    """Convolutions that launched more kernels, and more distinct kernels, than they need."""
    events = trace.events
    operators = by_name(trace, (Category.CPU_OP,), _CONVOLUTION)
    kernels = gpu_rows(trace, device)
    kernels = kernels[events.category[kernels] == Category.KERNEL]
    calls = launch_rows(trace, kernels)
    kernels, calls = kernels[calls >= 0], calls[calls >= 0]
    owner = np.full(len(kernels), -1)
    for thread in np.unique(events.thread[operators]):
        mine = operators[events.thread[operators] == thread]
        here = events.thread[calls] == thread
        moments = events.start_ns[calls[here]]
        place = innermost(events.start_ns[mine], events.end_ns[mine], moments)
        owner[here] = np.where(place >= 0, mine[place], -1)
    kernels, owner = kernels[owner >= 0], owner[owner >= 0]
    rows, place = np.unique(owner, return_inverse=True)
    launches = np.bincount(place, minlength=len(rows))
    pairs = np.unique(np.stack([place, events.name[kernels]]), axis=1)
    kinds = np.bincount(pairs[0], minlength=len(rows))
    spent = np.bincount(place, events.end_ns[kernels] - events.start_ns[kernels], len(rows))
    backward = np.asarray(["backward" in trace.name_of(row) for row in rows.tolist()], dtype=bool)
    directions = np.where(backward, _PER_DIRECTION, 1)
    many_run = (launches >= LEAST_LAUNCHES * directions) & (kinds >= LEAST_KINDS * directions)
    usual = float(np.median(spent[~many_run])) if (~many_run).any() else 0.0
    return _Tuned(rows[many_run], launches[many_run], kinds[many_run], spent[many_run], usual)


def _lines(
    trace: Trace, tuned: _Tuned, chosen: np.ndarray, triton: np.ndarray, mode: object
) -> tuple[str, ...]:
    lines = []
    for place in np.flatnonzero(chosen)[np.argsort(-tuned.kernel_ns[chosen])][:3].tolist():
        lines.append(
            f"one {trace.name_of(int(tuned.rows[place]))} ran {tuned.launches[place]} kernels "
            f"({tuned.kinds[place]} distinct) in {duration(float(tuned.kernel_ns[place]))}"
        )
    if tuned.usual_ns and lines:
        lines.append(f"a convolution without autotuning takes {duration(tuned.usual_ns)}")
    shapes = {str((trace.inputs_of(int(row)) or {}).get("dims")) for row in tuned.rows[chosen]}
    if len(shapes) > 1:
        lines.append(f"over {len(shapes)} different input shapes")
    if len(triton):
        lines.append(f"{many(len(triton), 'benchmark')} of Triton configurations")
    if mode is not None:
        lines.append(f"torch.backends.cudnn.benchmark was {'on' if mode else 'off'}")
    return tuple(lines)
