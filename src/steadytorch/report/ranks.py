"""Compared ranks in the terminal: at most 30 lines of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

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


def render_ranks(console: Console, result: RankComparison) -> None:
    """Prints who is late, the split of a step by rank, and the slowest steps.

    Args:
        console: where to print.
        result: the comparison.
    """
    print_indented(console, Text(headline(result), "bold"), 0, 1)
    _findings(console, result)
    _table(console, result)
    lines = list(slow_steps(result))
    if lines:
        console.print(Text("Longest steps, without waiting", "bold"))
    for line in lines:
        print_indented(console, Text(line), 2, 1)
    for line in list(remarks(result))[:_MOST_REMARKS]:
        print_indented(console, Text(plain(line), "dim"), 0, 1)


def headline(result: RankComparison) -> str:
    """Number of ranks and steps, and the time of a step."""
    ranks, steps = counted(len(result.ranks), "rank"), counted(len(result.steps), "step")
    return f"{ranks}, {steps}: {duration(result.step_ns)} a step"


def _findings(console: Console, result: RankComparison) -> None:
    for abstention in result.abstained:
        text = f"{abstention.rule}: cannot tell: {abstention.why}; {abstention.recapture}"
        print_indented(console, Text(plain(text), "yellow"), 0, 2)
    if not result.findings and not result.abstained:
        console.print(Text("No rank is late more than chance explains", "bold"))
    most = 2 if len(result.findings) == 1 else 1
    for number, finding in enumerate(result.findings[:MOST_FINDINGS], 1):
        title = in_words(plain(f"{number}. {finding.title}"))
        print_indented(console, Text(title, "bold yellow"), 0, most)
        for line in (*finding.evidence, f"fix: {finding.fix}"):
            print_indented(console, Text(in_words(plain(line))), 3, most)
    more = len(result.findings) - MOST_FINDINGS
    if more > 0:
        console.print(Text(f"{counted(more, 'more late rank')}: --json lists them", "dim"))


def _table(console: Console, result: RankComparison) -> None:
    head = f"{'Rank':<8}{'own work':>10}{'transfer':>10}{'waiting':>10}{'latest':>8}"
    console.print(Text(f"{head}{'variance':>10}  longest slice", "bold"))
    for each in shown_ranks(result):
        own = each.step_ns - each.waiting_ns - each.transfer_ns
        latest = sum(step.latest == each.rank for step in result.steps)
        line = (
            f"{each.rank:<6}{duration(own):>10}{duration(each.transfer_ns):>10}"
            f"{duration(each.waiting_ns):>10}{latest:>8}"
            f"{_share(result, f'rank {each.rank}'):>10}  {_longest(each)}"
        )
        print_indented(console, Text(line), 2, 1)
    more = len(result.ranks) - MOST_RANKS
    if more > 0:
        print_indented(console, Text(f"and {more} more; --json lists them", "dim"), 2, 1)
    if result.variance_shares is not None:
        print_indented(console, Text(f"{'all':<44}{_share(result, 'all ranks'):>10}"), 2, 1)
    elif result.why_no_variance_shares is not None:
        text = f"variance not split: {plain(result.why_no_variance_shares)}"
        print_indented(console, Text(text, "dim"), 2, 1)


def shown_ranks(result: RankComparison) -> list[RankTimes]:
    """Ranks with a line: late ones first, then those that wait least."""
    late = {each.rank: -place for place, each in enumerate(result.late, -len(result.late))}
    if len(result.ranks) <= MOST_RANKS:
        return list(result.ranks)
    return sorted(result.ranks, key=lambda r: (-late.get(r.rank, 0), r.waiting_ns))[:MOST_RANKS]


def _longest(each: RankTimes) -> str:
    return slice_label(max(each.slices_ns, key=lambda name: each.slices_ns[name], default="-"))


def _share(result: RankComparison, name: str) -> str:
    shares = result.variance_shares
    return "-" if shares is None or name not in shares else f"{100 * shares[name]:.0f} %"


def slow_steps(result: RankComparison) -> Iterator[str]:
    """The steps with the most own work of the latest rank, a line each."""
    usual = float(np.median([step.own_ns for step in result.steps]))
    for step in sorted(result.steps, key=lambda step: -step.own_ns)[:MOST_SLOW]:
        if step.own_ns > usual:
            yield (
                f"step {step.index}: {duration(step.own_ns - usual)} over the median; rank "
                f"{step.latest} was the latest, by {duration(step.late_ns)}"
            )


def remarks(result: RankComparison) -> Iterator[str]:
    """Communication hidden by work, then caveats, a line each."""
    hidden = [each.overlap for each in result.ranks if each.overlap is not None]
    if hidden:
        low, high = (f"{100 * value:.0f}" for value in (min(hidden), max(hidden)))
        span = f"{low} %" if low == high else f"{low} to {high} %"
        yield f"work hides {span} of the communication"
    yield from result.remarks
