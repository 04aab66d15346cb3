"""How well the kernels fill a GPU, estimated from their launch shapes."""

from __future__ import annotations

import numpy as np

from steadytorch.ledger.ledger import Ledger
from steadytorch.results.explain import Utilisation
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.intervals import Spans, covered_ns, crossings, union
from steadytorch.traces.kernel_names import uses_tensor_cores
from steadytorch.traces.steps import gpu_rows


def utilisation(trace: Trace, ledger: Ledger) -> Utilisation | None:
    """Utilisation of the GPU in a ledger's steps; None for a CPU ledger.

    Source of the definitions: pytorch/kineto, `tb_plugin/README.md`, "GPU Summary".
    """
    time = Spans(
        np.array([step.start_ns for step in ledger.steps], np.int64),
        np.array([step.end_ns for step in ledger.steps], np.int64),
    )
    if ledger.kind != "gpu" or not ledger.total_ns:
        return None
    events, rows = trace.events, gpu_rows(trace, ledger.device)
    rows = rows[events.category[rows] == Category.KERNEL]
    within = covered_ns(time, events.start_ns[rows], events.end_ns[rows])
    rows, within = rows[within > 0], within[within > 0]
    running = union(events.start_ns[rows], events.end_ns[rows])
    names = np.unique(events.name[rows])
    tensor = np.isin(
        events.name[rows], [name for name in names.tolist() if uses_tensor_cores(trace.names[name])]
    )
    return Utilisation(
        gpu_percent=100 * crossings(running, time)[2].total_ns / ledger.total_ns,
        sm_efficiency_percent=_reached(trace, rows, time, ledger.total_ns),
        achieved_occupancy_percent=_scaled(
            _detail(trace, rows, "est. achieved occupancy %") / 100, within, int(within.sum())
        ),
        tensor_core_percent=100 * float(within[tensor].sum()) / max(1, int(within.sum())),
    )


def _reached(trace: Trace, rows: np.ndarray, time: Spans, whole_ns: int) -> float | None:
    """Percentage of the time weighted by occupied SMs; None as in `_scaled`."""
    blocks = _detail(trace, rows, "blocks per SM")
    if not len(rows) or np.isnan(blocks).any():
        return None
    events = trace.events
    edges = np.concatenate([events.start_ns[rows], events.end_ns[rows]])
    order = np.argsort(edges, kind="stable")
    running = np.cumsum(np.concatenate([blocks, -blocks])[order])[:-1]
    edges = edges[order]
    within = covered_ns(time, edges[:-1], edges[1:])
    return 100 * float(running.clip(0.0, 1.0) @ within) / whole_ns


def _scaled(values: np.ndarray, weights: np.ndarray, whole_ns: int) -> float | None:
    """Weighted sum as a percentage of the whole; None if a value is missing."""
    if not len(values) or np.isnan(values).any():
        return None
    return 100 * float(values @ weights) / whole_ns


def _detail(trace: Trace, rows: np.ndarray, key: str) -> np.ndarray:
    """A number from the details of each row, NaN if missing, float64, shape (rows,)."""
    found = np.full(len(trace.details) + 1, np.nan)
    for place, details in enumerate(trace.details):
        value = details.get(key)
        if isinstance(value, (int, float)):
            found[place] = value
    return found[trace.events.details[rows]]
