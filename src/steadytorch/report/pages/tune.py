"""The page of a search, a replayed plan or a search that was cut short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from steadytorch.measure.measurement import Measurement
from steadytorch.quantities import size
from steadytorch.report import tune
from steadytorch.report.pages.document import Document
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

_MOST_DRAWN = 60


class Taken(msgspec.Struct, frozen=True):
    """A measurement without its samples."""

    metric: str
    median_ns: float
    median_ci_ns: tuple[float, float] | None
    p90_ns: float
    p99_ns: float | None


class Gain(msgspec.Struct, frozen=True):
    """How many times as fast as the untouched workload; None where no number was found."""

    estimate: float | None
    low: float | None
    high: float | None
    claim: str
    verdict: str
    pairs: int


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate and what became of it."""

    transforms: tuple[str, ...]
    suggested_by: tuple[str, ...] = ()
    status: Literal["ok", "rejected", "failed", "skipped"]
    reason: str | None
    allowed: bool = True
    error: float | None
    peak_memory_bytes: int | None
    setup_s: float | None
    median_ns: float | None
    median_ci_ns: tuple[float, float] | None = None
    p90_ns: float | None = None
    p99_ns: float | None = None


class Kept(msgspec.Struct, frozen=True):
    """The plan that came of it."""

    id: str
    path: str | None
    transforms: tuple[str, ...]
    objective: str


class TuneDocument(Document, frozen=True, kw_only=True):
    """What the page needs of a search; of a replayed plan it is the search that found it."""

    baseline: msgspec.Raw
    winner: msgspec.Raw
    chosen: tuple[str, ...]
    regime: str
    candidates: tuple[Tried, ...]
    not_applicable: dict[str, str]
    not_tried: dict[str, str]
    inputs: str
    trains: bool
    speedup: Gain | None
    break_even_calls: int | None
    reference: str
    seconds: float
    interrupted: bool
    plan: Kept | None
    replayed: bool


def contents(document: TuneDocument) -> dict[str, Any]:
    """What the template shows of a search."""
    sides = [_side(document.baseline, document), _side(document.winner, document)]
    baseline, winner = sides
    timed = [each for each in document.candidates if each.median_ns is not None]
    series = [each for each in sides if isinstance(each, Measurement)]
    both = len(series) == 2
    return {
        "title": document.workload,
        "headline": _headline(document),
        "remark": _remark(document),
        "costs": _costs(document),
        "sides_title": (
            "Untouched, as far as it was measured"
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


def _side(raw: msgspec.Raw, document: TuneDocument) -> Measurement | Taken | None:
    """One of the two sides; only files of searches have its samples.

    Raises:
        ValueError: it is neither of the two forms.
    """
    form = Taken if document.replayed else Measurement
    return msgspec.json.decode(raw, type=form | None)


def _series(series: Sequence[Measurement]) -> Plot:
    colours = {"untouched": BLUE, "winner": GREEN}
    return timeline(series, list(colours), colours, "Untouched, then the winner")


def _headline(document: TuneDocument) -> str:
    gain = document.speedup
    if document.interrupted or gain is None:
        return "the search was cut short: nothing is claimed"
    if not document.chosen:
        return f"nothing was shown to be faster than {_untouched(document)}"
    if gain.estimate is None:
        return "how much faster it is could not be told"
    objective = "latency" if document.plan is None else document.plan.objective
    told = tune.gain_told(gain, objective, _untouched(document))
    return f"{tune.name_of(document.chosen)}: {told}"


def _untouched(document: TuneDocument) -> str:
    return tune.untouched(document.trains)


def _remark(document: TuneDocument) -> str:
    if document.replayed:
        return "A stored plan was replayed: what its search found is kept without samples."
    if document.interrupted:
        return (
            "The search was interrupted. What was measured until then is below; no plan was kept."
        )
    return ""


def _costs(document: TuneDocument) -> list[str]:
    """What was searched for, and what the plan costs."""
    step = "a training step on " if document.trains else ""
    return [f"{step}{document.inputs}", *_price(document)]


def _price(document: TuneDocument) -> list[str]:
    by_name = {each.transforms: each for each in document.candidates}
    won, base = by_name.get(document.chosen), by_name.get(())
    if won is None or base is None or not document.chosen or document.speedup is None:
        return []
    paid = document.break_even_calls
    return tune.costs_told(won, base, document.reference, paid, document.trains)


def _sides(
    baseline: Measurement | Taken | None, winner: Measurement | Taken | None, document: TuneDocument
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


def _tail(value: float | None, side: Measurement | Taken) -> str:
    if value is None:
        return "too few samples"
    return f"{duration(value)} ({percent_above(value, side.median_ns)})"


def _candidates(document: TuneDocument) -> Table:
    unit, unit_ns = unit_of(
        min((c.median_ns for c in document.candidates if c.median_ns), default=1)
    )
    base = next((c.median_ns for c in document.candidates if not c.transforms), None)
    rows = [_row(n, each, document, base, unit_ns) for n, each in enumerate(_ranked(document), 1)]
    headings = ["#", "candidate", "status", f"median, {unit}", "±95 %", "gain", "tail", "error"]
    plan = None if document.plan is None else "the plan's own figures stand above, taken afresh"
    note = tune.screened(plan)
    return table([*headings, "memory", "set-up", "reason"], rows, (1, 2, 10), note)


def _ranked(document: TuneDocument) -> list[Tried]:
    """Fastest first, those without a time at the end."""
    late = float("inf")
    return sorted(document.candidates, key=lambda c: late if c.median_ns is None else c.median_ns)


def _row(
    number: int, tried: Tried, document: TuneDocument, base: float | None, unit_ns: float
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


def _picture(timed: Sequence[Tried], chosen: tuple[str, ...]) -> Plot:
    """Medians with their intervals, the fastest at the top."""
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
        "Dots: screening medians; bars: their 95 % intervals where one may be claimed. Green: the "
        "plan; blue: untouched; orange: not allowed or not in order."
    )
    if len(shown) < len(ranked):
        note += f" The fastest {len(shown)} of {len(ranked)} are drawn."
    axis = f"median per iteration, {unit}"
    shape = figure([dots], axis, "", height=110 + 30 * len(shown), layout=layout)
    return Plot("Candidates", shape, note)


def _colour(tried: Tried, chosen: tuple[str, ...]) -> str:
    if not tried.transforms:
        return BLUE
    if tried.transforms == chosen:
        return GREEN
    return GREY if tried.status == "ok" and tried.allowed else ORANGE


def _left_out(document: TuneDocument) -> Table:
    left = grouped({**document.not_applicable, **document.not_tried})
    rows = [(reason, ", ".join(names)) for reason, names in left.items()]
    return table(["why", "not tried"], rows, (0, 1))


def _facts(document: TuneDocument) -> Table:
    plan, paid = document.plan, document.break_even_calls
    kept = document.speedup is not None and bool(document.chosen)
    rows = [
        ("plan", "none was kept" if plan is None else plan.id),
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
        ("the search took", seconds(document.seconds)),
    ]
    return table(["search", "value"], [row for row in rows if row[1] is not None], (0, 1))
