"""An explanation in the terminal: a verdict, where a step goes, findings, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from steadytorch.explain.result import Explanation
from steadytorch.findings.finding import NO_GPU_EVENTS, Abstention, Finding
from steadytorch.quantities import counted
from steadytorch.rates.regime import REGIMES
from steadytorch.rates.roofline import Line, Roofline
from steadytorch.report.ledger import in_words, render_ledger
from steadytorch.report.text import duration, percent_above, plain, print_indented, share
from steadytorch.traces.kernel_names import short

MOST_FINDINGS = 5
MOST_KERNELS = 5
_MOST_SLOW = 2
_DISTORTED = 1.1
"""From here on, shares of profiled steps may mislead, and it is said in colour."""


def render_explain(
    console: Console, name: str, result: Explanation, everything: bool = False
) -> None:
    """Prints the explanation; every line fits the console.

    Args:
        console: where to.
        name: of the workload or the trace file.
        result: what was found.
        everything: all findings with all their evidence, and why rules could not tell.
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


# -- the headline -------------------------------------------------------------------------------


def _headline(console: Console, name: str, result: Explanation) -> None:
    regime = (plain(result.regime), "bold")
    what = f", {REGIMES[result.regime]}" if result.regime in REGIMES else ""
    print_indented(console, Text.assemble((plain(name), "bold"), ": ", regime, what), 0)
    for line in times(result):
        print_indented(console, Text(line))


def times(result: Explanation) -> Iterator[str]:
    """How long a step takes, without the profiler and with it."""
    if result.measured is not None:
        period = result.measured
        steadiness = "steady" if period.steady else f"not steady: {plain(period.why_unsteady)}"
        name, tail = ("p99", period.p99_ns) if period.p99_ns is not None else ("p90", period.p90_ns)
        yield (
            f"{duration(period.median_ns)} a step without the profiler, {steadiness}, "
            f"{name} {percent_above(tail, period.median_ns)}"
        )
    if result.steps:
        yield _profiled(result)


def _profiled(result: Explanation) -> str:
    count = len(result.steps)
    text = f"{duration(result.step_ns)} " + (
        f"a step, mean of {count} profiled" if count > 1 else "in the one profiled step"
    )
    if not result.marked:
        text = f"{duration(result.step_ns)} in all, no step is marked"
    elif result.measured is not None:
        times = result.step_ns / result.measured.median_ns
        text += f", {times:.2f} times as long as without the profiler"
    if result.gpu is not None:
        text += f"; GPU busy {share(result.gpu.busy_ns, result.gpu.total_ns)}"
    return text


# -- findings -----------------------------------------------------------------------------------


def _findings(console: Console, result: Explanation, everything: bool) -> None:
    shown = result.findings if everything else result.findings[:MOST_FINDINGS]
    console.print()
    if not shown:
        console.print(Text("No findings", "bold"))
        asked = "every rule could tell" if not result.abstained else "some rules could not tell"
        print_indented(console, Text(f"nothing was found that could be mended; {asked}"))
        return
    console.print(Text("Findings, by time that could be recovered", "bold"))
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
        lines += [f"check: {finding.check}", f"a false alarm if: {finding.false_alarm}"]
    for line in lines:
        if line:
            print_indented(console, Text(plain(line)), 4)


def recoverable(finding: Finding, result: Explanation) -> str:
    """What a finding would bring back, as a range, and how sure that is."""
    low, high = finding.recoverable_ns
    parts = []
    if high > 0:
        amount = f"up to {duration(high)}" if low <= 0 else f"{duration(low)} to {duration(high)}"
        # Of what was measured without the profiler, steps may have been longer than the profiled.
        part = f" ({share(high, result.step_ns)})" if high <= result.step_ns else ""
        parts.append(f"recoverable: {amount} a step{part}")
    if finding.variance_share is not None:
        parts.append(f"{100 * finding.variance_share:.0f} % of the variance")
    if finding.information:
        parts.append("for information, nothing to mend")
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
    if lines.share_of_limit is not None:
        print_indented(console, Text(least(lines)))


def least(lines: Roofline) -> str:
    """How long the work whose limits are known would take at these limits."""
    if lines.least_ns > lines.known_ns:
        return (
            "faster than the measured limits allow: data came from caches, or the machine was busy "
            "when its limits were measured"
        )
    known = share(lines.known_ns, lines.busy_ns)
    return (
        f"at this device's limits {known} of this work would take {duration(lines.least_ns)}; it "
        f"takes {duration(lines.known_ns)}"
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
    """How much the steps vary and what makes them, a line each."""
    if result.measured is not None:
        varies = result.measured.variability
        outliers = len(result.measured.outliers)
        yield (
            f"without the profiler: CV {100 * varies.cv:.2f} %, "
            f"{counted(outliers, 'outlier')} in {len(result.measured.samples_ns):,} samples"
        )
    if result.variance_shares:
        ranked = sorted(result.variance_shares.items(), key=lambda item: -abs(item[1]))
        parts = [f"{in_words(k)} {_whole(v)}" for k, v in ranked[:4] if abs(v) >= 0.01]
        yield f"of the variance of the profiled steps: {', '.join(parts)}"
    elif result.why_no_variance_shares:
        yield f"no shares of the variance: {result.why_no_variance_shares}"
    split = result.kernel_variance
    if split is not None and max(split.same_kernels_slower, split.more_kernels) >= 0.05:
        slower, more = _whole(split.same_kernels_slower), _whole(split.more_kernels)
        yield f"kernels: the same ones slower {slower}, more of them {more}"
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
        _say(console, plain(_untold(result.abstained)), "dim")
        return
    console.print(Text("Could not tell", "bold"))
    for (why, recapture), rules in by_reason(result.abstained).items():
        print_indented(console, Text(plain(f"{', '.join(rules)}: {why}")))
        print_indented(console, Text(plain(recapture), "dim"), 4)


def doubts(result: Explanation) -> Iterator[str]:
    """Why figures may mislead, a line each."""
    if result.distortion is not None and result.distortion >= _DISTORTED:
        yield _distorted(result.distortion, result.gpu is not None)
    if result.distortion is not None and result.distortion * _DISTORTED <= 1:
        yield _short(result.distortion)
    yield from result.problems


def _untold(abstained: Sequence[Abstention]) -> str:
    """Which rules could not tell, in a line; those that a run without a GPU leaves out as one."""
    others = [a.rule for a in abstained if not a.why.startswith(NO_GPU_EVENTS)]
    left_out = len(abstained) - len(others)
    named = [*others, f"{left_out} that are about a GPU"] if left_out else others
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
    """What is missing, and how to capture it, to the rules that could not tell for it."""
    found: dict[tuple[str, str], list[str]] = {}
    for abstention in abstained:
        found.setdefault((abstention.why, abstention.recapture), []).append(abstention.rule)
    return found


def _say(console: Console, text: str, style: str) -> None:
    print_indented(console, Text(text, style), 0)


def _whole(share: float) -> str:
    return f"{round(100 * share)} %"
