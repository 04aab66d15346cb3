"""The HTML page of compared ranks: the split of a step by rank, and the latest rank by step."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from steadytorch.report import ranks
from steadytorch.report.ledger import in_words, slice_label
from steadytorch.report.pages.explain import colours_of, untold
from steadytorch.report.plots import COLOURS, GREY, Plot, Table, figure, table
from steadytorch.report.text import duration, unit_of
from steadytorch.results.explain import Finding
from steadytorch.results.ranks import RankComparison, RankTimes
from steadytorch.results.saved import Saved

TRANSFER, WAITING = "transfer", "waiting for later ranks"
_MOST_DRAWN = 64
"""Most ranks with bars or points of their own."""
_MOST_STEPS = 5_000


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of compared ranks."""
    document: RankComparison = saved.result
    return {
        "title": saved.head.workload,
        "headline": ranks.headline(document),
        "split": _split(document.ranks),
        "lateness": _lateness(document),
        "findings": [_in_words(each) for each in document.findings],
        "late": _late(document),
        "rows": _rows(document),
        "slices": _slices(document),
        "longest": list(ranks.slow_steps(document)),
        "remarks": list(ranks.remarks(document)),
        "untold": untold(document.abstained),
    }


def _in_words(found: Finding) -> Finding:
    """Replaces the slice names in a finding by their display labels."""
    return replace(
        found, title=in_words(found.title), evidence=tuple(map(in_words, found.evidence))
    )


def _parts(each: RankTimes) -> dict[str, float]:
    """The parts of a rank's step in ns, which add up to the step time."""
    return {**each.slices_ns, TRANSFER: each.transfer_ns, WAITING: each.waiting_ns}


def _split(found: tuple[RankTimes, ...]) -> Plot:
    """Charts the parts of the step of each rank as a stacked bar."""
    shown = found[:_MOST_DRAWN]
    unit, unit_ns = unit_of(max(1.0, *(each.step_ns for each in shown)))
    names = [name for name in _parts(shown[0]) if any(_parts(each).get(name) for each in shown)]
    colours = colours_of(names) | {WAITING: GREY}
    data = [
        {
            "type": "bar",
            "name": _label(name),
            "marker": {"color": colours[name]},
            "x": [f"rank {each.rank}" for each in shown],
            "y": [_parts(each).get(name, 0) / unit_ns for each in shown],
            "hovertemplate": f"%{{x}}: %{{y:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
        }
        for name in names
    ]
    layout = {"barmode": "stack", "bargap": max(0.25, 1 - 0.2 * len(shown))}
    shape = figure(data, "", f"mean of a step, {unit}", height=420, layout=layout)
    return Plot("Where each rank's step goes", shape, _cut(len(shown), len(found), "ranks"))


def _lateness(document: RankComparison) -> Plot:
    """Charts the lateness of the latest rank at each step."""
    shown = document.steps[:_MOST_STEPS]
    unit, unit_ns = unit_of(max(1, *(step.late_ns for step in shown)))
    latest = sorted({step.latest for step in shown})
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"rank {rank}",
            "marker": {"color": COLOURS[place % len(COLOURS)], "size": 7},
            "x": [step.index for step in shown if step.latest == rank],
            "y": [step.late_ns / unit_ns for step in shown if step.latest == rank],
            "hovertemplate": f"step %{{x}}: %{{y:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
        }
        for place, rank in enumerate(latest)
    ]
    shape = figure(data, "step, as the traces number it", f"lateness of the latest rank, {unit}")
    note = "Against the median of the other ranks, without waiting."
    cut = _cut(len(shown), len(document.steps), "steps")
    return Plot("Who is latest", shape, f"{note} {cut}".strip())


def _cut(shown: int, whole: int, what: str) -> str:
    return "" if shown == whole else f"Drawn: the first {shown:,} of {whole:,} {what}."


def _late(document: RankComparison) -> Table:
    rows = [
        (
            each.rank,
            slice_label(each.slice),
            duration(each.late_ns),
            f"{len(each.steps):,} of {len(document.steps):,}",
            None if each.variance_share is None else f"{100 * each.variance_share:z.0f} %",
        )
        for each in document.late
    ]
    headings = ["late rank", "in", "late by, a step", "latest at steps", "share of the variance"]
    return table(headings, rows, (0, 1))


def _rows(document: RankComparison) -> Table:
    shares = document.variance_shares or {}
    rows = [
        (
            each.rank,
            each.file,
            duration(each.step_ns),
            duration(each.step_ns - each.transfer_ns - each.waiting_ns),
            duration(each.transfer_ns),
            duration(each.waiting_ns),
            duration(each.communication_ns),
            None if each.overlap is None else f"{100 * each.overlap:.0f} %",
            f"{100 * shares[name]:.1f} %" if (name := f"rank {each.rank}") in shares else None,
        )
        for each in document.ranks
    ]
    headings = ["rank", "trace", "step", "own work", "transfer", "waiting", "communication"]
    note = document.why_no_variance_shares
    return table(
        [*headings, "hidden by work", "share of the variance"],
        rows,
        (0, 1),
        "" if note is None else f"The variance is not split: {note}.",
    )


def _slices(document: RankComparison) -> Table:
    means = [each.slices_ns for each in document.ranks]
    names = sorted({name for each in means for name in each}, key=lambda n: -means[0].get(n, 0.0))
    shown = document.ranks[:_MOST_DRAWN]
    rows = [
        (slice_label(name), *(duration(each.slices_ns.get(name, 0.0)) for each in shown))
        for name in names
    ]
    return table(["slice", *(f"rank {each.rank}" for each in shown)], rows)


def _label(name: str) -> str:
    return name if name in (TRANSFER, WAITING) else slice_label(name)
