"""The limits that the simulations must keep, and the table of what they gave."""

from __future__ import annotations

from typing import Any

FEWEST_CLAIMS = 0.10
"""A kind of noise on which fewer runs than this claim an interval is judged with the others only:
a handful of claims is no rate."""

SHORTEST = 1000
"""Shorter series are shown, not judged: a clock that stays 200 samples in each of two states shows
only one of them in a third of the series of 500, and no method sees what is not there."""


def _gate(name: str, limit: str, value: float | None, met: bool, worst: str = "") -> dict[str, Any]:
    return {"gate": name, "limit": limit, "value": value, "met": bool(met), "where": worst}


def _pooled(cells: list[dict[str, Any]], held: str, claimed: str) -> float | None:
    total = sum(cell[claimed] for cell in cells)
    if not total:
        return None
    return sum((cell[held] or 0.0) * cell[claimed] for cell in cells) / total


def _where(cell: dict[str, Any]) -> str:
    return ", ".join(
        str(cell[key]) for key in ("kind", "samples", "effect") if cell.get(key) is not None
    )


def judge_all(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every gate with its value: the worst cell, or all claims together."""
    return [*_coverage(found["coverage"]), *_pairs(found["verdicts"]), _races(found["races"])]


def _coverage(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cells = [cell for cell in cells if cell["samples"] >= SHORTEST]
    gates = [_each_kind(cells, length) for length in sorted({c["samples"] for c in cells})]
    together = _pooled(cells, "coverage", "claimed")
    if together is not None:
        met = 0.94 <= together <= 0.96
        gates.append(_gate("coverage, all claims together", "94 to 96 %", together, met))
    tails = [cell for cell in cells if cell["p99_claimed"] >= FEWEST_CLAIMS]
    if tails:
        worst = min(tails, key=lambda cell: cell["p99_coverage"])
        value = worst["p99_coverage"]
        gates.append(
            _gate("p99 coverage, each kind", ">= 93 %", value, value >= 0.93, _where(worst))
        )
    together = _pooled(cells, "p99_coverage", "p99_claimed")
    if together is not None:
        gates.append(
            _gate("p99 coverage, all claims together", ">= 93 %", together, together >= 0.93)
        )
    return gates


def _each_kind(cells: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """The gate on every kind at one length, the worst first and all that miss it named."""
    judged = [c for c in cells if c["samples"] == length and c["claimed"] >= FEWEST_CLAIMS]
    judged.sort(key=lambda cell: -abs(cell["coverage"] - 0.95))
    missed = [cell for cell in judged if not 0.94 <= cell["coverage"] <= 0.96]
    where = "; ".join(f"{c['kind']} {100 * c['coverage']:.1f}" for c in missed or judged[:1])
    name = f"coverage, each kind, {length} samples"
    return _gate(name, "94 to 96 %", judged[0]["coverage"] if judged else None, not missed, where)


def _pairs(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    null = [cell for cell in cells if cell["effect"] == 0]
    large = [cell for cell in cells if abs(cell["effect"]) > 0.005]
    one = [cell for cell in cells if abs(cell["effect"]) == 0.01]

    def said(cell: dict[str, Any]) -> float:
        return cell["faster"] + cell["slower"]

    false = max(null, key=said)
    wrong = max(cells, key=lambda cell: cell["wrong_direction"])
    tie = max(large, key=lambda cell: cell["tie"])
    least = min(one, key=lambda cell: cell["found_by_27"])
    return [
        _gate(
            "false verdict on equal arms", "<= 1 %", said(false), said(false) <= 0.01, _where(false)
        ),
        _gate(
            "wrong direction",
            "<= 0.1 %",
            wrong["wrong_direction"],
            wrong["wrong_direction"] <= 0.001,
            _where(wrong),
        ),
        _gate("tie declared on 1 % or more", "<= 1 %", tie["tie"], tie["tie"] <= 0.01, _where(tie)),
        _gate(
            "1 % found by 27 pairs",
            ">= 95 %",
            least["found_by_27"],
            least["found_by_27"] >= 0.95,
            _where(least),
        ),
    ]


def _races(cells: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max(cells, key=lambda cell: cell["best_dropped"])
    value = worst["best_dropped"]
    return _gate("race of 8: best dropped", "<= 1 %", value, value <= 0.01, _where(worst))


# -- the table ----------------------------------------------------------------------------------


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _gate_table(gates: list[dict[str, Any]]) -> list[str]:
    return _table(
        ["gate", "limit", "worst, %", "where", "met"],
        [
            [
                g["gate"],
                g["limit"],
                _percent(g["value"], 2),
                g["where"],
                "yes" if g["met"] else "**no**",
            ]
            for g in gates
        ],
    )


def _study_tables(found: dict[str, Any]) -> list[str]:
    lines = ["Intervals of the median, nominal 95 % (percent of runs):", ""]
    lines += _table(
        [
            "noise",
            "samples",
            "steady",
            "claimed",
            "coverage",
            "naive",
            "p99 claimed",
            "p99 coverage",
        ],
        [
            [
                cell["kind"],
                str(cell["samples"]),
                *(_percent(cell[key]) for key in ("steady", "claimed", "coverage")),
                _percent(cell["naive_coverage"]),
                *(_percent(cell[key]) for key in ("p99_claimed", "p99_coverage")),
            ]
            for cell in found["coverage"]
        ],
    )
    lines += ["Verdicts (percent of comparisons; naive is A, then B, and a t-test at 1 %):", ""]
    by_kind: dict[str, dict[float, dict[str, Any]]] = {}
    for cell in found["verdicts"]:
        by_kind.setdefault(cell["kind"], {})[cell["effect"]] = cell
    lines += _table(
        [
            "noise",
            "false, equal arms",
            "naive false",
            "wrong direction",
            "1 % found by 27 pairs",
            "3 % found",
            "median pairs at 1 %",
            "race: best dropped",
            "race: cost",
        ],
        [
            [
                kind,
                _percent(cells[0.0]["faster"] + cells[0.0]["slower"], 2),
                _percent(found["naive_false"][kind]),
                _percent(max(c["wrong_direction"] for c in cells.values()), 2),
                _percent(min(cells[e]["found_by_27"] for e in (0.01, -0.01))),
                _percent(min(cells[0.03]["slower"], cells[-0.03]["faster"])),
                f"{cells[0.01]['median_pairs']:.0f}",
                _percent(race["best_dropped"], 2),
                _percent(race["median_cost"], 0),
            ]
            for (kind, cells), race in zip(by_kind.items(), found["races"], strict=True)
        ],
    )
    return lines


def as_markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    settings, versions = result["configuration"], result["versions"]
    lines = [
        f"# Statistics by simulation, {result['created']}",
        "",
        f"{settings['replications']} replications of each cell, seed {settings['seed']}, "
        f"{result['seconds']} s in {settings['processes']} processes; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "## Gates, nine kinds of noise",
        "",
        *_gate_table(result["gates"]),
        f"Per kind, coverage is judged where at least {FEWEST_CLAIMS:.0%} of the runs claim an "
        "interval; every cell is below.",
        "",
        *_study_tables(result["tuned"]),
        "## Kinds that were unseen once, and on which the method was mended since",
        "",
        *_gate_table(result["gates_seen"]),
        *_study_tables(result["seen"]),
        "## Two kinds written after the method was frozen",
        "",
        *_gate_table(result["gates_unseen"]),
        *_study_tables(result["unseen"]),
    ]
    return "\n".join(lines).rstrip() + "\n"
