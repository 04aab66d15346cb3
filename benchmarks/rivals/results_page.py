"""Tables and plots of `docs/results.md`, from the committed results.

The tables stand in the page between marks, so that code hosts show them. The build of the site
renders them again, and puts plots at their marks (`docs/hooks.py`).

    python benchmarks/rivals/results_page.py          # rewrites the tables
    python benchmarks/rivals/results_page.py --check  # fails if a table is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import plots
from plots import Axis, Line, Panel, Points
from readme_table import RESULTS, ROOT, newest, rewritten
from rival_results import (
    CV_LIMIT,
    Document,
    Row,
    against,
    best_of,
    ours_of,
    read,
    rows_of,
)
from rival_tables import beyond, effect, figure, page, table

from steadytorch.results.candidate import TransformSpec, describe

PAGE = ROOT / "docs" / "results.md"
MARK = re.compile(r"^<!-- plot: (\w+) -->$", re.MULTILINE)


# -- tables ---------------------------------------------------------------------------------------


def blocks(results: Path) -> dict[str, str]:
    """Markdown of each block of the page by its name.

    Raises:
        ValueError: a file that the page needs is missing.
    """
    documents = [read(path) for path in newest(results)]
    gpu = named(documents, "NVIDIA H200")
    return {
        "rivals": "\n".join(map(page, documents)),
        "plans": _text(_plans(gpu)),
        "latency": _text(_latency(gpu)),
        "variability": _text(_variability(gpu)),
        "switch": _text(_switch(_latest(results, "switch_h200"))),
        "verdicts": _text(_verdicts(results)),
        "scripts": _text(_scripts(_latest(results, "scripts"))),
    }


def named(documents: Iterable[Document], device: str) -> Document:
    """The results of a device.

    Raises:
        ValueError: there are none.
    """
    for each in documents:
        if each["environment"]["name"] == device:
            return each
    raise ValueError(f"no results of {device} in {RESULTS}")


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _latest(results: Path, theme: str) -> dict[str, Any]:
    paths = sorted(results.glob(f"{theme}_*.json"))  # ISO dates sort by time
    if not paths:
        raise ValueError(f"no {theme}_*.json in {results}")
    return json.loads(paths[-1].read_text())


def _percent(share: float | None) -> str:
    return figure(None if share is None else 100 * share, ".1f", " %")


def _plans(document: Document) -> list[str]:
    """Which workloads' plans hold a transform; choices of engines count as one."""
    holders: dict[str, list[str]] = {}
    for name, entry in document["workloads"].items():
        for transform in str(entry["plan"]).split(" + "):
            shown = re.sub(r"\(#\w+\)", "", transform)
            holders.setdefault(shown, []).append(name)
    order = sorted(holders, key=lambda transform: len(holders[transform]))
    every = list(document["workloads"])

    def listed(names: list[str]) -> str:
        others = [name for name in every if name not in names]
        if 2 * len(names) <= len(every):
            return ", ".join(names)
        return f"all but {', '.join(others)}" if others else "all"

    return table(
        ("transform", "plans", "workloads"),
        ((f"`{each}`", str(len(holders[each])), listed(holders[each])) for each in order),
    )


def _pair(document: Document, name: str) -> tuple[Row, Row] | None:
    """Ours and the best by hand, or None if either is missing."""
    rows = rows_of(document, name)
    ours, best = ours_of(rows), best_of(rows, "period_ms")
    return None if ours is None or best is None else (ours, best)


def _pairs(document: Document) -> dict[str, tuple[Row, Row]]:
    found = {name: _pair(document, name) for name in document["workloads"]}
    return {name: pair for name, pair in found.items() if pair is not None}


def _latency(document: Document) -> list[str]:
    """By how much the latency exceeds the period, at batch 1."""

    def excess(row: Row | None) -> str:
        ratio = beyond(row)
        return _percent(None if ratio is None else ratio - 1)

    return table(
        ("workload, batch 1", "plan, alone", "best by hand, alone", "plan, beside others"),
        (
            (name.rpartition(":")[0], excess(a.get("alone")), excess(b.get("alone")), excess(a))
            for name, (a, b) in _pairs(document).items()
            if name.endswith(":1")
        ),
    )


def _variability(document: Document) -> list[str]:
    """CV of the plans that scatter, and the clock's share of their variance."""
    head = ("workload", "CV beside others", "CV alone", "clock's share, beside others", "alone")
    return table(
        head,
        (
            (
                name,
                _percent(ours["cv"]),
                _percent(ours["alone"]["cv"]),
                _percent(document["workloads"][name]["power"]["clock_share"]),
                _percent(ours["alone"]["variance_share"]),
            )
            for name, (ours, _) in _pairs(document).items()
            if ours["cv"] > CV_LIMIT
        ),
    )


WAYS = {
    "off": "switch off",
    "on": "on",
    "on, CUDA graph": "on, CUDA graph",
    "engines": "engines, eager",
    "engines, CUDA graph": "engines, CUDA graph",
}
SWITCH = (
    ("resnet50 b64 fp16", "a step", lambda way: f"{way['median_ns'] / 1e6:.2f} ms"),
    ("resnet50 b64 fp16", "first call", lambda way: f"{way['setup_s']:.2f} s"),
    ("resnet50 b64 fp32", "a step", lambda way: f"{way['median_ns'] / 1e6:.2f} ms"),
    (
        "resnet50 b64 fp32",
        "peak memory",
        lambda way: f"{way['peak_allocated_bytes'] / 2**20:.0f} MiB",
    ),
    ("resnet50 b8 fp16, 60 calls of 10 sizes", "all", lambda way: f"{way['total_s']:.2f} s"),
    (
        "resnet50 b8 fp16, 60 calls of 10 sizes",
        "a later call",
        lambda way: f"{1e3 * median(way['later_calls_s']):.2f} ms",
    ),
)
"""Rows of the table of cuDNN's switch: network, quantity and format."""


def _switch(document: dict[str, Any]) -> list[str]:
    ways = {each["network"]: each["ways"] for each in document["results"]}
    return table(
        ("network", "", *WAYS.values()),
        (
            (
                network,
                quantity,
                *(form(ways[network][way]) if way in ways[network] else "" for way in WAYS),
            )
            for network, quantity, form in SWITCH
        ),
    )


def _verdicts(results: Path) -> list[str]:
    """Verdicts on a workload against itself and against itself with a delay."""
    head = ("machine", "workload", "with itself", "with an injected delay")
    rows = []
    for path in sorted(results.glob("false-verdicts-*.json")):
        found = json.loads(path.read_text())
        machine, count = found["environment"]["name"], found["comparisons"]
        same, late = found["same"]["verdicts"], found["delayed"]["verdicts"]
        wrong = sum(same.get(verdict, 0) for verdict in ("faster", "slower"))
        beside = ", beside busy processes" if found["neighbour"] else ""
        rows.append(
            (
                f"{machine}, {found['environment']['cores_logical']} cores",
                f"{found['workload']}:{found['batch']}{beside}",
                f"{wrong} of {count} false",
                f"{100 * found['delay']:.0f} %: {late.get('slower', 0)} of {count} found",
            )
        )
    return table(head, rows)


def _scripts(document: dict[str, Any]) -> list[str]:
    """Scripts of other projects under `steady run`."""
    rows = []
    for each in document["scripts"].values():
        leaks = f"{each['leaks']} leaks named" if each["leaks"] else "no leak named"
        versions = ", ".join(f"{name} {text}" for name, text in each["versions"].items())
        runs = each["watched"]
        overheads = [100 * run["overhead_share"] for run in runs]
        rows.append(
            (
                f"`{each['script']}`, {versions}",
                each["what"],
                f"all {each['results']} equal, {leaks}" if each["equal"] else "different",
                f"{min(overheads):.2f} to {max(overheads):.2f} %",
            )
        )
    return table(("script", "run", "results", "overhead"), rows)


def with_tables(text: str, results: Path) -> str:
    """The page with its tables from the results."""
    for name, inner in blocks(results).items():
        text = rewritten(text, inner, name)
    return text


# -- plots ----------------------------------------------------------------------------------------

KEY = {"ours": "steadytorch", "hand": "best by hand", "eager": "eager"}
"""What a style of marks stands for."""


def with_plots(text: str, results: Path) -> str:
    """The page with each plot at its mark.

    Raises:
        KeyError: a mark names an unknown plot.
    """
    documents = [read(path) for path in newest(results)]
    return MARK.sub(lambda found: PLOTS[found[1]](documents), text)


def _key(*styles: str) -> str:
    spans = [f'<span class="plot-key {style}">{KEY[style]}</span>' for style in styles]
    return f"<p>{' &nbsp; '.join(spans)}</p>\n"


def _machine(document: Document) -> str:
    return str(document["environment"]["name"]).replace("(R)", "")


def by_workload(documents: Sequence[Document]) -> str:
    """Times over that of the best option by hand, a row per workload."""
    return _key("ours", "hand", "eager") + plots.row(map(_by_workload, documents))


def _by_workload(document: Document) -> Panel:
    pairs = _pairs(document)
    ours, hand, eager, spans, titles = [], [], [], [], []
    for k, (name, (_, best)) in enumerate(pairs.items()):
        found = against(best, "period") or {"estimate": 0.0, "low": None}
        ours.append((1 + found["estimate"], k))
        titles.append(f"{name}: {effect(found)}")
        hand.append((1.0, k))
        slow = _eager(rows_of(document, name))
        if slow is not None:
            eager.append((slow / best["period_ms"], k))
        if found["low"] is not None:
            spans.append(Line("ours", [(1 + found["low"], k), (1 + found["high"], k)]))
    every = [x for x, _ in (*ours, *eager)]
    return Panel(
        _machine(document),
        Axis(0.93 * min(every), 1.08 * max(every), True, "time per step, best by hand = 1"),
        Axis(-0.6, len(pairs) - 0.4, names=list(pairs)),
        [Points("eager", eager), Points("hand", hand), *spans, Points("ours", ours, titles)],
        height=70 + 18 * len(pairs),
    )


def _eager(rows: Sequence[Row]) -> float | None:
    """Period of the eager option in ms; None if it was not timed."""
    return next(
        (
            row["period_ms"]
            for row in rows
            if row["option"].startswith("eager") and row["period_ms"]
        ),
        None,
    )


def budget(documents: Sequence[Document]) -> str:
    """Time of the best verified candidate over the seconds of the search, a panel per workload."""
    return _key("ours", "hand") + "".join(
        f"<p>{_machine(each)}</p>\n"
        + plots.row(
            _budget(each, name) for name in _pairs(each) if each["workloads"][name]["trials"]
        )
        for each in documents
    )


def _budget(document: Document, name: str) -> Panel:
    entry, (_, best) = document["workloads"][name], _pairs(document)[name]
    steps = search_steps(entry)
    end, times = entry["search_s"], [ms for _, ms in steps]
    low, high = min(*times, best["period_ms"]), max(*times, best["period_ms"])
    return Panel(
        name,
        Axis(0.0, 1.02 * end, label="search, s"),
        Axis(0.85 * low, 1.15 * high, True, "ms"),
        [
            Line("hand", [(0.0, best["period_ms"]), (end, best["period_ms"])]),
            Line("ours", [*steps, (end, times[-1])], steps=True),
        ],
        width=166,
        height=140,
    )


def search_steps(entry: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds at which candidates were verified, and the best median in ms until then.

    Args:
        entry: record of one workload, with `timeline` and `trials`.
    """
    times = {
        describe(msgspec.convert(each["transforms"], tuple[TransformSpec, ...])): each["median_ns"]
        for each in entry["trials"]
    }
    seen = [
        (seconds, times[label] / 1e6)
        for seconds, message in entry["timeline"]
        if message.startswith("verified: ")
        and times.get(label := message.removeprefix("verified: ")) is not None
    ]
    bests = accumulate((ms for _, ms in seen), min)
    return list(zip((seconds for seconds, _ in seen), bests, strict=True))


LEAST_TAILS = 3
"""Workloads with a p99 that a plot needs."""


def tails(documents: Sequence[Document]) -> str:
    """p99 over median against the period, a number per workload."""
    parts = []
    for document in documents:
        known = {
            name: pair
            for name, pair in _pairs(document).items()
            if any(row["p99_over_median"] for row in pair)
        }
        if len(known) >= LEAST_TAILS:
            listed = ", ".join(f"{k} {name}" for k, name in enumerate(known, 1))
            parts.append(f"{plots.row([_tails(document, known)])}<p>{listed}</p>\n")
    return _key("ours", "hand") + "".join(parts)


def _tails(document: Document, known: dict[str, tuple[Row, Row]]) -> Panel:
    marks, every = [], []
    for style, index in (("hand", 1), ("ours", 0)):
        found = [
            ((pair[index]["period_ms"], 100 * (pair[index]["p99_over_median"] - 1)), str(k), name)
            for k, (name, pair) in enumerate(known.items(), 1)
            if pair[index]["p99_over_median"]
        ]
        every += [at for at, _, _ in found]
        marks.append(
            Points(
                style,
                [at for at, _, _ in found],
                [f"{name}: {x:.3f} ms, p99 +{y:.2f} %" for (x, y), _, name in found],
                [label for _, label, _ in found],
            )
        )
    periods, over = zip(*every, strict=True)
    return Panel(
        _machine(document),
        Axis(0.85 * min(periods), 1.25 * max(periods), True, "period, ms"),
        Axis(0.0, 1.15 * max(over), label="p99 above the median, %"),
        marks,
        height=260,
    )


PLOTS = {"workloads": by_workload, "budget": budget, "tails": tails}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = PAGE.read_text("utf-8")
    after = with_tables(before, RESULTS)
    if not args.check:
        PAGE.write_text(after, "utf-8")
    elif before != after:
        sys.exit("docs/results.md is out of date: run python benchmarks/rivals/results_page.py")


if __name__ == "__main__":
    main()
