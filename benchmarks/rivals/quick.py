"""A few workloads in five minutes, beside the published results: `--quick`.

Only two options by hand are timed: eager, and the one that was fastest in the published results of
the closest device. The budgets of the searches are shorter than the published ones.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from readme_table import newest
from rival_arms import OURS
from rival_cases import Case
from rival_options import AUTOTUNED, options_of
from rival_results import Document, Row, against, best_of, ours_of, read, rows_of
from rival_tables import effect

DEFAULTS = {
    "out": Path(__file__).parents[2] / "build" / "bench-quick",
    "seconds": 290.0,
    "cap": 30.0,
    "timing": 6.0,
}
"""Of the options of the command line; all but `out` in seconds."""
CHOSEN = {
    "cuda": ("resnet50:1", "mobilenet_v3_large:1", "vit_b_16:1"),
    "cpu": ("mobilenet_v3_large:1", "resnet50:1"),
}
"""Names of the workloads by device type, the most important first."""
BUDGET_S = {"cuda": 40.0, "cpu": 60.0}
"""Search budget by device type in seconds."""
WIDTH = 80
FACTS = {
    "device": "name",
    "cores": "cores_logical",
    "instruction set": "isa",
    "torch": "torch",
    "cuDNN": "cudnn",
    "Triton": "triton",
    "driver": "driver",
    "Python": "python",
    "steadytorch": "steadytorch",
}
"""Labels of the facts of an environment that are compared."""


class OutOfTime(BaseException):
    """The time of a quick run is over; no `Exception`, so that no workload's failure hides it."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` within the block after so many seconds; main thread only."""

    def end(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def closest(environment: dict[str, Any], results: Path) -> Document | None:
    """The published results of the closest device of the same type; None without any.

    The name counts most, then the compute capability, the instruction set, the number of cores,
    and the date.
    """
    keys = ("name", "compute_capability", "isa", "cores_logical")
    documents = [read(path) for path in newest(results)]
    return max(
        (each for each in documents if each["environment"]["device"] == environment["device"]),
        key=lambda each: (
            *(each["environment"].get(key) == environment.get(key) for key in keys),
            each["created"],
        ),
        default=None,
    )


def cases(known: Sequence[Case], kind: str, published: Document | None) -> list[Case]:
    """The workloads of a quick run, with budgets and options by hand.

    Args:
        known: workloads of the device.
        kind: device type, "cpu" or "cuda".
        published: results to compare with; None times all options except autotuned ones.
    """
    by_name = {case.name: case for case in known}
    found = []
    for name in CHOSEN[kind]:
        best = None if published is None else best_of(rows_of(published, name), "period_ms")
        case = by_name[name]
        every = [each for each in options_of(kind, case.precision) if AUTOTUNED not in each]
        two = [every[0], best["option"]] if best and best["option"] in every else every
        options = tuple(dict.fromkeys(two))
        found.append(case._replace(budget_s=BUDGET_S[kind], options=options))
    return found


def report(
    done: Sequence[Document], names: Sequence[str], published: Document | None, seconds: float
) -> str:
    """Format the measured and the published results, at most 80 columns wide.

    Args:
        done: results of one workload each.
        names: all workloads of the run; those without a result did not finish.
        published: results of the closest device, or None.
        seconds: time limit of the run.
    """
    here = {name: each for each in done for name in each["workloads"]}
    lines = [
        f"{'ms a step':11}{'eager':>8}{'by hand':>9}  {f'{OURS} (95 %)':25}gain (99 %)",
    ]
    for name in names:
        given = [("here", here.get(name)), ("published", published)]
        lines += ["", name, *(line for label, each in given for line in _side(label, each, name))]
    lines += ["", *_notes(list(here.values()), published, seconds)]
    return "\n".join(lines) + "\n"


def _side(label: str, document: Document | None, name: str) -> list[str]:
    """Lines of one workload on this machine or as published."""
    head = f"  {label:9}"
    if document is None:
        why = "did not finish within the time" if label == "here" else "no results for this device"
        return [f"{head} {why}"]
    if name not in document["workloads"]:
        return [f"{head} not among the published workloads"]
    rows = rows_of(document, name)
    ours, best = ours_of(rows), best_of(rows, "period_ms")
    eager = next((row for row in rows if row["option"].startswith("eager")), None)
    head += f"{_ms(eager):>8}{_ms(best):>9}"
    if ours is None:
        why = next((row["failed"] for row in rows if row["option"] == OURS), "not timed")
        return [head, *_indented(f"{OURS} did not finish: {why}")]
    failed = [row for row in rows if row["failed"]] if label == "here" else []
    missing = [f"{row['option']} did not finish: {row['failed']}" for row in failed]
    lines = [line for text in missing for line in _indented(text)]
    if best is None:
        return [f"{head}  {_period(ours)}", *lines]
    return [f"{head}  {_period(ours):25}{_gain(best)}", *lines]


def _indented(text: str) -> list[str]:
    return [f"      {line}" for line in wrap(text, WIDTH - 6)]


def _ms(row: Row | None) -> str:
    """The period of a row; a dash without one."""
    return "-" if row is None or row["failed"] else _digits(row["period_ms"])


def _digits(milliseconds: float) -> str:
    """A time with three significant digits."""
    decimals = 2 - math.floor(math.log10(milliseconds)) if milliseconds > 0 else 0
    return f"{milliseconds:.{max(0, decimals)}f}"


def _period(row: Row) -> str:
    ends = row["period_ci_ms"]
    within = "no interval" if ends is None else " to ".join(map(_digits, ends))
    return f"{_ms(row)} ({within})"


def _gain(best: Row) -> str:
    """Change of the period against the best option by hand; without an interval, its absence."""
    found = against(best, "period")
    if found is None or found["low"] is None:
        return "no interval (few pairs)"
    return effect(found).partition(", ")[0]


def _notes(here: Sequence[Document], published: Document | None, seconds: float) -> list[str]:
    notes = [
        "gain: change of the period against the best option by hand; below zero is less time. "
        "Options by hand here: eager, and the one that is the best of the published ones.",
        f"The run ends after {seconds:.0f} s.",
    ]
    lines = [line for note in notes for line in wrap(note, WIDTH)]
    if published is None or not here:
        return lines
    lines += ["", f"{'What differs':17}{'here':31}published"]
    names = [name for each in here for name in each["workloads"]]
    both = [_conditions(here, names), _conditions([published], names)]
    for label in both[0]:
        own, theirs = (each[label] or "not recorded" for each in both)
        if own != theirs:
            lines.append(f"{label:17}{_cut(own, 30):31}{_cut(theirs, 32)}".rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _conditions(documents: Iterable[Document], names: Sequence[str]) -> dict[str, str]:
    """What the results of the named workloads depend on, by label; empty where not recorded."""
    documents = list(documents)
    entries = [
        entry for each in documents for name, entry in each["workloads"].items() if name in names
    ]
    states = [entry["state_before"] for entry in entries if entry.get("state_before")]
    clocks = [c for entry in entries for c in entry.get("clocks_mhz") or () if c is not None]
    found = {
        label: _joined(entry["environment"].get(key) for entry in entries)
        for label, key in FACTS.items()
    }
    return found | {
        "threads": _joined(entry.get("threads") for entry in entries),
        "clock, median": f"{median(clocks):.0f} MHz" if clocks else "",
        "load before": _range([state["load_average_1m"] for state in states]),
        "search budget": _joined(f"{entry['budget_s']:.0f} s" for entry in entries),
        "timing": _joined(f"{entry['timing_s']:.0f} s" for entry in entries),
        "options by hand": _counts(documents, names),
        "processes": _joined(entry.get("processes") or 1 for entry in entries),
        "date": _joined(str(entry["created"])[:10] for entry in entries),
    }


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values if value is not None}))


def _range(values: Iterable[float | None]) -> str:
    known = sorted({f"{value:.1f}" for value in values if value is not None}, key=float)
    return " to ".join(dict.fromkeys([known[0], known[-1]])) if known else ""


def _counts(documents: Iterable[Document], names: Sequence[str]) -> str:
    """Numbers of options by hand per workload."""
    return _joined(
        sum(row["option"] != OURS for row in rows_of(each, name))
        for each in documents
        for name in each["workloads"]
        if name in names
    )
