"""Prints a finished, replayed or interrupted tuning search in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steadytorch.quantities import counted, size
from steadytorch.report.text import (
    duration,
    grouped,
    percent_above,
    plain,
    print_indented,
    seconds,
    unit_of,
)
from steadytorch.results.candidate import NOT_INSTALLED, describe
from steadytorch.results.measure import Measurement
from steadytorch.results.tune import CandidateResult, Gain, Timing, TuneReport

_MOST_LISTED = 6
WIDE = 0.2
"""Width of the interval of a median, relative, from which the result says that times scatter."""
_WHERE = {"p99": " at p99", "contended": " at p99 beside a busy process"}
_RUNNERS_UP = 2
_MOST_INTERRUPTED = 5
"""Candidates listed after an interrupted search."""


def name_of(candidate: Sequence[object]) -> str:
    """The transforms of a candidate in one line."""
    return plain(describe(candidate))


# -- the summary --------------------------------------------------------------------------------


def render_summary(console: Console, search: TuneReport, plan: TuneReport, store: str = "") -> None:
    """Prints the plan with its gain and costs, the runners-up and candidate counts by outcome.

    The summary takes at most 25 lines of 80 columns.

    Args:
        console: where to print.
        search: the search.
        plan: the plan that was kept; another process may have stored a different one first.
        store: the option that names the store, for the suggested command.
    """
    _say(console, _titled("Plan", plan), 0, most=4)
    for line in _claims(plan):
        _say(console, Text(plain(line)))
    ranked = _runners_up(search)
    if ranked:
        _say(console, Text("Runners-up, as screened", "bold"), 0)
    for each in ranked:
        _say(console, _runner_up(each, search), most=1)
    for line in _rest(search):
        _say(console, Text(line, "dim"), 0, most=1)
    show = "run with --all"
    if plan.plan is not None and plan.plan.path is not None:
        show = f"steady plans show {plan.plan.id}{store}"
    console.print(Text(f"All candidates: {plain(show)}", "dim"), soft_wrap=True)


def render_missing(console: Console, found: TuneReport) -> None:
    """Prints which engines were not tried because an optional dependency is not installed."""
    reasons = found.not_applicable.items()
    names = dict.fromkeys(n.partition("(")[0] for n, reason in reasons if NOT_INSTALLED in reason)
    if names:
        line = f"Not installed: {', '.join(names)}; to try: pip install 'steadytorch[cpu]'"
        _say(console, Text(plain(line), "dim"), 0, most=2)


def render_interrupted(console: Console, search: TuneReport) -> None:
    """Prints the fastest candidates of an interrupted search and candidate counts by outcome."""
    timed = _by_time(search.candidates)
    if timed:
        _say(console, Text("Fastest so far, as screened", "bold"), 0)
    for each in timed[:_MOST_INTERRUPTED]:
        _say(console, _runner_up(each, search), most=1)
    for line in _rest(search):
        _say(console, Text(line, "dim"), 0, most=1)
    _say(console, Text("All candidates: run with --all", "dim"), 0)


def _say(console: Console, text: Text, indent: int = 2, most: int = 2) -> None:
    print_indented(console, text, indent, most)


def _by_time(candidates: Sequence[CandidateResult]) -> list[CandidateResult]:
    timed = (each for each in candidates if each.median_ns is not None)
    return sorted(timed, key=lambda each: each.median_ns or 0.0)


def _runners_up(search: TuneReport) -> list[CandidateResult]:
    """The fastest verified candidates, except the winner, that the allowed precision admits."""
    others = [
        each
        for each in _by_time(search.candidates)
        if each.transforms and each.transforms != search.chosen
        if each.status == "ok" and each.allowed
    ]
    return others[:_RUNNERS_UP]


def _runner_up(each: CandidateResult, search: TuneReport) -> Text:
    base, median = search.untouched_tried, each.median_ns or 1.0
    gain = ""
    if base is not None and base.median_ns is not None and _compares(each, search):
        gain = f"{base.median_ns / median:.2f}x"
    return Text(f"{gain:>6} {duration(median):>10}  {name_of(each.transforms)}")


def _rest(search: TuneReport) -> list[str]:
    """Summary lines: candidate counts by outcome, and the reasons for untried candidates."""
    timed = sum(each.median_ns is not None for each in search.candidates)
    parts = [f"{counted(timed, 'candidate')} timed"]
    for status in ("rejected", "failed", "skipped"):
        found = sum(each.status == status for each in search.candidates)
        if found:
            parts.append(f"{found} {status}")
    lines = [", ".join(parts)]
    if len(search.devices) > 1:
        others = ", ".join(search.devices[1:])
        lines.append(f"also timed on {others}; the winner's times are from {search.devices[0]}")
    lines += [f"without {name}: {plain(why)}" for name, why in search.devices_left_out.items()]
    if search.ended:
        lines.insert(0, plain(search.ended))
    left = {**search.not_applicable, **search.not_tried}
    if left:
        reasons = sorted(grouped(left).items(), key=lambda item: -len(item[1]))
        told = "; ".join(f"{reason} ({len(names)})" for reason, names in reasons)
        lines.append(f"{len(left)} not tried: {plain(told)}")
    return lines


# -- the table of candidates --------------------------------------------------------------------


def render_trials(console: Console, search: TuneReport) -> None:
    """Prints all candidates: a table of the timed ones, fastest first, then the untimed ones."""
    timed = _by_time(search.candidates)
    if timed:
        console.print(_table(timed, search))
    for each in search.candidates:
        if each.median_ns is None:
            outcome = plain(f"{each.status}: {each.reason}")
            text = Text(f"{name_of(each.transforms)}: {outcome}", "yellow")
            console.print(Padding(text, (0, 0, 0, 2)))


def _table(timed: Sequence[CandidateResult], search: TuneReport) -> Table:
    unit, unit_ns = unit_of(timed[0].median_ns or 1.0)
    base_ns = next((each.median_ns for each in timed if not each.transforms), None)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("candidate", ratio=1, overflow="fold")
    for heading in (unit, "±95 %", "gain", "tail", "error", "memory", "set-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in timed:
        median = each.median_ns or 1.0
        table.add_row(
            _name_cell(each, search),
            f"{median / unit_ns:.2f}",
            half_width(median, each.median_ci_ns),
            "" if base_ns is None or not _compares(each, search) else f"{base_ns / median:.2f}x",
            tail(median, each.p90_ns, each.p99_ns),
            "" if each.error is None else f"{each.error:.0e}",
            "" if each.peak_memory_bytes is None else size(each.peak_memory_bytes),
            "" if each.setup_s is None else seconds(each.setup_s),
        )
    table.caption = screened(
        None if search.plan is None else "the plan was timed again; see its figures below"
    )
    table.caption_justify = "left"
    return table


def _compares(each: CandidateResult, search: TuneReport) -> bool:
    """Whether a candidate was screened on the same device as the listed untouched workload."""
    return bool(each.transforms) and describe(each.transforms) not in search.timed_on


def screened(plan: str | None) -> str:
    """The caption of the candidate table.

    Args:
        plan: where the plan's own figures are; None if there is no plan.
    """
    return (
        f"Screening figures{f'; {plan}' if plan else ''}. ±95 %: half-width of the median's "
        "interval. tail: p99 above the median; *: p90, below 1,000 samples. error: relative L2 "
        "against the reference."
    )


def _name_cell(each: CandidateResult, search: TuneReport) -> Text:
    name = Text(name_of(each.transforms))
    if search.plan is not None and each.transforms == search.chosen:
        name.stylize("bold green")
        name.append("\n<- the plan")
    elif each.transforms and (each.status != "ok" or each.reason):
        label = each.reason or each.status
        label = label if each.status == "ok" else f"{each.status}: {label}"
        name.append(f"\n{plain(label)}", "yellow")
    if (device := search.timed_on.get(describe(each.transforms))) is not None:
        name.append(f"\non {plain(device)}", "dim")
    if each.suggested_by:
        name.append(f"\nfor {plain(', '.join(each.suggested_by))}", "dim")
    return name


def half_width(median: float, interval: tuple[float, float] | None) -> str:
    """Half the width of a median's interval, in percent of the median."""
    if interval is None:
        return "-"
    return f"{100 * (interval[1] - interval[0]) / 2 / median:.1f}%"


def tail(median: float, p90: float | None, p99: float | None) -> str:
    """Excess of p99 over the median, in percent; falls back to p90, marked with a star."""
    if p99 is not None:
        return f"+{100 * (p99 / median - 1):.0f}%"
    return "-" if p90 is None else f"+{100 * (p90 / median - 1):.0f}%*"


def render_left_out(console: Console, search: TuneReport) -> None:
    """Prints the candidates that were not tried, grouped by reason."""
    reasons = grouped({**search.not_applicable, **search.not_tried})
    if not reasons:
        return
    console.print(Text("Not tried", "bold"))
    for reason, names in reasons.items():
        listed = ", ".join(names[:_MOST_LISTED])
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        text = plain(f"{reason}: {listed}{more}")
        console.print(Padding(Text(text, "dim"), (0, 0, 0, 2)))


# -- the plan -----------------------------------------------------------------------------------


def render_plan(console: Console, plan: TuneReport, heading: str) -> None:
    """Prints a plan, its gain, its costs and the number of calls to break even."""
    print_indented(console, _titled(heading, plan), 0)
    for line in _claims(plan):
        print_indented(console, Text(plain(line)))


def _titled(heading: str, plan: TuneReport) -> Text:
    return Text.assemble((f"{heading}: ", "bold"), (name_of(plan.chosen), "bold green"))


def _claims(plan: TuneReport) -> list[str]:
    gain, (base, won) = plan.speedup, plan.sides
    whom, of_step = untouched(plan.trains), " of a step" if plan.trains else ""
    lines = []
    if not plan.chosen:
        lines.append(f"no candidate was shown to be faster than {whom}")
    elif gain is not None and gain.low is not None and gain.high is not None:
        lines.append(format_gain(gain, _objective(plan), whom))
    # The untouched workload is never rejected: its reason is that it exceeds the memory cap.
    lines.extend(t.reason for t in plan.candidates if not t.transforms and t.reason)
    if won is not None:
        lines.append(f"{won.metric}{of_step} {format_timing(won)}")
    if plan.chosen and base is not None:
        lines.append(f"untouched {format_timing(base)}")
    is_provoked = _objective(plan) == "contended"
    if not is_provoked and any(each is not None and _scatters(each) for each in (base, won)):
        lines.append("times scatter: other programs may use these cores, see steady doctor")
    lines.extend(format_costs(plan))
    lines.extend(_without_int8(plan))
    if plan.plan is not None:
        path = plan.plan.path
        where = f"stored in {Path(path).parent.parent}" if path else "in memory only"
        lines.append(f"plan {plan.plan.id}, {where}")
    return lines


def _scatters(timing: Timing | Measurement) -> bool:
    """Whether the interval of a median is wider than the fraction `WIDE` of the median."""
    if timing.median_ci_ns is None:
        return False
    low, high = timing.median_ci_ns
    return high - low > WIDE * timing.median_ns


def _without_int8(plan: TuneReport) -> list[str]:
    """A line on why int8 did not win; empty if int8 won, was not allowed or was not tried."""
    allowed = [each for each in plan.candidates if each.allowed]
    tried = [each for each in allowed if each.precision == "int8"]
    if not tried or any(each.transforms == plan.chosen for each in tried):
        return []
    timed = _by_time([each for each in allowed if each.status == "ok"])
    fastest = next((each for each in timed if each.precision == "int8"), None)
    best = next((each for each in timed if each.precision != "int8"), None)
    if fastest is None or best is None:
        return [f"int8: no gain shown, {name_of(tried[0].transforms)} {_outcome(tried[0])}"]
    return [
        f"int8: no gain here, {_ratio(best, fastest)} of {name_of(best.transforms)}, as screened"
    ]


def _outcome(each: CandidateResult) -> str:
    return f"{each.status}: {each.reason}" if each.reason else each.status


def _ratio(base: CandidateResult, other: CandidateResult) -> str:
    """The ratio of two candidates' median times, with bounds from both medians' intervals."""
    ratio = (base.median_ns or 1.0) / (other.median_ns or 1.0)
    if base.median_ci_ns is None or other.median_ci_ns is None:
        return f"{ratio:.2f}x"
    low = base.median_ci_ns[0] / other.median_ci_ns[1]
    high = base.median_ci_ns[1] / other.median_ci_ns[0]
    return f"{ratio:.2f}x ({low:.2f} to {high:.2f})"


def _objective(plan: TuneReport) -> str:
    return "latency" if plan.plan is None else plan.plan.objective


def untouched(trains: bool) -> str:
    """The name of a plan's baseline: the untouched workload, or an untouched training step."""
    return "an untouched step" if trains else "the untouched workload"


def format_gain(gain: Gain, objective: str, whom: str) -> str:
    """A plan's speedup as text, with its interval, number of pairs and scope (`claim`)."""
    if gain.estimate is None:
        return "the speedup is not a number"
    interval = (
        "no interval"
        if gain.low is None or gain.high is None
        else f"99 % interval {gain.low:.2f} to {gain.high:.2f}"
    )
    return (
        f"{gain.estimate:.2f}x as fast{_WHERE.get(objective, '')} as {whom} "
        f"({interval}, {gain.pairs} fresh pairs; claim: {gain.claim})"
    )


def format_timing(timing: Timing | Measurement) -> str:
    """A median as text, with its interval and how far p99 or p90 exceeds the median."""
    text = duration(timing.median_ns)
    if timing.median_ci_ns is not None:
        low, high = (duration(bound) for bound in timing.median_ci_ns)
        text += f" (95 % within {low} to {high})"
    name, tail = ("p99", timing.p99_ns) if timing.p99_ns is not None else ("p90", timing.p90_ns)
    return f"{text}, {name} {percent_above(tail, timing.median_ns)}"


def format_costs(plan: TuneReport) -> list[str]:
    """Lines on a plan's error, set-up time and memory; empty for a plan without transforms."""
    won, base = plan.winner_tried, plan.untouched_tried
    if won is None or base is None or not plan.chosen or plan.speedup is None:
        return []
    lines, call, of = [], "call", ""
    if plan.trains:
        call, of = "step", " of outputs, loss, gradients and buffers at the most"
    if won.error is not None:
        lines.append(f"relative error{of} {won.error:.1e} against {plan.reference}")
    if won.setup_s is not None:
        paid = plan.break_even_calls
        after = "never paid back" if paid is None else f"paid back after {counted(paid, call)}"
        lines.append(f"set-up {seconds(won.setup_s)} at the first {call}, {after}")
    if won.peak_memory_bytes is not None and base.peak_memory_bytes is not None:
        lines.append(
            f"peak memory {size(won.peak_memory_bytes)}, untouched {size(base.peak_memory_bytes)}"
        )
    return lines
