"""The HTML page of a sweep: a table row with plan and gain for each workload."""

from __future__ import annotations

from typing import Any

from steadytorch.report import sweep
from steadytorch.report.plots import Table, table
from steadytorch.report.text import seconds
from steadytorch.results.saved import Saved
from steadytorch.results.sweep import Sweep


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a sweep."""
    document: Sweep = saved.result
    return {
        "title": document.list,
        "headline": sweep.totals(document),
        "rows": _rows(document),
        "reasons": [
            f"{row.workload}: {row.reason}" for row in document.rows if row.reason is not None
        ],
    }


def _rows(document: Sweep) -> Table:
    rows = [
        (
            row.workload,
            row.status,
            None if row.plan is None else " + ".join(row.plan.transforms) or "untouched",
            sweep.format_speedup(row),
            None if row.plan is None else row.plan.id,
            row.device,
            row.worker,
            None if row.seconds is None else seconds(row.seconds),
        )
        for row in document.rows
    ]
    headings = ["workload", "status", "plan", "gain, 99 % interval", "id", "device", "worker"]
    return table([*headings, "time"], rows, (0, 1, 2, 4, 5, 6))
