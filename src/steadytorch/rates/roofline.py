"""Compare kernels with the device's measured limits.

The roofline model is from Williams, Waterman and Patterson, "Roofline: an insightful visual
performance model for multicore architectures", Communications of the ACM 52(4), 2009. An operator
takes at least the time to move its operands, and at least the time for its arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from steadytorch.ledger.ledger import Ledger, build_ledger
from steadytorch.rates.device_rates import Rates
from steadytorch.rates.launches import Launches, Operators, launches_of, operators_of
from steadytorch.rates.operator_work import MATRIX, Work
from steadytorch.rates.products import PRODUCTS, UNCOUNTED
from steadytorch.results.explain import Line, Roofline
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.kernel_names import uses_tensor_cores

FROM_CACHE = 2.0
"""Share of the memory limit above which data came from a cache. Up to it, the limit may be too low:
bandwidth is measured by copies, which read lines that they overwrite. They move three bytes for two
that count, so reading alone or writing in place reaches 1.5 of it."""


class _Rows(NamedTuple):
    """Kernels or operators, one row each, with times and minimum times.

    All arrays have shape (rows,); times are in ns, and NaN marks unknown values. `name` is an index
    into `Trace.names`; `counts` is False for a nested call that is part of another row.
    """

    name: np.ndarray
    counts: np.ndarray
    time: np.ndarray
    bytes: np.ndarray
    flops: np.ndarray
    memory: np.ndarray
    compute: np.ndarray


def roofline(trace: Trace, rates: Rates | None = None, ledger: Ledger | None = None) -> Roofline:
    """Compare the kernels of a trace with the device's limits.

    An operator's work is divided among its kernels in proportion to their time, so each kernel
    shows the operator's share of the limit.

    Args:
        trace: with recorded shapes; without them only times are known.
        rates: rates of the device that ran it; without them there are no shares.
        ledger: ledger of the steps to compare; None for the trace's own.
    """
    ledger = build_ledger(trace) if ledger is None else ledger
    operators = operators_of(trace)
    measured = (_on_gpu if ledger.kind == "gpu" else _on_cpu)(operators, rates, ledger)
    busy = max(1, int(measured.time.sum()))
    lines = [
        _line(trace.names[name], measured, measured.name == name, busy)
        for name in np.unique(measured.name)
    ]
    return _summary(lines, measured, ledger)


def product_flops(trace: Trace) -> int | None:
    """Floating-point operations of all matrix products, convolutions and attention in a trace.

    The sum covers all steps. The result is None if one of the counted operators has unrecorded
    inputs or no formula.
    """
    operators = operators_of(trace)
    index, works = operators.works
    charged = operators.charged
    if (operators.named({*PRODUCTS, *UNCOUNTED}) & (charged < 0)).any():
        return None
    counted = operators.named(MATRIX) & (charged == np.arange(len(charged)))
    return sum(works[place].flops for place in index[counted])


def _summary(lines: list[Line], measured: _Rows, ledger: Ledger) -> Roofline:
    count = max(1, len(ledger.steps))
    least = np.fmax(measured.memory, measured.compute)
    decided = ~np.isnan(measured.memory + measured.compute)
    known = float(measured.time[decided].sum())
    parts = [float(part[decided].sum()) for part in (least, measured.memory, measured.compute)]
    shares = [part / known if known else None for part in parts]
    return Roofline(
        lines=tuple(sorted(lines, key=lambda line: (-line.time_ns, line.name))),
        steps=count,
        busy_ns=int(measured.time.sum()) // count,
        known_ns=int(known / count),
        least_ns=int(parts[0] / count),
        step_ns=sum(step.total_ns for step in ledger.steps) // count,
        share_of_limit=shares[0],
        memory_share=shares[1],
        compute_share=shares[2],
    )


def _line(name: str, measured: _Rows, mine: np.ndarray, busy: int) -> Line:
    time = int(measured.time[mine].sum())
    known = mine & ~np.isnan(measured.bytes)
    line = Line(
        name=name,
        count=int(measured.counts[mine].sum()),
        time_ns=time,
        share=time / busy,
        known_ns=int(measured.time[known].sum()),
    )
    if not line.known_ns:
        return line
    moved, flops = float(measured.bytes[known].sum()), float(measured.flops[known].sum())
    memory, compute = measured.memory[known], measured.compute[known]
    decided = not np.isnan(memory + compute).any()
    least = np.fmax(memory, compute)
    return msgspec.structs.replace(
        line,
        bytes=round(moved),
        flops=round(flops),
        bytes_per_s=1e9 * moved / line.known_ns,
        flops_per_s=1e9 * flops / line.known_ns,
        share_of_limit=float(least.sum()) / line.known_ns if decided else None,
        bound=("compute" if compute.sum() > memory.sum() else "memory") if decided else None,
    )


def _on_gpu(operators: Operators, rates: Rates | None, ledger: Ledger) -> _Rows:
    launches = launches_of(operators.trace, ledger)
    events = operators.trace.events
    owner = np.where(launches.operator >= 0, operators.charged[launches.operator], -1)
    tensor_cores = np.zeros(len(events), dtype=bool)
    tensor_cores[owner[launches.named(uses_tensor_cores) & (owner >= 0)]] = True
    name = events.name[launches.rows]
    counts = np.ones(len(name), dtype=bool)
    measured = _of_operators(
        operators, rates, (name, counts, launches.length_ns), owner, tensor_cores
    )
    return _with_copies(measured, launches, rates)


def _on_cpu(operators: Operators, rates: Rates | None, ledger: Ledger) -> _Rows:
    events = operators.trace.events
    rows = events.of(Category.CPU_OP)
    if ledger.steps:
        start = events.start_ns[rows]
        rows = rows[(start >= ledger.steps[0].start_ns) & (start < ledger.steps[-1].end_ns)]
    own = operators.own_ns()[rows]
    rows, own = rows[own > 0], own[own > 0]
    owner = operators.charged[rows]
    # Show nested calls as part of the operator whose work they do.
    shown = np.where(owner >= 0, owner, rows)
    none = np.zeros(len(events), dtype=bool)
    return _of_operators(operators, rates, (events.name[shown], shown == rows, own), owner, none)


def _of_operators(
    operators: Operators,
    rates: Rates | None,
    shown: tuple[np.ndarray, np.ndarray, np.ndarray],
    owner: np.ndarray,
    tensor_cores: np.ndarray,
) -> _Rows:
    """Divide each operator's work among its rows in proportion to their time.

    Args:
        operators: operators of the trace.
        rates: rates of the device.
        shown: name, whether it counts, and time of each row.
        owner: row of the operator whose work each row belongs to, -1 if unknown.
        tensor_cores: whether the operator uses them, by row of the trace.
    """
    time = shown[2]
    together = np.zeros(len(operators.trace.events))
    np.add.at(together, owner[owner >= 0], time[owner >= 0])
    index, works = operators.works
    table = np.full((len(works) + 1, 2, 4), np.nan)
    for place, work in enumerate(works):
        for units in (0, 1):
            table[place, units] = work.bytes, work.flops, *_least_ns(work, rates, bool(units))
    which = np.where(owner >= 0, index[owner], len(works))
    units = np.where(owner >= 0, tensor_cores[owner], False).astype(np.int64)
    part = np.where(owner >= 0, time / np.maximum(together[owner], 1), np.nan)
    moved, flops, memory, compute = (table[which, units] * part[:, None]).T
    products = operators.named(MATRIX)
    # Only products have a compute limit; memory limits all others.
    compute = np.where((owner >= 0) & ~products[owner], 0.0, compute)
    return _Rows(*shown[:2], time.astype(np.float64), moved, flops, memory, compute)


def _least_ns(work: Work, rates: Rates | None, tensor_cores: bool) -> tuple[float, float]:
    """Minimum ns to move the operands, and minimum ns for the arithmetic; NaN without a rate."""
    if rates is None:
        return np.nan, np.nan
    dtype = "tf32" if tensor_cores and work.dtype == "float32" else work.dtype
    rate = rates.matrix_flops_per_s.get(dtype or "")
    speed = rates.copy_bandwidth_bytes_per_s
    return (
        1e9 * work.bytes / speed if speed else np.nan,
        1e9 * work.flops / rate if rate else np.nan,
    )


def _with_copies(measured: _Rows, launches: Launches, rates: Rates | None) -> _Rows:
    """Add memory fills and device-to-device copies, with the bytes that the trace records."""
    events = launches.trace.events
    within = launches.named(lambda name: "DtoD" in name) & launches.of(Category.MEMCPY)
    filled = launches.of(Category.MEMSET)
    size = events.bytes[launches.rows].astype(np.float64)
    size = np.where(within, 2 * size, size)
    chosen = (within | filled) & (size >= 0)
    speed = rates.copy_bandwidth_bytes_per_s if rates else None
    elsewhere = launches.of(Category.MEMCPY, Category.MEMSET)

    def put(column: np.ndarray, values: np.ndarray | float) -> np.ndarray:
        return np.where(chosen, values, np.where(elsewhere, np.nan, column))

    return measured._replace(
        bytes=put(measured.bytes, size),
        flops=put(measured.flops, 0.0),
        memory=put(measured.memory, 1e9 * size / speed if speed else np.nan),
        compute=put(measured.compute, 0.0),
    )
