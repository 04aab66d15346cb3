"""Results of the benchmark as one document: rows, merging and derived figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import msgspec
import numpy as np
from rival_arms import OURS, Arm, within
from rival_options import AUTOTUNED, compiles
from rival_power import clock_finding

from steadytorch.bench.series import Series
from steadytorch.measure.correlation import effective_size
from steadytorch.measure.measurement import P99_NEEDS
from steadytorch.measure.race import judge
from steadytorch.measure.statistics import order_interval
from steadytorch.runtime.agreement import TOLERANCES

SCHEMA = 1
P99_LIMIT, CV_LIMIT = 1.02, 0.005
"""Limits of our period's p99 over median and CV, above which a cause is reported."""

WRONG = TOLERANCES["bf16"]
"""Relative L2 error of an unusable result: more than a search accepts in bf16, the lowest precision
of options by hand."""

Row = dict[str, Any]
Document = dict[str, Any]


# -- rows -----------------------------------------------------------------------------------------


def failed_row(workload: str, option: str, reason: str, detail: str = "") -> Row:
    """Make the row of an option that could not be timed."""
    figures = dict.fromkeys(
        ("period_ms", "p99_over_median", "cv", "latency_ms", "setup_s", "peak_mb", "error")
    )
    return {"workload": workload, "option": option, **figures, "failed": reason, "detail": detail}


def row_of(workload: str, arm: Arm, ours: Arm | None) -> Row:
    """Make the row of one option: its figures, and the verdicts on ours against it."""
    if arm.failed is not None or arm.set_up is None or not arm.blocks:
        return failed_row(workload, arm.option, arm.failed or "was not timed", arm.detail)
    # On the CPU, calls are synchronous, so the period is the latency.
    latency = "latency" if "latency" in arm.blocks else "period"
    period = np.asarray(arm.samples("period"), dtype=np.float64)
    interval = order_interval(np.asarray(arm.medians("period")))
    row: Row = {
        "workload": workload,
        "option": arm.option,
        "period_ms": _ms(float(np.median(period))),
        "p99_over_median": tail(period),
        "cv": float(period.std() / period.mean()),
        "latency_ms": _ms(float(np.median(arm.samples(latency)))),
        "setup_s": arm.set_up.setup_s,
        "peak_mb": arm.set_up.peak_memory_bytes / 1e6,
        "error": arm.set_up.error,
        "failed": None,
        "period_ci_ms": None if interval is None else [*map(_ms, interval)],
        "samples": len(period),
        "block_medians_ns": {metric: arm.medians(metric) for metric in arm.blocks},
    }
    if arm.option == OURS:
        row["samples_ns"] = {metric: arm.samples(metric) for metric in arm.blocks}
    elif ours is not None and ours.failed is None:
        row["ours_against_it"] = {m: verdict(arm.medians(m), ours.medians(m)) for m in arm.blocks}
    return row


def alone(series: dict[str, Series]) -> dict[str, Any]:
    """Figures by metric, as in `steady measure`, of an option timed alone.

    Outliers are `[time over median, cause]`, in order. `finding` and `variance_share` are the
    finding of `explain` on the clock and its share of the variance, or None. `host_ms` is the time
    to enqueue a call; None if not measured.
    """
    found = {metric: each.summary(metric) for metric, each in series.items()}
    period, latency = found["period"], found.get("latency", found["period"])
    finding = clock_finding(series["period"])
    return {
        "period_ms": _ms(period.median_ns),
        "latency_ms": _ms(latency.median_ns),
        "p99_over_median": period.p99_over_median,
        "cv": period.cv,
        "samples_ns": {metric: list(each.durations_ns) for metric, each in series.items()},
        "host_ms": _ms(float(np.median(host))) if (host := series["period"].host_ns) else None,
        "finding": None if finding is None else finding.title,
        "variance_share": None if finding is None else finding.variance_share,
        "clocks_mhz": rounded_clocks(series["period"].clocks_mhz),
        "outliers": [
            [round(each.sample_ns / period.median_ns, 3), each.cause] for each in period.outliers
        ],
    }


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 6)


def tail(samples: np.ndarray) -> float | None:
    """p99 over median of all samples; None with too few effective samples.

    No warm-up is dropped, because every process was warm before the first block.
    """
    if effective_size(samples, 0.99) < P99_NEEDS:
        return None
    return float(np.quantile(samples, 0.99) / np.median(samples))


def verdict(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Judge ours against theirs; block `i` of both is from the same round."""
    return msgspec.to_builtins(judge(list(zip(theirs, ours, strict=False))))


# -- documents ------------------------------------------------------------------------------------


def read(path: Path) -> Document:
    """Read the document of a file; empty if the file does not exist."""
    if not path.exists():
        return {"schema": SCHEMA, "kind": "rivals", "environment": {}, "rows": [], "workloads": {}}
    return json.loads(path.read_text())


def merge(document: Document, fresh: Document, order: Sequence[str]) -> Document:
    """Replace workloads of a document by those in `fresh`.

    Args:
        document: the earlier results.
        fresh: new results; also provides environment and date.
        order: names of workloads in display order; others follow.
    """
    workloads = {**document["workloads"], **fresh["workloads"]}
    names = sorted(workloads, key=lambda name: order.index(name) if name in order else len(order))
    kept = [row for row in document["rows"] if row["workload"] not in fresh["workloads"]]
    rows = [*kept, *fresh["rows"]]
    return {
        **document,
        "created": fresh["created"],
        "environment": fresh["environment"],
        "rows": [row for name in names for row in rows if row["workload"] == name],
        "workloads": {name: workloads[name] for name in names},
    }


# -- derived figures ------------------------------------------------------------------------------


def rows_of(document: Document, workload: str) -> list[Row]:
    return [row for row in document["rows"] if row["workload"] == workload]


def ours_of(rows: Sequence[Row]) -> Row | None:
    """Our own row, or None if it was not timed."""
    return next((row for row in rows if row["option"] == OURS and not row["failed"]), None)


def best_of(rows: Sequence[Row], figure: str) -> Row | None:
    """The fastest rival by `period_ms` or `latency_ms`, without wrong results; None if none."""
    timed = [row for row in rows if not (row["option"].startswith(OURS) or row["failed"])]
    return min((r for r in timed if not is_wrong(r)), key=lambda row: row[figure], default=None)


def within_budgets(document: Document) -> dict[float, dict[str, dict[str, Any]]]:
    """Plans of further searches against the best by hand, by budget in seconds and workload.

    Each has the seconds of its `search_s` and, as shares of our time beyond the rival's:
    `best`, `ready` (the best option whose own set-up took no longer than the budget), `uncompiled`
    (the best that compiles nothing) and `default` (our plan of the default budget). None where one
    of both was not timed.
    """
    found: dict[float, dict[str, dict[str, Any]]] = {}
    for name, entry in document["workloads"].items():
        rows = rows_of(document, name)
        plain = [row for row in rows if not compiles(row["option"])]
        rivals = {
            "best": best_of(rows, "period_ms"),
            "uncompiled": best_of(plain, "period_ms"),
            "default": ours_of(rows),
        }
        for each in entry.get("budgets", ()):
            option = within(each["budget_s"])
            ready = [r for r in rows if r["setup_s"] and r["setup_s"] <= each["budget_s"]]
            rivals["ready"] = best_of(ready, "period_ms")
            ours = next((r for r in rows if r["option"] == option and not r["failed"]), None)
            found.setdefault(each["budget_s"], {})[name] = {
                "search_s": each.get("search_s"),
                **{key: _between(ours, row) for key, row in rivals.items()},
            }
    return found


def _between(ours: Row | None, theirs: Row | None) -> float | None:
    if ours is None or theirs is None:
        return None
    sides = (row["block_medians_ns"]["period"] for row in (theirs, ours))
    return verdict(*sides)["estimate"]


def is_wrong(row: Row) -> bool:
    """Whether the error is too large for the results to be used."""
    return row["error"] is None or not row["error"] <= WRONG


def against(row: Row | None, metric: str) -> dict[str, Any] | None:
    """Verdict on ours against a row; that of the period if there is no separate latency."""
    found = (row or {}).get("ours_against_it")
    return None if found is None else found.get(metric, found["period"])


def ratio(judgement: dict[str, Any] | None) -> float | None:
    """Our time over theirs."""
    if judgement is None or judgement["estimate"] is None:
        return None
    return 1.0 + judgement["estimate"]


def rounded_clocks(clocks_mhz: Sequence[float] | None) -> list[float | None] | None:
    """Round clocks to 0.1 MHz for JSON; unknown values and an empty list become None."""
    return [round(c, 1) if c == c else None for c in clocks_mhz] if clocks_mhz else None


def scatters(samples_ns: Sequence[int]) -> bool:
    """Whether the CV of the samples, if any, exceeds the limit."""
    return len(samples_ns) > 0 and float(np.std(samples_ns) / np.mean(samples_ns)) > CV_LIMIT


def cause(ours: Row, power: dict[str, Any]) -> str:
    """Cause of our variability if it exceeds a limit; else empty.

    In alternating blocks the clock is counted, but its limits are read too rarely; these come from
    the series timed alone. If the counted clock explains nothing in alternating blocks, its share
    of the variance in the series timed alone is given.
    """
    tail = ours["p99_over_median"]
    if ours["cv"] <= CV_LIMIT and (tail is None or tail <= P99_LIMIT):
        return ""
    alone, finding = ours.get("alone") or {}, power.get("finding")
    if not power.get("variance_share") and power.get("clock_share"):
        share = f"the clock makes {power['clock_share']:.0%} of the variance"
        return f"{share}; alone: {alone['finding']}" if alone.get("finding") else share
    if not power.get("variance_share") and alone.get("variance_share"):
        return f"not attributed in turns; alone: {alone['finding']}"
    if finding is None:
        return "not attributed"
    at = [f"{power[k]:.0f} {unit}" for k, unit in UNITS.items() if power.get(k) is not None]
    cause_found = f"{finding} ({', '.join(at)})"
    return cause_found if power.get("variance_share") else f"not attributed; {cause_found}"


UNITS = {"sm_clock_mhz": "MHz", "power_watts": "W"}


def totals(document: Document) -> dict[str, Any]:
    """Figures over all workloads that have both ours and a rival.

    Returns:
        Geometric mean and worst ratio of ours to the best rival by metric, the median search time
        in seconds, and the set-up times of autotuned options.
    """
    found: dict[str, Any] = {}
    for metric in ("period", "latency"):
        ratios = {}
        for name in document["workloads"]:
            rows = rows_of(document, name)
            best = best_of(rows, f"{metric}_ms") if ours_of(rows) else None
            value = ratio(against(best, metric))
            if value is not None:
                ratios[name] = value
        worst = max(ratios, key=lambda name: ratios[name], default=None)
        found[metric] = {
            "workloads": len(ratios),
            "geometric_mean": geometric_mean(ratios.values()) if ratios else None,
            "worst": None if worst is None else ratios[worst],
            "worst_workload": worst,
        }
    searches = [w["search_s"] for w in document["workloads"].values() if w.get("search_s")]
    tuned = [row for row in document["rows"] if AUTOTUNED in row["option"]]
    ready = [row["setup_s"] for row in tuned if row["setup_s"] is not None]
    return {
        **found,
        "search_s": median(searches) if searches else None,
        "autotuned_s": median(ready) if ready else None,
        "autotuned_ready": len(ready),
        "autotuned": len(tuned),
    }
