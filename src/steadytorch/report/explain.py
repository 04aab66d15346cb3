"""Renders an explanation in the terminal: verdict, time slices of a step, findings, caveats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Console
from rich.text import Text

from steadytorch.findings.finding import NO_GPU_EVENTS
from steadytorch.quantities import counted
from steadytorch.rates.regime import REGIMES
from steadytorch.report.ledger import in_words, render_ledger
from steadytorch.report.measure import causes
from steadytorch.report.text import (
    duration,
    format_drift,
    percent_above,
    plain,
    print_indented,
    share,
)
from steadytorch.results.explain import Abstention, Explanation, Finding, Line, Roofline
from steadytorch.traces.kernel_names import short

MOST_FINDINGS = 5
MOST_KERNELS = 5
_MOST_SLOW = 2
_BRIEF_SLICES = 3
_BRIEF_FINDINGS = 2
_MOST_USUAL = 1.5
"""Maximum mean over median at which the usual steps stand for all."""
_DISTORTED = 1.1
"""Print a warning if profiling slowed the steps by this factor or more."""


def render_explain(
    console: Console, name: str, result: Explanation, everything: bool = False
) -> None:
    """Prints an explanation of step times; every line fits the console.

    Args:
        console: where to print.
        name: of the workload or the trace file.
        result: the explanation.
        everything: whether to print all findings with all evidence, and why rules abstained.
    """
    _headline(console, name, result)
    if result.steps:
        render_ledger(console, result)
    _findings(console, result, everything)
    if result.roofline is not None and result.roofline.lines:
        _kernels(console, result.roofline, result.gpu is not None)
    _variability(console, result)
    _doubts(console, result, everything)
    if result.failed is not None:
        _say(console, f"ended early: {plain(result.failed)}", "yellow")


def render_brief(console: Console, name: str, result: Explanation) -> None:
    """Prints the verdict, the largest time slices and the first findings, in at most 19 lines.

    Args:
        console: where to print.
        name: of the workload.
        result: the explanation.
    """
    print_indented(console, _verdict(name, result), 0, 2)
    for line in list(times(result))[:1]:
        print_indented(console, Text(line), 2, 1)
    if result.steps:
        render_ledger(console, result, _BRIEF_SLICES)
    shown = [each for each in result.findings if not each.information][:_BRIEF_FINDINGS]
    if shown:
        console.print()
        console.print(Text("Findings, worst first", "bold"))
    for number, finding in enumerate(shown, 1):
        title = Text(f"{number}. {plain(finding.title)}", "bold yellow")
        print_indented(console, title, 2, 1)
        print_indented(console, Text(plain(f"fix: {finding.fix}")), 4, 2)
    if result.failed is not None:
        print_indented(console, Text(f"ended early: {plain(result.failed)}", "yellow"), 0, 1)


# -- the headline -------------------------------------------------------------------------------


def _headline(console: Console, name: str, result: Explanation) -> None:
    print_indented(console, _verdict(name, result), 0)
    for line in times(result):
        print_indented(console, Text(line))


def _verdict(name: str, result: Explanation) -> Text:
    regime = (plain(result.regime), "bold")
    return Text.assemble((plain(name), "bold"), ": ", regime, pace(result))


def pace(result: Explanation) -> str:
    """What the regime means, and whether it holds for the usual steps only; follows its name."""
    where = " in usual steps" if _is_of_usual_steps(result) else ""
    return f"{where}, {REGIMES[result.regime]}" if result.regime in REGIMES else where


def _is_of_usual_steps(result: Explanation) -> bool:
    """Whether slow steps take much of the time, but none of them was profiled."""
    measured, profiled = result.measured, [step.total_ns for step in result.steps]
    return (
        measured is not None
        and bool(profiled)
        and measured.mean_ns > _MOST_USUAL * measured.median_ns
        and result.step_ns <= _MOST_USUAL * median(profiled)
    )


def times(result: Explanation) -> Iterator[str]:
    """Yields the step time without and with the profiler, and what the profile misses."""
    if result.measured is not None:
        period = result.measured
        name, tail = ("p99", period.p99_ns) if period.p99_ns is not None else ("p90", period.p90_ns)
        yield (
            f"{duration(period.median_ns)} a step without the profiler, "
            f"{plain(format_drift(period))}, {name} {percent_above(tail, period.median_ns)}"
        )
    if result.steps:
        yield _profiled(result)
    if result.measured is not None and _is_of_usual_steps(result):
        mean, usual = result.measured.mean_ns, result.measured.median_ns
        yield (
            f"{duration(mean)} a step on average, {mean / usual:.1f}x the median: the profile "
            "covers only usual steps"
        )


def _profiled(result: Explanation) -> str:
    count = len(result.steps)
    text = f"{duration(result.step_ns)} " + (
        f"a step, mean of {count} profiled" if count > 1 else "in the one profiled step"
    )
    if not result.marked:
        text = f"{duration(result.step_ns)} in total; the trace marks no steps"
    if result.gpu is not None:
        busy = share(result.gpu.busy_ns, result.gpu.total_ns)
        text += f"; GPU busy {busy} between its first and last event"
    return text


# -- findings -----------------------------------------------------------------------------------


def _findings(console: Console, result: Explanation, everything: bool) -> None:
    shown = result.findings if everything else result.findings[:MOST_FINDINGS]
    console.print()
    if not shown:
        console.print(Text("No findings", "bold"))
        asked = "some rules lacked data" if result.abstained else "every rule had its data"
        print_indented(console, Text(asked))
        return
    console.print(Text("Findings, worst first", "bold"))
    for number, finding in enumerate(shown, 1):
        _finding(console, number, finding, result, everything)
    left = len(result.findings) - len(shown)
    if left:
        print_indented(console, Text(f"{counted(left, 'more finding')}: --all", "dim"))


def _finding(
    console: Console, number: int, finding: Finding, result: Explanation, everything: bool
) -> None:
    colour = "bold" if finding.information else "bold yellow"
    title = (plain(finding.title), colour)
    print_indented(console, Text.assemble(f"{number}. ", title, (f"  {plain(finding.id)}", "dim")))
    evidence = finding.evidence if everything else finding.evidence[:1]
    lines = [*evidence, recoverable(finding, result)]
    if not finding.information or everything:
        named = f" Transforms: {', '.join(finding.transforms)}." if finding.transforms else ""
        lines.append(f"fix: {finding.fix}{named}")
    if everything:
        lines += [f"check: {finding.check}", f"false alarm if: {finding.false_alarm}"]
    for line in lines:
        if line:
            print_indented(console, Text(plain(line)), 4)


def recoverable(finding: Finding, result: Explanation) -> str:
    """The step time that fixing a finding could save, with the confidence."""
    low, high = finding.recoverable_ns
    parts = []
    if high > 0:
        amount = f"up to {duration(high)}" if low <= 0 else f"{duration(low)} to {duration(high)}"
        # Unprofiled steps may be longer than the profiled ones.
        part = f" ({share(high, result.step_ns)})" if high <= result.step_ns else ""
        parts.append(f"recoverable: {amount} a step{part}")
    if finding.variance_share is not None:
        parts.append(f"{100 * finding.variance_share:z.0f} % of the variance")
    if finding.information:
        parts.append("for information")
    parts.append(f"confidence: {finding.confidence}")
    return "; ".join(parts)


# -- kernels ------------------------------------------------------------------------------------


def _kernels(console: Console, lines: Roofline, on_gpu: bool) -> None:
    console.print()
    what = "Top kernels" if on_gpu else "Top operators"
    console.print(Text.assemble((what, "bold"), (", % of total operator time", "dim")))
    shown = lines.lines[:MOST_KERNELS]
    limited = any(line.share_of_limit is not None for line in shown)
    for line in shown:
        figures = _kernel(line, lines.steps, limited)
        name = plain(short(line.name, max(8, console.width - 2 - len(figures))))
        print_indented(console, Text(figures + name))
    if compared := least(lines):
        print_indented(console, Text(compared))


def least(lines: Roofline) -> str:
    """Compares the time of kernels with their minimum at the limits; empty below a nanosecond."""
    if lines.share_of_limit is None or not lines.least_ns:
        return ""
    if lines.least_ns > lines.known_ns:
        return (
            "faster than the measured limits: data came from caches, or the machine was busy while "
            "its limits were measured"
        )
    known = share(lines.known_ns, lines.busy_ns)
    return (
        f"{known} of this work takes {duration(lines.known_ns)}; at this device's limits it would "
        f"take {duration(lines.least_ns)}"
    )


def _kernel(line: Line, steps: int, limited: bool) -> str:
    limit = ""
    if line.share_of_limit is not None:
        limit = f"{100 * line.share_of_limit:.0f} % of {line.bound}"
    time, calls = duration(line.time_ns / steps), f"{line.count / steps:.0f}x"
    column = f"{limit:<16}  " if limited else ""
    return f"{share(line.share, 1):>6} {time:>9} {calls:>6}  {column}"


# -- variability --------------------------------------------------------------------------------


def _variability(console: Console, result: Explanation) -> None:
    lines = list(variation(result))
    if lines:
        console.print()
        console.print(Text("Variability", "bold"))
    for line in lines:
        print_indented(console, Text(plain(line)))


def variation(result: Explanation) -> Iterator[str]:
    """Yields lines on the variability of the steps and its causes."""
    if result.measured is not None:
        varies = result.measured.variability
        outliers = len(result.measured.outliers)
        yield (
            f"without the profiler: CV {100 * varies.cv:.2f} %, "
            f"{counted(outliers, 'outlier')} in {len(result.measured.samples_ns):,} samples"
        )
        if outliers and _is_of_usual_steps(result):
            yield f"causes of the outliers: {causes(result.measured)}"
    if result.variance_shares:
        ranked = sorted(result.variance_shares.items(), key=lambda item: -abs(item[1]))
        parts = [f"{in_words(k)} {_whole(v)}" for k, v in ranked[:4] if abs(v) >= 0.01]
        yield f"variance of the profiled steps: {', '.join(parts)}"
    elif result.why_no_variance_shares:
        yield f"variance not split: {result.why_no_variance_shares}"
    split = result.kernel_variance
    if split is not None and max(split.same_kernels_slower, split.more_kernels) >= 0.05:
        slower, more = _whole(split.same_kernels_slower), _whole(split.more_kernels)
        yield f"kernels: {slower} from slower kernels, {more} from more kernels"
    for slow in result.slowest[:_MOST_SLOW]:
        what = f": {in_words(slow.what[0])}" if slow.what else ""
        yield f"{slow.name} took {duration(slow.over_median_ns)} more than the median{what}"


# -- doubts -------------------------------------------------------------------------------------


def _doubts(console: Console, result: Explanation, everything: bool) -> None:
    console.print()
    for text in doubts(result):
        _say(console, plain(text), "yellow")
    for text in result.remarks:
        _say(console, plain(text), "dim")
    if not result.abstained:
        return
    if not everything:
        _say(console, plain(untold(result.abstained)), "dim")
        return
    console.print(Text("Could not tell", "bold"))
    for (why, recapture), rules in by_reason(result.abstained).items():
        print_indented(console, Text(plain(f"{', '.join(rules)}: {why}")))
        print_indented(console, Text(plain(recapture), "dim"), 4)


def doubts(result: Explanation) -> Iterator[str]:
    """Yields warnings about distorted or unreliable figures, a line each."""
    if result.distortion is not None and result.distortion >= _DISTORTED:
        yield _distorted(result.distortion, result.gpu is not None)
    if result.distortion is not None and result.distortion * _DISTORTED <= 1:
        yield _short(result.distortion)
    yield from result.problems


def untold(abstained: Sequence[Abstention]) -> str:
    """One line with the rules that lacked data; rules about a GPU appear as a single entry."""
    others = [a.rule for a in abstained if not a.why.startswith(NO_GPU_EVENTS)]
    left_out = len(abstained) - len(others)
    named = [*others, f"{left_out} about a GPU"] if left_out else others
    return f"Could not tell ({len(abstained)}, --all says why): {', '.join(named)}"


def _distorted(times: float, on_gpu: bool) -> str:
    means = (
        "mostly host time, so shares of idle time are upper bounds"
        if on_gpu
        else "short operators look longer than they are"
    )
    return f"Profiling slowed steps {times:.2f}x; {means}."


def _short(times: float) -> str:
    return (
        f"Profiled steps took {times:.2f}x the time of steps without the profiler: the earlier "
        "slowdown is not in the profile."
    )


def by_reason(abstained: Sequence[Abstention]) -> dict[tuple[str, str], list[str]]:
    """Maps missing data, with the way to capture it, to the rules that lacked the data."""
    found: dict[tuple[str, str], list[str]] = {}
    for abstention in abstained:
        found.setdefault((abstention.why, abstention.recapture), []).append(abstention.rule)
    return found


def _say(console: Console, text: str, style: str) -> None:
    print_indented(console, Text(text, style), 0)


def _whole(share: float) -> str:
    return f"{round(100 * share)} %"
