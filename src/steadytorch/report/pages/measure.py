"""The page of a measurement: samples over time, how often which, figures and causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from steadytorch.measure.measurement import Measurement
from steadytorch.measure.variability import Outlier
from steadytorch.quantities import size
from steadytorch.report import measure
from steadytorch.report.pages.document import Document
from steadytorch.report.pages.series import histogram, timeline
from steadytorch.report.plots import BLUE, Plot, Table, table
from steadytorch.report.text import duration, grouped, percent_above, seconds

_BLUES = (BLUE, "#63a4dc", "#173f6b")
_MOST_NAMED = 8
_TOO_FEW = "too few samples: 1,000 independent ones are needed"


class WarmUp(msgspec.Struct, frozen=True):
    """How a workload was brought to speed."""

    calls: int


class SetUp(msgspec.Struct, frozen=True):
    """How a workload came to be ready."""

    setup_s: float
    warm_up: WarmUp
    peak_memory_bytes: int


class Host(msgspec.Struct, frozen=True):
    """What the host did; None where that is not known."""

    overhead_ns: float | None
    gc_collections: int
    gc_ns: int
    involuntary_switches: int | None
    major_faults: int | None
    steal_ns: int | None


class Device(msgspec.Struct, frozen=True):
    """What the GPU did; None where that is not known."""

    sm_clock_mhz: float | None
    power_watts: float | None
    clock_held_by: tuple[str, ...] | None
    other_processes: int | None
    clock_difference: float | None = None


class Process(msgspec.Struct, frozen=True):
    """One process of a measurement."""

    period: Measurement
    latency: Measurement | None
    set_up: SetUp
    resolved: bool
    host: Host
    device: Device | None
    unknown: dict[str, str]
    complete: bool = True


class MeasureDocument(Document, frozen=True, kw_only=True):
    """What the page needs of a measurement; its samples are those of the processes."""

    processes: tuple[Process, ...]
    claim: str
    median_ns: float
    median_ci_ns: tuple[float, float] | None
    spread: float | None
    failed: str | None = None
    interrupted: bool = False
    why_no_ci: str | None = None

    @property
    def replicates(self) -> tuple[Process, ...]:
        """The complete processes, or all where none is."""
        return tuple(each for each in self.processes if each.complete) or self.processes


def contents(document: MeasureDocument) -> dict[str, Any]:
    """What the template shows of a measurement."""
    shown = measure.representative(document)
    all_outliers = [each.period.outliers for each in document.processes]
    return {
        "title": document.workload,
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


def _several(document: MeasureDocument) -> bool:
    """Whether figures may be of one process or of all."""
    return len(document.processes) > 1


def _samples(document: MeasureDocument) -> Plot:
    """All processes, neighbours in colours that can be told apart."""
    count = len(document.processes)
    if count == 1:
        names = ["samples"]
    elif count <= _MOST_NAMED:
        names = [f"process {i + 1}" for i in range(count)]
    else:
        names = [("odd processes", "even processes")[i % 2] for i in range(count)]
    colours = {name: _BLUES[place % len(_BLUES)] for place, name in enumerate(names)}
    return timeline([each.period for each in document.processes], names, colours)


def _histogram(document: MeasureDocument, shown: Process) -> Plot:
    if len(document.processes) == 1:
        return histogram(shown.period, document.median_ns, document.median_ci_ns, "How often")
    number = document.processes.index(shown) + 1
    title = f"How often in process {number}, whose median is the middle one"
    return histogram(shown.period, shown.period.median_ns, shown.period.median_ci_ns, title)


def _figures(document: MeasureDocument, shown: Process) -> Table:
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
        ("steady", "yes" if period.steady else f"no: {period.why_unsteady}"),
        ("regimes (levels that it keeps to)", varies.regimes),
        ("samples", f"{len(period.samples_ns):,}, of which warm-up {period.warmup_dropped:,}"),
    ]
    if shown.latency is not None:
        rows.insert(3, ("latency, call to finished result", duration(shown.latency.median_ns)))
    note = (
        "Median, interval and claim are of all processes; the rest is of the process whose median "
        "is the middle one."
    )
    return table(["figure", "value"], rows, (0, 1), note if _several(document) else "")


def _interval(interval: tuple[float, float] | None, why: str | None) -> str:
    if interval is None:
        return f"none: {why}" if why else "none"
    return f"{duration(interval[0])} to {duration(interval[1])}"


def _tail(value: float, median: float) -> str:
    return f"{duration(value)} ({percent_above(value, median)})"


def _outliers(found: Sequence[Sequence[Outlier]], document: MeasureDocument) -> Table:
    """By cause: how many, and how slow the slowest was."""
    every = [outlier for each in found for outlier in each]
    causes = Counter(outlier.cause for outlier in every)
    slowest: dict[str, int] = {}
    for outlier in every:
        slowest[outlier.cause] = max(outlier.sample_ns, slowest.get(outlier.cause, 0))
    rows = [
        (cause, f"{count:,}", _tail(slowest[cause], document.median_ns))
        for cause, count in causes.most_common()
    ]
    of_all = "Of all processes; the slowest against the median of all."
    note = of_all if _several(document) else ""
    return table(["cause", "outliers", "the slowest"], rows, note=note)


def _processes(processes: Sequence[Process]) -> Table:
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


def _blocks(shown: Process, document: MeasureDocument) -> Table:
    host, device = shown.host, shown.device
    rows: list[tuple[str, object]] = [
        ("the probe adds", None if host.overhead_ns is None else duration(host.overhead_ns)),
        ("garbage collections", _collections(host)),
        ("involuntary switches", _count(host.involuntary_switches)),
        ("pages read from a disk", _count(host.major_faults)),
        ("taken by other virtual machines", None if host.steal_ns is None else _ns(host.steal_ns)),
        ("set-up", seconds(shown.set_up.setup_s)),
        ("calls to warm up", f"{shown.set_up.warm_up.calls:,}"),
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


def _of_one(document: MeasureDocument) -> str:
    return "Of the process whose median is the middle one." if _several(document) else ""


def _unknown(shown: Process, document: MeasureDocument) -> Table:
    rows = [(", ".join(names), why) for why, names in grouped(shown.unknown).items()]
    return table(["not observed", "why"], rows, (0, 1), _of_one(document))


def _collections(host: Host) -> str:
    return f"{host.gc_collections:,}" + (f" ({duration(host.gc_ns)})" if host.gc_ns else "")


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _ns(value: int) -> str:
    return duration(value) if value else "no time"
