"""Renders a comparison of ranks in the terminal: at most 30 lines of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from steadytorch.quantities import counted
from steadytorch.report.ledger import in_words, slice_label
from steadytorch.report.text import duration, plain, print_indented
from steadytorch.results.ranks import RankComparison, RankTimes

MOST_FINDINGS = 2
MOST_RANKS = 8
MOST_SLOW = 2
_MOST_REMARKS = 3


def render_ranks(console: Console, result: RankComparison, everything: bool = False) -> None:
    """Prints the late ranks, the split of a step by rank, and the longest steps.

    Args:
        console: where to print.
        result: the comparison.
        everything: whether to print all findings, ranks and remarks, at any length.
    """
    print_indented(console, Text(headline(result), "bold"), 0, 1)
    _findings(console, result, everything)
    _table(console, result, everything)
    lines = list(slow_steps(result))
    if lines:
        console.print(Text("Longest steps, without waiting", "bold"))
    for line in lines:
        print_indented(console, Text(line), 2, 1)
    for line in list(remarks(result))[: None if everything else _MOST_REMARKS]:
        print_indented(console, Text(plain(line), "dim"), 0, None if everything else 1)


def headline(result: RankComparison) -> str:
    """Number of ranks and steps, and the time of a step."""
    ranks, steps = counted(len(result.ranks), "rank"), counted(len(result.steps), "step")
    return f"{ranks}, {steps}: {duration(result.step_ns)} a step"


def _findings(console: Console, result: RankComparison, everything: bool) -> None:
    for abstention in result.abstained:
        text = f"{abstention.rule}: cannot tell: {abstention.why}; {abstention.recapture}"
        print_indented(console, Text(plain(text), "yellow"), 0, 2)
    if not result.findings and not result.abstained:
        console.print(Text("No rank is late more than chance explains", "bold"))
    most = None if everything else 2 if len(result.findings) == 1 else 1
    shown = result.findings if everything else result.findings[:MOST_FINDINGS]
    for number, finding in enumerate(shown, 1):
        title = in_words(plain(f"{number}. {finding.title}"))
        print_indented(console, Text(title, "bold yellow"), 0, most)
        for line in (*finding.evidence, f"fix: {finding.fix}"):
            print_indented(console, Text(in_words(plain(line))), 3, most)
    more = len(result.findings) - len(shown)
    if more:
        console.print(Text(f"{counted(more, 'more late rank')}: --all", "dim"))


def _table(console: Console, result: RankComparison, everything: bool) -> None:
    head = f"{'Rank':<8}{'own work':>10}{'transfer':>10}{'waiting':>10}{'latest':>8}"
    console.print(Text(f"{head}{'variance':>10}  longest slice", "bold"))
    shown = result.ranks if everything else _shown_ranks(result)
    for each in shown:
        own = each.step_ns - each.waiting_ns - each.transfer_ns
        latest = sum(step.latest == each.rank for step in result.steps)
        line = (
            f"{each.rank:<6}{duration(own):>10}{duration(each.transfer_ns):>10}"
            f"{duration(each.waiting_ns):>10}{latest:>8}"
            f"{_share(result, f'rank {each.rank}'):>10}  {_longest(each)}"
        )
        print_indented(console, Text(line), 2, 1)
    more = len(result.ranks) - len(shown)
    if more:
        print_indented(console, Text(f"and {more} more: --all", "dim"), 2, 1)
    if result.variance_shares is not None:
        print_indented(console, Text(f"{'all':<44}{_share(result, 'all ranks'):>10}"), 2, 1)
    elif result.why_no_variance_shares is not None:
        text = f"variance not split: {plain(result.why_no_variance_shares)}"
        print_indented(console, Text(text, "dim"), 2, 1)


def _shown_ranks(result: RankComparison) -> Sequence[RankTimes]:
    """The ranks to print: late ranks first, then the ranks that wait least."""
    if len(result.ranks) <= MOST_RANKS:
        return result.ranks
    late = [each.rank for each in result.late]
    order = {rank: place for place, rank in enumerate(late)}
    ranked = sorted(result.ranks, key=lambda r: (order.get(r.rank, len(late)), r.waiting_ns))
    return ranked[:MOST_RANKS]


def _longest(each: RankTimes) -> str:
    return slice_label(max(each.slices_ns, key=lambda name: each.slices_ns[name], default="-"))


def _share(result: RankComparison, name: str) -> str:
    shares = result.variance_shares
    return "-" if shares is None or name not in shares else f"{100 * shares[name]:z.0f} %"


def slow_steps(result: RankComparison) -> Iterator[str]:
    """The longest steps, not counting waiting time, a line each."""
    usual = float(np.median([step.without_waiting_ns for step in result.steps]))
    for step in sorted(result.steps, key=lambda step: -step.without_waiting_ns)[:MOST_SLOW]:
        if step.without_waiting_ns > usual:
            over = duration(step.without_waiting_ns - usual)
            yield (
                f"step {step.index}: {over} over the median; rank {step.latest} was the latest, "
                f"by {duration(step.late_ns)}"
            )


def remarks(result: RankComparison) -> Iterator[str]:
    """The share of communication hidden by work, then caveats, a line each."""
    hidden = [each.overlap for each in result.ranks if each.overlap is not None]
    if hidden:
        low, high = (f"{100 * value:.0f}" for value in (min(hidden), max(hidden)))
        span = f"{low} %" if low == high else f"{low} to {high} %"
        yield f"work hides {span} of the communication"
    yield from result.remarks
