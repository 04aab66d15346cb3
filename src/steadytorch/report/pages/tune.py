"""The HTML page of a complete or interrupted search, or of a replayed plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadytorch.quantities import size
from steadytorch.report import tune
from steadytorch.report.pages.series import timeline
from steadytorch.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Plot,
    Table,
    figure,
    lines_at,
    shortened,
    table,
)
from steadytorch.report.text import duration, grouped, percent_above, seconds, unit_of
from steadytorch.results.measure import Measurement
from steadytorch.results.saved import Saved
from steadytorch.results.tune import CandidateResult, Timing, TuneReport

_MOST_DRAWN = 60


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a search or a replayed plan."""
    document: TuneReport = saved.result
    baseline, winner = sides = document.sides
    timed = [each for each in document.candidates if each.median_ns is not None]
    series = [each for each in sides if isinstance(each, Measurement)]
    both = len(series) == 2
    return {
        "title": saved.head.workload,
        "headline": _headline(document),
        "remark": _remark(document),
        "costs": _costs(document),
        "sides_title": (
            "Untouched, before the interruption"
            if document.plan is None
            else "Untouched and winner, in the round that confirmed the choice"
        ),
        "sides": _sides(baseline, winner, document),
        "candidates": _candidates(document),
        "picture_of": _picture(timed, document.chosen) if timed else None,
        "left_out": _left_out(document),
        "timeline": _series(series) if both and document.chosen else None,
        "search": _facts(document),
    }


def _series(series: Sequence[Measurement]) -> Plot:
    colours = {"untouched": BLUE, "winner": GREEN}
    return timeline(series, list(colours), colours, "Untouched, then the winner")


def _headline(document: TuneReport) -> str:
    gain = document.speedup
    if document.interrupted or gain is None:
        return "the search was interrupted: no claim"
    if not document.chosen:
        return f"no candidate was shown to be faster than {_untouched(document)}"
    if gain.estimate is None:
        return "the speedup is not a number"
    objective = "latency" if document.plan is None else document.plan.objective
    told = tune.format_gain(gain, objective, _untouched(document))
    return f"{tune.name_of(document.chosen)}: {told}"


def _untouched(document: TuneReport) -> str:
    return tune.untouched(document.trains)


def _remark(document: TuneReport) -> str:
    if document.replayed:
        return "A replayed plan: the store keeps the evidence of its search without samples."
    if document.interrupted:
        return "The search was interrupted: this page shows its measurements; no plan was kept."
    return ""


def _costs(document: TuneReport) -> list[str]:
    """Lines on the inputs of the workload and the costs of the plan."""
    step = "a training step on " if document.trains else ""
    return [f"{step}{document.inputs}", *tune.format_costs(document)]


def _sides(
    baseline: Measurement | Timing | None, winner: Measurement | Timing | None, document: TuneReport
) -> Table:
    named = [("untouched", baseline), (tune.name_of(document.chosen), winner)]
    rows = [
        (
            *(name, side.metric, duration(side.median_ns), _interval(side.median_ci_ns)),
            *(_tail(side.p90_ns, side), _tail(side.p99_ns, side)),
        )
        for name, side in (named if document.chosen else named[:1])
        if side is not None
    ]
    headings = ["", "metric", "median", "95 % interval", "p90", "p99"]
    return table(headings, rows, (0, 1), "p99 needs 1,000 independent samples." if rows else "")


def _interval(interval: tuple[float, float] | None) -> str:
    return "none" if interval is None else f"{duration(interval[0])} to {duration(interval[1])}"


def _tail(value: float | None, side: Measurement | Timing) -> str:
    if value is None:
        return "too few samples"
    return f"{duration(value)} ({percent_above(value, side.median_ns)})"


def _candidates(document: TuneReport) -> Table:
    unit, unit_ns = unit_of(
        min((c.median_ns for c in document.candidates if c.median_ns), default=1)
    )
    base = next((c.median_ns for c in document.candidates if not c.transforms), None)
    rows = [_row(n, each, document, base, unit_ns) for n, each in enumerate(_ranked(document), 1)]
    headings = ["#", "candidate", "status", f"median, {unit}", "±95 %", "gain", "tail", "error"]
    plan = None if document.plan is None else "the plan was timed again; see its figures above"
    note = tune.screened(plan)
    headings += ["memory", "set-up", "reason"]
    return table(headings, rows, (1, 2, 10), note, ids="candidate")


def _ranked(document: TuneReport) -> list[CandidateResult]:
    """The candidates, fastest first; candidates without a time come last."""
    late = float("inf")
    return sorted(document.candidates, key=lambda c: late if c.median_ns is None else c.median_ns)


def _row(
    number: int, tried: CandidateResult, document: TuneReport, base: float | None, unit_ns: float
) -> tuple[object, ...]:
    median = tried.median_ns
    plan = document.plan is not None and tried.transforms == document.chosen
    suggested = f"for {', '.join(tried.suggested_by)}" if tried.suggested_by else ""
    timed: tuple[object, ...] = (None, None, None, None)
    if median is not None:
        gain = None if base is None or not tried.transforms else f"{base / median:.2f}x"
        width = tune.half_width(median, tried.median_ci_ns)
        timed = (
            f"{median / unit_ns:.2f}",
            width,
            gain,
            tune.tail(median, tried.p90_ns, tried.p99_ns),
        )
    return (
        *(number, tune.name_of(tried.transforms), "the plan" if plan else tried.status, *timed),
        None if tried.error is None else f"{tried.error:.0e}",
        None if tried.peak_memory_bytes is None else size(tried.peak_memory_bytes),
        None if tried.setup_s is None else seconds(tried.setup_s),
        "; ".join(filter(None, (tried.reason, suggested))),
    )


def _picture(timed: Sequence[CandidateResult], chosen: tuple[str, ...]) -> Plot:
    """Charts the medians of the candidates with their intervals, the fastest at the top."""
    ranked = sorted(timed, key=lambda each: each.median_ns or 0.0)
    unit, unit_ns = unit_of(ranked[0].median_ns or 1.0)
    shown = ranked[:_MOST_DRAWN]
    points = [(n, each, (each.median_ns or 0.0) / unit_ns) for n, each in enumerate(shown, 1)]
    bounds = [
        (at, at) if each.median_ci_ns is None else tuple(t / unit_ns for t in each.median_ci_ns)
        for _, each, at in points
    ]
    dots = {
        "type": "scatter",
        "mode": "markers",
        "showlegend": False,
        "x": [at for _, _, at in points],
        "y": [f"{n} {shortened(tune.name_of(each.transforms))}" for n, each, _ in points],
        "text": [tune.name_of(each.transforms) for _, each, _ in points],
        "marker": {"size": 10, "color": [_colour(each, chosen) for _, each, _ in points]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "thickness": 2,
            "width": 5,
            "color": GREY,
            "array": [
                max(0.0, high - at) for (_, _, at), (_, high) in zip(points, bounds, strict=True)
            ],
            "arrayminus": [
                max(0.0, at - low) for (_, _, at), (low, _) in zip(points, bounds, strict=True)
            ],
        },
        "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {unit}<extra></extra>",
    }
    layout = {"yaxis": {"type": "category", "autorange": "reversed", "tickfont": {"size": 11}}}
    base = next((at for _, each, at in points if not each.transforms), None)
    if base is not None:
        line = lines_at([(base, "", BLUE, "dot")])
        layout |= {"shapes": line["shapes"]}
    note = (
        "Dots: screening medians. Bars: their 95 % intervals, if any. Green: the plan. Blue: "
        "untouched. Orange: rejected, failed, skipped or not allowed."
    )
    if len(shown) < len(ranked):
        note += f" Drawn: the fastest {len(shown)} of {len(ranked)}."
    axis = f"median per iteration, {unit}"
    shape = figure([dots], axis, "", height=110 + 30 * len(shown), layout=layout)
    return Plot("Candidates", shape, note, rows="candidate")


def _colour(tried: CandidateResult, chosen: tuple[str, ...]) -> str:
    if not tried.transforms:
        return BLUE
    if tried.transforms == chosen:
        return GREEN
    return GREY if tried.status == "ok" and tried.allowed else ORANGE


def _left_out(document: TuneReport) -> Table:
    left = grouped({**document.not_applicable, **document.not_tried})
    rows = [(reason, ", ".join(names)) for reason, names in left.items()]
    return table(["why", "not tried"], rows, (0, 1))


def _facts(document: TuneReport) -> Table:
    plan, paid = document.plan, document.break_even_calls
    kept = document.speedup is not None and bool(document.chosen)
    rows = [
        ("plan", "not kept" if plan is None else plan.id),
        ("its file", "in memory only" if plan and plan.path is None else plan and plan.path),
        ("objective", plan and plan.objective),
        ("regime of the untouched workload", document.regime),
        (
            "set-up paid back after",
            f"{paid:,} {'steps' if document.trains else 'calls'}"
            if paid is not None
            else "never"
            if kept
            else None,
        ),
        ("reference of the errors", document.reference),
        ("the search took", document.ended or seconds(document.seconds)),
    ]
    return table(["search", "value"], [row for row in rows if row[1] is not None], (0, 1))
