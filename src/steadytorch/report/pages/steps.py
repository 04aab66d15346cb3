"""Slow steps with expandable causes and time slices, shared by several pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from steadytorch.report.ledger import in_words, slice_label
from steadytorch.report.plots import Table, table
from steadytorch.report.text import duration
from steadytorch.results.explain import SlowStep

MOST_STEPS = 50
"""Most steps of one page."""


class Step(NamedTuple):
    """One slow step of a page.

    Attributes:
        number: its number on the axis of the chart, and in its id.
        name: its name.
        summary: one line.
        causes: the differences from other steps, a line each, and its trace.
        slices: its slices beside the mean step's; the largest difference first.
    """

    number: int
    name: str
    summary: str
    causes: list[str]
    slices: Table


def opened(
    step: SlowStep, number: int, slices_ns: Mapping[str, float], means_ns: Mapping[str, float]
) -> Step:
    """Describes a slow step with its causes and time slices.

    Args:
        step: the step.
        number: its number on the axis of the chart.
        slices_ns: slice to its time in this step.
        means_ns: slice to its mean time in all steps.

    Raises:
        IndexError: the step's index is negative.
    """
    if step.index < 0:
        raise IndexError(f"step {step.index} does not exist")
    apart_ns = {name: time_ns - means_ns.get(name, 0) for name, time_ns in slices_ns.items()}
    rows = [
        _row(slice_label(name), slices_ns[name], apart_ns[name])
        for name in sorted(apart_ns, key=lambda name: -abs(apart_ns[name]))
        if slices_ns[name] or apart_ns[name]
    ]
    causes = [in_words(text) for text in step.what] or ["no cause seen"]
    if step.trace is not None:
        causes.append(f"trace: {step.trace}")
    over = f"{duration(step.total_ns)}, {duration(step.over_median_ns)} over the median"
    return Step(
        number,
        step.name,
        f"{step.name}: {over}",
        causes,
        table(
            ["slice", "this step", "mean step", "difference"],
            rows,
            total=_row("together", sum(slices_ns.values()), sum(apart_ns.values())),
        ),
    )


def _row(label: str, time_ns: float, apart_ns: float) -> tuple[str, ...]:
    sign = "-" if apart_ns < 0 else "+"
    apart = f"{sign}{duration(abs(apart_ns))}"
    return label, duration(time_ns), duration(time_ns - apart_ns), apart


def note_of_steps(count: int) -> str:
    """A note on the slow steps that a page leaves out; empty if it shows all."""
    if count <= MOST_STEPS:
        return ""
    return f"Shown: the slowest {MOST_STEPS} of {count:,}; the file has all of them."
