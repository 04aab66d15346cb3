"""Renders watched steps in the terminal: at most 30 lines of 80 columns, more for long fixes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from shlex import quote

from rich.console import Console
from rich.text import Text

from steadytorch.quantities import counted, size
from steadytorch.report.ledger import in_words, slice_label
from steadytorch.report.text import (
    duration,
    format_drift,
    percent_above,
    plain,
    print_indented,
    seconds,
    share,
)
from steadytorch.results.explain import Finding
from steadytorch.results.watched import Watched

WIDTH = 80
MOST_FINDINGS = 3
MOST_SLOW = 2
MOST_REMARKS = 2
_MOST_SLICES = 5
_LEAST_SHARE = 0.005
_MODEL = ("forward", "backward", "optimizer", "evaluation")
_WORTH_TUNING = 0.3


def render_run(console: Console, name: str, result: Watched) -> None:
    """Prints the sources of step time and variability, in at most 30 lines unless fixes are long.

    Args:
        console: where to print.
        name: the script; empty for no title.
        result: the watched steps.
    """
    if name:
        print_indented(console, Text.assemble(("steady run", "bold"), f" {plain(name)}"), 0, 1)
    for line in headline(result):
        print_indented(console, Text(plain(line)), 2, 1)
    if result.measured is None:
        return
    _slices(console, result)
    shown = [each for each in result.findings if not each.information][:MOST_FINDINGS]
    console.print(Text("Findings, worst first" if shown else "No findings", "bold"))
    for number, finding in enumerate(shown, 1):
        print_indented(console, Text(plain(f"{number}. {finding.title}"), "yellow"), 2, 2)
        detail = evidence(finding)
        if detail:
            print_indented(console, Text(plain(detail)), 5, 1)
        print_indented(console, Text(plain(f"fix: {finding.fix}")), 5)
    lines = list(slow_steps(result))
    if lines:
        console.print(Text("Slow steps", "bold"))
    for line in lines:
        print_indented(console, Text(plain(line)), 2, 1)
    for line in result.remarks[:MOST_REMARKS]:
        print_indented(console, Text(plain(line), "dim"), 0, 1)
    for line in advice(result):
        print_indented(console, Text(plain(line)), 0, 2)


def headline(result: Watched) -> Iterator[str]:
    """Number and time of the steps, memory and the overhead of watching, a line each."""
    if result.failed is not None:
        yield f"ended by {plain(result.failed)}"
    elif result.interrupted:
        yield "interrupted; the steps so far:"
    measured = result.measured
    if measured is None:
        yield (
            f"no steps found in {seconds(result.elapsed_s)}: no optimizer stepped, no loader "
            "and no model ran twice"
        )
        return
    count, of = len(measured.samples_ns), result.unit
    tail, name = (
        (measured.p99_ns, "p99") if measured.p99_ns is not None else (measured.p90_ns, "p90")
    )
    yield (
        f"{count:,} {of} in {seconds(sum(measured.samples_ns) * 1e-9)} of "
        f"{seconds(result.elapsed_s)}: median {duration(measured.median_ns)}, {name} "
        f"{percent_above(tail, measured.median_ns)}"
    )
    warm = measured.warmup_dropped
    yield format_drift(measured) + (f", after a warm-up of {counted(warm, 'step')}" if warm else "")
    memory = (
        ""
        if result.peak_memory_bytes is None
        else (f"; peak memory {size(result.peak_memory_bytes)}")
    )
    yield f"overhead of watching {100 * result.overhead_share:.2f} %{memory}"


def _slices(console: Console, result: Watched) -> None:
    shares = result.variance_shares or {}
    console.print(Text(f"{'Where a step goes':<28}{'mean':>10}{'time':>9}{'variance':>11}", "bold"))
    for name, mean, part in slices(result)[:_MOST_SLICES]:
        varies = f"{100 * shares[name]:z.0f} %" if name in shares else "-"
        line = f"{slice_label(name):<26}{duration(mean):>10}{part:>9}{varies:>11}"
        print_indented(console, Text(line), 2, 1)


def slices(result: Watched) -> list[tuple[str, float, str]]:
    """Time slices of 0.5 % or more: name, mean in ns and share of the step, largest first."""
    means = result.mean_slices_ns()
    total = sum(means.values())
    ranked = sorted(means.items(), key=lambda item: -item[1])
    return [
        (name, mean, share(mean, total)) for name, mean in ranked if mean >= _LEAST_SHARE * total
    ]


def evidence(finding: Finding) -> str:
    """The first line of evidence of a finding; empty without evidence."""
    return finding.evidence[0] if finding.evidence else ""


def slow_steps(result: Watched) -> Iterator[str]:
    """The slowest steps and their differences from other steps, a line each."""
    for step in result.slowest[:MOST_SLOW]:
        what = in_words("; ".join(step.what)) if step.what else "no cause seen"
        yield f"{step.name}: {duration(step.over_median_ns)} over the median: {what}"
    more = len(result.slowest) - MOST_SLOW
    kept = [step.trace for step in result.slowest if step.trace is not None]
    if kept:
        first = quote(_near(kept[0]))
        yield f"{counted(len(kept), 'trace')} kept; open one: steady explain {first}"
    elif more > 0:
        yield f"and {more} more; --json lists them"


def _near(path: str) -> str:
    """The path, relative to the current folder if that is shorter."""
    try:
        return min(path, os.path.relpath(path), key=len)
    except (OSError, ValueError):  # the folder is gone, or on another drive
        return path


def advice(result: Watched) -> Iterator[str]:
    """A line with the next command to run, if the model takes at least 30 % of the time."""
    means = result.mean_slices_ns()
    total = sum(means.values())
    busy = sum(means.get(name, 0.0) for name in _MODEL) / total if total else 0.0
    if busy >= _WORTH_TUNING:
        returned = (
            "steady.Workload.training(model, inputs, loss, optimizer)"
            if means.get("backward")
            else "(model, inputs)"
        )
        yield (
            f"The model takes {100 * busy:.0f} % of the time. Next: steady explain FILE:FACTORY; "
            f"FACTORY() returns {returned}"
        )
