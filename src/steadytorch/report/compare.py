"""Renders a comparison of two workloads in the terminal and as Markdown."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from steadytorch.report.text import duration, markdown_text, plain, print_indented
from steadytorch.results.compare import CompareResult, effect_of

_STYLES = {"faster": "bold green", "slower": "bold red"}


def sentence(result: CompareResult) -> str:
    """The verdict of a comparison in one sentence, with its confidence interval."""
    effect, b = result.effect, plain(result.b.name)
    if effect.estimate is None:
        return "nothing was measured"
    size = f"{100 * abs(effect.estimate):.2f} %"
    if effect.low is None or effect.high is None:
        return f"cannot tell: {b} takes {100 * effect.estimate:+.2f} % time, no interval"
    interval = f"99 % interval {100 * effect.low:+.2f} to {100 * effect.high:+.2f} %"
    if effect.verdict == "tie":
        return f"a tie within 0.5 % ({interval})"
    if effect.verdict == "undecided":
        mde = "" if effect.mde is None else f"; detectable: {100 * effect.mde:.2f} %"
        return f"cannot tell ({interval}{mde})"
    return f"{b} is {effect.verdict} by {size} ({interval})"


def basis(result: CompareResult) -> str:
    """The evidence for a verdict: numbers of block pairs and processes, and scope of the claim."""
    effect = result.effect
    pairs = f"{effect.pairs} pairs of blocks, " if effect.pairs else ""
    several = "" if effect.processes == 1 else "es"
    return f"{pairs}{effect.processes} process{several} a side; claim: {effect.claim}"


def alone(result: CompareResult) -> str:
    """A line on the effect with each side run alone, for when the power limit holds the clock."""
    clocks = []
    for letter in "ab":
        known = [d.sm_clock_mhz for d in result.dwells if d.side == letter and d.sm_clock_mhz]
        clocks.append(f"{letter.upper()} {sum(known) / len(known):.0f} MHz" if known else "")
    seconds = min(run.seconds for run in result.dwells)
    told = ", ".join(filter(None, clocks))
    return (
        f"the power limit holds the clock: run alone for {seconds:.0f} s each, B takes "
        f"{100 * effect_of(result.dwells):+.2f} % time" + (f" ({told})" if told else "")
    )


def render_compare(console: Console, result: CompareResult) -> None:
    """Prints a comparison: the verdict, both sides and the evidence."""
    style = _STYLES.get(result.effect.verdict, "bold")
    console.print(Text(sentence(result), style))
    for letter, side in (("A", result.a), ("B", result.b)):
        line = f"{letter} {plain(side.name)}: {result.metric} {duration(side.median_ns)}"
        print_indented(console, Text(line))
    print_indented(console, Text(basis(result)))
    if result.dwells:
        print_indented(console, Text(alone(result), "yellow"))
    if result.note:
        print_indented(console, Text(plain(result.note), "yellow"))


def markdown(result: CompareResult, gate: str | None) -> str:
    """The comparison as a Markdown section, for the summary page of a CI run."""
    lines = [
        f"### {markdown_text(sentence(result))}",
        "",
        f"| | workload | {result.metric} |",
        "|---|---|---|",
        f"| A | {markdown_text(result.a.name)} | {duration(result.a.median_ns)} |",
        f"| B | {markdown_text(result.b.name)} | {duration(result.b.median_ns)} |",
        "",
        basis(result),
    ]
    if result.dwells:
        lines += ["", alone(result)]
    if result.note:
        lines += ["", markdown_text(result.note)]
    if gate is not None:
        lines += ["", f"Gate: {gate}"]
    return "\n".join(lines) + "\n"
