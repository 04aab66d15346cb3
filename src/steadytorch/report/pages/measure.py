"""The HTML page of a measurement: samples over time, distribution, figures, outlier causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from steadytorch.quantities import size
from steadytorch.report import measure
from steadytorch.report.pages.series import histogram, timeline
from steadytorch.report.plots import BLUE, Plot, Table, table
from steadytorch.report.text import duration, grouped, percent_above, seconds
from steadytorch.results.measure import HostBlock, MeasureResult, Outlier, ProcessMeasurement
from steadytorch.results.saved import Saved

_BLUES = (BLUE, "#63a4dc", "#173f6b")
_MOST_NAMED = 8
_REPRESENTATIVE = "Of the representative process, which has the middle median."
_TOO_FEW = "too few samples: p99 needs 1,000 independent ones"


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a measurement."""
    document: MeasureResult = saved.result
    shown = document.representative
    all_outliers = [each.period.outliers for each in document.processes]
    return {
        "title": saved.head.workload,
        "headline": measure.headline(document),
        "details": measure.details(document),
        "samples": _samples(document),
        "histogram": _histogram(document, shown),
        "several": _several(document),
        "figures": _figures(document, shown),
        "outliers": _outliers(all_outliers, document),
        "processes": _processes(document.processes),
        "blocks": _blocks(shown, document),
        "unknown": _unknown(shown, document),
    }


def _several(document: MeasureResult) -> bool:
    """Whether a measurement has more than one process."""
    return len(document.processes) > 1


def _samples(document: MeasureResult) -> Plot:
    """Charts the samples of all processes; adjacent processes differ in colour."""
    count = len(document.processes)
    if count == 1:
        names = ["samples"]
    elif count <= _MOST_NAMED:
        names = [f"process {i + 1}" for i in range(count)]
    else:
        names = [("odd processes", "even processes")[i % 2] for i in range(count)]
    colours = {name: _BLUES[place % len(_BLUES)] for place, name in enumerate(names)}
    return timeline([each.period for each in document.processes], names, colours)


def _histogram(document: MeasureResult, shown: ProcessMeasurement) -> Plot:
    if len(document.processes) == 1:
        return histogram(shown.period, document.median_ns, document.median_ci_ns, "Distribution")
    number = document.processes.index(shown) + 1
    title = f"Distribution in process {number}, the representative one"
    return histogram(shown.period, shown.period.median_ns, shown.period.median_ci_ns, title)


def _figures(document: MeasureResult, shown: ProcessMeasurement) -> Table:
    period, varies = shown.period, shown.period.variability
    p99 = _TOO_FEW if period.p99_ns is None else _tail(period.p99_ns, period.median_ns)
    rows: list[tuple[str, object]] = [
        ("median", duration(document.median_ns)),
        ("95 % interval of the median", _interval(document.median_ci_ns, document.why_no_ci)),
        ("claim", document.claim),
        ("p90", _tail(period.p90_ns, period.median_ns)),
        ("p99", p99),
        ("95 % interval of p99", _interval(period.p99_ci_ns, None)),
        ("slowest", _tail(period.max_ns, period.median_ns)),
        ("mean", duration(period.mean_ns)),
        ("CV", f"{100 * varies.cv:.2f} %, robust {100 * varies.robust_cv:.2f} %"),
        ("jitter from call to call", f"{100 * varies.jitter:.2f} %"),
        ("drift", "none" if period.steady else f"not excluded: {period.why_unsteady}"),
        ("levels of the series", varies.regimes),
        ("samples", f"{len(period.samples_ns):,}, of which warm-up {period.warmup_dropped:,}"),
    ]
    if shown.latency is not None:
        rows.insert(3, ("latency, call to finished result", duration(shown.latency.median_ns)))
    note = (
        "Median, interval and claim cover all processes; other rows cover the representative one, "
        "which has the middle median."
    )
    return table(["figure", "value"], rows, (0, 1), note if _several(document) else "")


def _interval(interval: tuple[float, float] | None, why: str | None) -> str:
    if interval is None:
        return f"none: {why}" if why else "none"
    return f"{duration(interval[0])} to {duration(interval[1])}"


def _tail(value: float, median: float) -> str:
    return f"{duration(value)} ({percent_above(value, median)})"


def _outliers(found: Sequence[Sequence[Outlier]], document: MeasureResult) -> Table:
    """A table with the number of outliers and the slowest outlier for each cause."""
    every = [outlier for each in found for outlier in each]
    causes = Counter(outlier.cause for outlier in every)
    slowest: dict[str, int] = {}
    for outlier in every:
        slowest[outlier.cause] = max(outlier.sample_ns, slowest.get(outlier.cause, 0))
    rows = [
        (cause, f"{count:,}", _tail(slowest[cause], document.median_ns))
        for cause, count in causes.most_common()
    ]
    of_all = "Of all processes; percentages are against the overall median."
    note = of_all if _several(document) else ""
    return table(["cause", "outliers", "the slowest"], rows, note=note)


def _processes(processes: Sequence[ProcessMeasurement]) -> Table:
    starts = accumulate((len(each.period.samples_ns) for each in processes), initial=0)
    rows = [
        (
            *(number, duration(each.period.median_ns), duration(each.period.p90_ns)),
            *(f"{len(each.period.samples_ns):,}", f"{start:,}", f"{len(each.period.outliers):,}"),
            *(seconds(each.set_up.setup_s), size(each.set_up.peak_memory_bytes)),
            "" if each.complete else "ended early",
        )
        for number, (each, start) in enumerate(zip(processes, starts, strict=False), 1)
    ]
    headings = ["process", "median", "p90", "samples", "from sample", "outliers", "set-up"]
    return table([*headings, "peak memory", ""], rows, (8,))


def _blocks(shown: ProcessMeasurement, document: MeasureResult) -> Table:
    host, device = shown.host, shown.device
    rows: list[tuple[str, object]] = [
        ("cost of the probe", None if host.overhead_ns is None else duration(host.overhead_ns)),
        ("garbage collections", _collections(host)),
        ("involuntary switches", _count(host.involuntary_switches)),
        ("pages read from a disk", _count(host.major_faults)),
        ("taken by other virtual machines", None if host.steal_ns is None else _ns(host.steal_ns)),
        ("set-up", seconds(shown.set_up.setup_s)),
        ("warm-up calls", f"{shown.set_up.warm_up.calls:,}"),
        ("peak memory", size(shown.set_up.peak_memory_bytes)),
    ]
    if device is not None:
        held = device.clock_held_by
        rows += [
            ("SM clock", None if device.sm_clock_mhz is None else f"{device.sm_clock_mhz:.0f} MHz"),
            ("power", None if device.power_watts is None else f"{device.power_watts:.0f} W"),
            ("clock held by", None if held is None else ", ".join(held) or "nothing"),
            ("other GPU processes", device.other_processes),
        ]
    told = [(label, "unknown" if value is None else value) for label, value in rows]
    return table(["host and device", "value"], told, (0, 1), _of_one(document))


def _of_one(document: MeasureResult) -> str:
    return _REPRESENTATIVE if _several(document) else ""


def _unknown(shown: ProcessMeasurement, document: MeasureResult) -> Table:
    rows = [(", ".join(names), why) for why, names in grouped(shown.unknown).items()]
    return table(["not observed", "why"], rows, (0, 1), _of_one(document))


def _collections(host: HostBlock) -> str:
    return f"{host.gc_collections:,}" + (f" ({duration(host.gc_ns)})" if host.gc_ns else "")


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _ns(value: int) -> str:
    return duration(value) if value else "no time"
