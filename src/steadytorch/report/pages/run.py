"""The HTML page of a watched script: steps over time, slices, findings, slow steps."""

from __future__ import annotations

from typing import Any

from steadytorch.report import run
from steadytorch.report.ledger import slice_label
from steadytorch.report.pages.explain import untold
from steadytorch.report.pages.series import histogram, timeline
from steadytorch.report.pages.steps import MOST_STEPS, Step, note_of_steps, opened
from steadytorch.report.plots import BLUE, Table, table
from steadytorch.report.text import duration, share
from steadytorch.results.saved import Saved
from steadytorch.results.watched import Watched


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a watched script."""
    document: Watched = saved.result
    measured = document.measured
    shown = list(run.headline(document))
    return {
        "title": saved.head.workload,
        "headline": shown[0],
        "details": shown[1:],
        "samples": measured
        and timeline([measured], ["steps"], {"steps": BLUE}, "Steps over time", rows="step"),
        "histogram": measured
        and histogram(measured, measured.median_ns, measured.median_ci_ns, "Distribution"),
        "slices": _slices(document),
        "slow": _slow(document),
        "left_out": note_of_steps(len(document.slowest)),
        "lines": _lines(document),
        "untold": untold(document.abstained),
        "advice": list(run.advice(document)),
    }


def _slices(document: Watched) -> Table:
    shares = document.variance_shares or {}
    rows = [
        (
            slice_label(name),
            duration(mean),
            part,
            f"{100 * shares[name]:z.1f} %" if name in shares else None,
        )
        for name, mean, part in run.slices(document)
    ]
    note = "Host time. The slices of a step add up to it; so do the shares of the variance."
    return table(["slice", "mean", "of a step", "of the variance"], rows, note=note)


def _slow(document: Watched) -> list[Step]:
    means = document.mean_slices_ns()
    return [
        opened(
            step,
            step.index,
            {name: values[step.index] for name, values in document.slices_ns.items()},
            means,
        )
        for step in document.slowest[:MOST_STEPS]
    ]


def _lines(document: Watched) -> Table:
    rows = [(slice_label(line.slice), line.where, share(line.share, 1)) for line in document.lines]
    return table(["slice", "line", "of the samples"], rows, (0, 1), "Seen by sampling.")
