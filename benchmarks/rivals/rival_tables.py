"""Format the benchmark's document as Markdown: all rows, a summary, and the README's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median
from typing import Any

from rival_options import AUTOTUNED, ENGINES
from rival_results import (
    CV_LIMIT,
    WRONG,
    Document,
    Row,
    against,
    best_of,
    cause,
    is_wrong,
    ours_of,
    ratio,
    rows_of,
    totals,
    within_budgets,
)

NONE = ""
WITHIN = {
    "best": "best by hand",
    "ready": "best set up within the budget",
    "uncompiled": "best uncompiled",
    "default": "ours at the default",
}
ROWS = (
    "workload",
    "option",
    "device period ms (95 %)",
    "p99/median",
    "CV",
    "latency ms",
    "set-up s",
    "peak MB",
    "error",
    "our period against it (99 %)",
    "our latency",
)
SUMMARY = (
    "workload",
    "plan",
    "best by hand",
    "our period against it (99 %)",
    "our latency against the best (99 %)",
    "p99/median",
    "CV",
    "put down to",
    "latency/period",
    "CV, alone",
    "latency/period, alone",
    "the best's, alone",
    "search s",
    "max-autotune s",
)
PAGE = (
    "workload",
    "eager",
    "best by hand",
    "steadytorch",
    "its period against the best (99 %)",
    "its latency",
    "p99/median",
    "search",
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a Markdown table as lines."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in lines]


def figure(value: float | None, form: str, unit: str = "") -> str:
    """Format a figure; empty for None."""
    return NONE if value is None else f"{value:{form}}{unit}"


def effect(judgement: dict[str, Any] | None) -> str:
    """Format an effect on time with its interval, such as `-9.2 % (-11.0 to -8.6)`."""
    if judgement is None or judgement["estimate"] is None:
        return NONE
    text = f"{100 * judgement['estimate']:+.1f} %"
    if judgement["low"] is not None:
        text += f" ({100 * judgement['low']:+.1f} to {100 * judgement['high']:+.1f})"
    if "processes" in judgement:
        text += f", {judgement['processes']} processes"
    return text


def format_effect(judgement: dict[str, Any] | None) -> str:
    """Format an effect with its verdict."""
    return f"{effect(judgement)}, {judgement['verdict']}" if judgement else NONE


def heading(document: Document) -> str:
    """Hardware, versions and date."""
    seen = [entry["environment"] for entry in document["workloads"].values()]
    every = seen or [document["environment"]]

    def of(key: str) -> str:
        return " and ".join(sorted({str(each[key]) for each in every if each.get(key)}))

    versions = [
        f"{label} {of(key)}"
        for key, label in (("torch", "torch"), ("cudnn", "cuDNN"), ("driver", "driver"))
        if of(key)
    ]
    cores = of("cores_logical")
    dates = sorted({str(e["created"])[:10] for e in document["workloads"].values()})
    between = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else NONE
    return ", ".join([of("name") or "unknown", f"{cores} cores", *versions, between])


def row_cells(row: Row) -> list[str]:
    """Cells of one row of the full table."""
    head = [row["workload"], row["option"]]
    if row["failed"]:
        return [*head, f"failed: {row['failed']}", *[NONE] * (len(ROWS) - 3)]
    ends = row["period_ci_ms"]
    within = NONE if ends is None else f" ({ends[0]:.3f} to {ends[1]:.3f})"
    return [
        *head,
        f"{row['period_ms']:.3f}{within}",
        figure(row["p99_over_median"], ".3f"),
        figure(row["cv"], ".2%"),
        f"{row['latency_ms']:.3f}",
        figure(row["setup_s"], ".1f"),
        figure(row["peak_mb"], ".0f"),
        figure(row["error"], ".1e") + (", wrong" if is_wrong(row) else NONE),
        format_effect(against(row, "period")),
        format_effect(against(row, "latency")),
    ]


def autotuned(rows: Sequence[Row]) -> str:
    """Seconds that autotuning took, or the reason why it failed."""
    row = next((row for row in rows if AUTOTUNED in row["option"]), None)
    if row is None:
        return NONE
    return row["failed"] or f"{row['setup_s']:.0f}"


def summary_cells(document: Document, name: str) -> list[str]:
    """Cells of one workload in the summary."""
    rows, entry = rows_of(document, name), document["workloads"][name]
    ours, best = ours_of(rows), best_of(rows, "period_ms")
    search, plan = figure(entry.get("search_s"), ".0f"), entry.get("plan") or NONE
    if ours is None or best is None:
        why = next((row["failed"] for row in rows if row["failed"]), "not timed")
        head, blanks = [name, f"`{plan}`" if plan else why], [NONE] * (len(SUMMARY) - 4)
        return [*head, *blanks, search, autotuned(rows)]
    return [
        name,
        f"`{plan}`",
        best["option"],
        format_effect(against(best, "period")),
        format_effect(against(best_of(rows, "latency_ms"), "latency")),
        figure(ours["p99_over_median"], ".3f"),
        figure(ours["cv"], ".2%"),
        cause(ours, entry.get("power") or {}),
        f"{ours['latency_ms'] / ours['period_ms']:.3f}",
        scattered(ours.get("alone")),
        *(figure(beyond(row.get("alone")), ".3f") for row in (ours, best)),
        search,
        autotuned(rows),
    ]


def scattered(alone: dict[str, Any] | None) -> str:
    """CV of the series timed alone, with its causes if it exceeds the limit."""
    if alone is None or alone["cv"] <= CV_LIMIT:
        return figure((alone or {}).get("cv"), ".2%")
    causes = Counter(cause for _, cause in alone.get("outliers", ())).most_common()
    counts = [f"{count} {cause}" for cause, count in causes]
    return ", ".join([f"{alone['cv']:.2%}", *filter(None, [alone.get("finding")]), *counts])


def beyond(alone: dict[str, Any] | None) -> float | None:
    """Latency over period of the series timed alone, or None."""
    return None if alone is None else alone["latency_ms"] / alone["period_ms"]


def over_all(document: Document) -> list[str]:
    """Summary sentences over all workloads."""
    found, lines = totals(document), []
    for metric in ("period", "latency"):
        each = found[metric]
        if each["geometric_mean"] is None:
            continue
        lines.append(
            f"- our {metric} over the best rival's: geometric mean {each['geometric_mean']:.3f} "
            f"of {each['workloads']} workloads, worst {each['worst']:.3f} "
            f"({each['worst_workload']})"
        )
    if (alone := against_pytorch(document)) is not None:
        lines.append(
            f"- our period over that of the best of PyTorch alone: geometric mean {alone:.3f}"
        )
    if found["search_s"] is not None:
        lines.append(f"- search: median {found['search_s']:.0f} s")
    if found["autotuned"]:
        took = figure(found["autotuned_s"], ".0f", " s median set-up, ")
        lines.append(
            f"- {AUTOTUNED}: {took}{found['autotuned_ready']} of {found['autotuned']} ready in time"
        )
    return lines + within_table(document)


def within_table(document: Document) -> list[str]:
    """Plans of further searches against rivals, a row per budget; empty without such searches."""

    def cell(by_name: dict[str, dict[str, Any]], key: str) -> str:
        known = {name: 1 + each[key] for name, each in by_name.items() if each[key] is not None}
        if not known:
            return NONE
        worst = max(known, key=lambda name: known[name])
        return f"{geometric_mean(known.values()):.3f}, {known[worst]:.3f} ({worst})"

    rows = []
    for budget_s, by_name in sorted(within_budgets(document).items(), reverse=True):
        searches = [each["search_s"] for each in by_name.values() if each["search_s"]]
        took = f"{median(searches):.0f} s" if searches else NONE
        rows.append([f"{budget_s:.0f} s", took, *(cell(by_name, key) for key in WITHIN)])
    if not rows:
        return []
    head = ["budget", "median search", *WITHIN.values()]
    intro = "Our period with smaller budgets over that of others, geometric mean and worst:"
    return [NONE, intro, NONE, *table(head, rows)]


def against_pytorch(document: Document) -> float | None:
    """Geometric mean of our period over that of the best option without other engines.

    None where no other engine was timed.
    """
    found, engines = [], False
    for name in document["workloads"]:
        rows = rows_of(document, name)
        own = [row for row in rows if not any(engine in row["option"] for engine in ENGINES)]
        engines = engines or len(own) < len(rows)
        found.append(ratio(against(best_of(own, "period_ms"), "period")))
    known = [each for each in found if each is not None]
    return geometric_mean(known) if engines and known else None


def protocol(entry: dict[str, Any]) -> str:
    """Describe how long one workload was timed; empty if unknown."""
    kept = entry.get("protocol")
    if kept is None:
        return NONE
    return (
        f"The first {kept['dropped_ms']:.0f} ms of each turn, and its first three calls, are no "
        f"samples. Alone, each metric was timed for {kept['alone_s']:.0f} s, and for "
        f"{kept['explained_s']:.0f} s our period where its CV is over {kept['cv_limit']:.1%}."
    )


def protocols(document: Document) -> list[str]:
    """A paragraph per timing protocol, with its workloads unless it applies to all."""
    ways: dict[str, list[str]] = {}
    for name, entry in document["workloads"].items():
        ways.setdefault(protocol(entry), []).append(name)
    lines: list[str] = []
    for text, names in ways.items():
        if text:
            lines += [text if len(ways) == 1 else f"{', '.join(names)}: {text}", ""]
    return lines


def markdown(document: Document) -> str:
    """Format the whole document."""
    names = list(document["workloads"])
    lines = [
        "# steadytorch beside what engineers write by hand",
        "",
        f"{heading(document)}.",
        "",
        "Every option in a fresh process; set-ups share the machine, so their seconds are upper "
        "bounds; then timed block by block in random order, one process at a time. Inputs and "
        "results are float32 (or token ids) for all, and results are copies. `steadytorch` is "
        "`plan.apply(model)`, as a program calls it. The error is relative L2 against float64: "
        f"over {WRONG:.0%} there is no result to use, and the option is nobody's rival. p99 is "
        "shown from 1,000 independent samples on. What is said of one alone was timed after all "
        "others but the best had ended, without a change of processes. "
        "Where a number of processes stands beside an effect, ours and the rival were set up anew "
        "in so many: the effect is of one estimate per process, and the period is their median.",
        "",
        *protocols(document),
        *table(ROWS, map(row_cells, document["rows"])),
        "",
        "## Summary",
        "",
        *table(SUMMARY, (summary_cells(document, name) for name in names)),
        "",
        *over_all(document),
    ]
    return "\n".join(lines).rstrip() + "\n"


BRIEF = ("machine", "workloads", "time per step, best by hand = 1", "worst", "median search")


def page_cells(document: Document, name: str) -> list[str] | None:
    """Cells of one workload in the page's table; None without a rival."""
    rows, entry = rows_of(document, name), document["workloads"][name]
    ours, best = ours_of(rows), best_of(rows, "period_ms")
    if ours is None or best is None:
        return None
    eager = next((row for row in rows if row["option"].startswith("eager")), None)
    return [
        f"{name}, {entry['precision']}",
        figure((eager or {}).get("period_ms"), ".3f", " ms"),
        f"{best['period_ms']:.3f} ms, {best['option']}",
        f"{ours['period_ms']:.3f} ms",
        effect(against(best, "period")),
        effect(against(best_of(rows, "latency_ms"), "latency")),
        figure(ours["p99_over_median"], ".3f"),
        figure(entry.get("search_s"), ".0f", " s"),
    ]


def page(document: Document) -> str:
    """Format the table of one machine for `docs/results.md`, with its versions."""
    cells = [page_cells(document, name) for name in document["workloads"]]
    shown = [each for each in cells if each is not None]
    lines = [f"{heading(document)}:", "", *table(PAGE, shown), "", *over_all(document)]
    return "\n".join(lines).rstrip() + "\n"


def brief(documents: Iterable[Document]) -> str:
    """Format the table for the README, a row per machine."""
    return "\n".join(table(BRIEF, map(_brief_cells, documents))) + "\n"


def _brief_cells(document: Document) -> list[str]:
    found = totals(document)
    period = found["period"]
    return [
        heading(document).partition(", ")[0],
        str(period["workloads"]),
        figure(period["geometric_mean"], ".3f"),
        f"{figure(period['worst'], '.3f')} ({period['worst_workload']})",
        figure(found["search_s"], ".0f", " s"),
    ]
