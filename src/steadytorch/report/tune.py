"""A finished, replayed or interrupted search in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steadytorch.quantities import size
from steadytorch.report.text import duration, grouped, percent_above, plain, seconds, unit_of

if TYPE_CHECKING:
    from steadytorch.measure.measurement import Measurement
    from steadytorch.plan.record import Evidence, PlanRecord, Speedup, Timing, Trial
    from steadytorch.report.pages.tune import Gain, Taken, Tried
    from steadytorch.results.candidate import Candidate

_MOST_LISTED = 6


def name_of(candidate: Sequence[object]) -> str:
    """The candidate in one line."""
    return plain(" + ".join(map(str, candidate))) or "untouched"


def render_trials(console: Console, trials: Sequence[Trial], chosen: Candidate | None) -> None:
    """The table of candidates, fastest first; the others below, with their reasons."""
    timed = sorted((t for t in trials if t.median_ns is not None), key=lambda t: t.median_ns or 0.0)
    base = next((t.median_ns for t in timed if not t.transforms), None)
    if timed:
        console.print(_table(timed, base, chosen))
    for trial in trials:
        if trial.median_ns is None:
            outcome = plain(f"{trial.status}: {trial.reason}")
            text = Text(f"{name_of(trial.transforms)}: {outcome}", "yellow")
            console.print(Padding(text, (0, 0, 0, 2)))


def _table(trials: Sequence[Trial], base_ns: float | None, chosen: Candidate | None) -> Table:
    unit, unit_ns = unit_of(trials[0].median_ns or 1.0)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("candidate", ratio=1, overflow="fold")
    for heading in (unit, "±95 %", "gain", "tail", "error", "memory", "set-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in trials:
        median = trial.median_ns or 1.0
        table.add_row(
            _name_cell(trial, chosen),
            f"{median / unit_ns:.2f}",
            half_width(median, trial.median_ci_ns),
            "" if base_ns is None or not trial.transforms else f"{base_ns / median:.2f}x",
            tail(median, trial.p90_ns, trial.p99_ns),
            "" if trial.error is None else f"{trial.error:.0e}",
            "" if trial.peak_memory_bytes is None else size(trial.peak_memory_bytes),
            "" if trial.setup_s is None else seconds(trial.setup_s),
        )
    table.caption = screened(
        None if chosen is None else "the plan's own figures follow below, taken afresh"
    )
    table.caption_justify = "left"
    return table


def screened(plan: str | None) -> str:
    """How to read the table of candidates.

    Args:
        plan: where the plan's own figures are; None where no plan came of the search.
    """
    return (
        f"Screening: {plan or 'no plan came of it'}. ±95 %: half-width of the median's interval; "
        "tail: p99 above the median, or p90 (*) below 1,000 samples; error: relative L2 against "
        "the reference."
    )


def _name_cell(trial: Trial, chosen: Candidate | None) -> Text:
    name = Text(name_of(trial.transforms))
    if trial.transforms == chosen:
        name.stylize("bold green")
        name.append("\n<- the plan")
    elif trial.transforms and (trial.status != "ok" or trial.reason):
        label = trial.reason or trial.status
        label = label if trial.status == "ok" else f"{trial.status}: {label}"
        name.append(f"\n{plain(label)}", "yellow")
    if trial.suggested_by:
        name.append(f"\nfor {plain(', '.join(trial.suggested_by))}", "dim")
    return name


def half_width(median: float, interval: tuple[float, float] | None) -> str:
    """Half the width of a median's interval, in percent of the median."""
    if interval is None:
        return "-"
    return f"{100 * (interval[1] - interval[0]) / 2 / median:.1f}%"


def tail(median: float, p90: float | None, p99: float | None) -> str:
    """How far p99 lies above the median; p90, marked by a star, where there is no p99."""
    if p99 is not None:
        return f"+{100 * (p99 / median - 1):.0f}%"
    return "-" if p90 is None else f"+{100 * (p90 / median - 1):.0f}%*"


def render_plan(console: Console, plan: PlanRecord, heading: str) -> None:
    """What the plan is, what it gains, what it costs, and when it pays back."""
    evidence = plan.evidence
    console.print(Text.assemble((f"{heading}: ", "bold"), (name_of(plan.candidate), "bold green")))
    for line in _claims(plan, evidence):
        console.print(Padding(Text(plain(line)), (0, 0, 0, 2)))


def _claims(plan: PlanRecord, evidence: Evidence) -> list[str]:
    base, won, gain = evidence.baseline, evidence.winner, evidence.speedup
    trains = plan.trains is not None
    whom, of_step = untouched(trains), " of a step" if trains else ""
    lines = []
    if not plan.candidate:
        lines.append(f"nothing was shown to be faster than {whom}")
    elif gain.low is not None and gain.high is not None:
        lines.append(gain_told(gain, plan.key.objective, whom))
    # Its own trial is rejected for nothing: what is told of it is that it breaks the user's cap.
    lines.extend(t.reason for t in evidence.trials if not t.transforms and t.reason)
    lines.append(f"{won.metric}{of_step} {timing_told(won)}")
    if plan.candidate:
        lines.append(f"untouched {timing_told(base)}")
    lines.extend(_costs(plan, evidence))
    where = f"stored in {Path(plan.path).parent.parent}" if plan.path else "in memory only"
    lines.append(f"plan {plan.id}, {where}")
    return lines


def untouched(trains: bool) -> str:
    """What a plan is compared with."""
    return "an untouched step" if trains else "the untouched workload"


def gain_told(gain: Speedup | Gain, objective: str, whom: str) -> str:
    """How much faster a plan is, its interval where one may be claimed, and the claim."""
    interval = (
        "no interval"
        if gain.low is None or gain.high is None
        else f"99 % interval {gain.low:.2f} to {gain.high:.2f}"
    )
    return (
        f"{gain.estimate:.2f}x as fast{' at p99' if objective == 'p99' else ''} as {whom} "
        f"({interval}, {gain.pairs} fresh pairs; claim: {gain.claim})"
    )


def timing_told(timing: Timing | Measurement | Taken) -> str:
    """A median, its interval where one may be claimed, and the tail."""
    text = duration(timing.median_ns)
    if timing.median_ci_ns is not None:
        low, high = (duration(bound) for bound in timing.median_ci_ns)
        text += f" (95 % within {low} to {high})"
    name, tail = ("p99", timing.p99_ns) if timing.p99_ns is not None else ("p90", timing.p90_ns)
    return f"{text}, {name} {percent_above(tail, timing.median_ns)}"


def _costs(plan: PlanRecord, evidence: Evidence) -> list[str]:
    by_candidate = {trial.transforms: trial for trial in evidence.trials}
    won, base = by_candidate.get(plan.candidate), by_candidate.get(())
    if won is None or base is None or not plan.candidate:
        return []
    trains = plan.trains is not None
    return costs_told(won, base, evidence.reference, evidence.break_even_calls, trains)


def costs_told(
    won: Trial | Tried,
    base: Trial | Tried,
    reference: str,
    break_even_calls: int | None,
    trains: bool,
) -> list[str]:
    """What a plan costs beside the untouched workload: error, set-up and memory, a line each."""
    lines, call, of = [], "call", ""
    if trains:
        call, of = "step", " of outputs, loss, gradients and buffers at the most"
    if won.error is not None:
        lines.append(f"relative error{of} {won.error:.1e} against {reference}")
    if won.setup_s is not None:
        paid = break_even_calls
        after = "never paid back" if paid is None else f"paid back after {paid:,} {call}s"
        lines.append(f"set-up {seconds(won.setup_s)} at the first {call}, {after}")
    if won.peak_memory_bytes is not None and base.peak_memory_bytes is not None:
        lines.append(
            f"peak memory {size(won.peak_memory_bytes)}, untouched {size(base.peak_memory_bytes)}"
        )
    return lines


def render_left_out(console: Console, evidence: Evidence) -> None:
    """What was not tried, and why."""
    reasons = grouped({**evidence.not_applicable, **evidence.not_tried})
    if not reasons:
        return
    console.print(Text("Not tried", "bold"))
    for reason, names in reasons.items():
        listed = ", ".join(names[:_MOST_LISTED])
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        text = plain(f"{reason}: {listed}{more}")
        console.print(Padding(Text(text, "dim"), (0, 0, 0, 2)))
