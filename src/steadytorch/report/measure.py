"""Renders a measurement in the terminal: a headline, two small charts, and details."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from steadytorch.measure.sampler import CLOCKS_AGREE
from steadytorch.quantities import counted, size
from steadytorch.report.charts import histogram, timeline, timeline_scale
from steadytorch.report.text import (
    duration,
    format_drift,
    percent_above,
    plain,
    print_indented,
    seconds,
    unit_of,
)
from steadytorch.results.measure import Measurement, MeasureResult, ProcessMeasurement

_WIDTH = 60
_TOO_FEW = "too few samples"


def headline(result: Measurement) -> str:
    """One line such as `12.41 ms, 95 % within 12.38 to 12.45; no drift; p99 +1.9 %`."""
    shown = _series(result)
    parts = [_median(result)]
    if not _too_few(result):
        parts.append(format_drift(shown))
    if shown.p99_ns is not None:
        parts.append(f"p99 {percent_above(shown.p99_ns, shown.median_ns)}")
    else:
        parts.append(f"p90 {percent_above(shown.p90_ns, shown.median_ns)}")
    parts.append(_outliers(shown))
    return "; ".join(parts)


def _series(result: Measurement) -> Measurement:
    """The series to show; with several processes, that of the representative process."""
    return result.representative.period if isinstance(result, MeasureResult) else result


def _median(result: Measurement) -> str:
    name, size_ns = unit_of(result.median_ns)

    def figure(value: float) -> str:
        return f"{value / size_ns:.{2 if value / size_ns < 100 else 1}f}"

    text = f"{figure(result.median_ns)} {name}"
    if result.median_ci_ns is None:
        why = _why(result)
        # The next part of the headline says so.
        told = why is None or why == _series(result).why_unsteady
        return f"{text}, no interval" + ("" if told else f": {why}")
    low, high = map(figure, result.median_ci_ns)
    return f"{text}, 95 % within {low} to {high}"


def _too_few(result: Measurement) -> bool:
    """Whether too few samples explain both the missing interval and the unknown drift."""
    unsteady = _series(result).why_unsteady or ""
    missing = result.median_ci_ns is None and (_why(result) or "")
    return bool(missing) and all(why.startswith(_TOO_FEW) for why in (missing, unsteady))


def _why(result: Measurement) -> str | None:
    if isinstance(result, MeasureResult) and len(result.replicates) > 1:
        return "an interval over processes needs three of them"
    return _series(result).why_no_ci


def _outliers(measured: Measurement) -> str:
    count = len(measured.outliers)
    if not count:
        return f"no outliers in {len(measured.samples_ns):,}"
    return f"{counted(count, 'outlier')} in {len(measured.samples_ns):,}: {causes(measured)}"


def causes(measured: Measurement) -> str:
    """The causes of the outliers with their number, the most frequent first."""
    found = Counter(outlier.cause for outlier in measured.outliers)
    return ", ".join(f"{number} {cause}" for cause, number in found.most_common())


def render_measure(console: Console, name: str, result: MeasureResult) -> None:
    """Prints a measurement; every line fits the console."""
    _charts(console, name, result)
    for text in details(result):
        _line(console, plain(text))
    if result.failed is not None:
        console.print(Text(f"ended early: {plain(result.failed)}", "yellow"))


def render_series(console: Console, name: str, result: Measurement) -> None:
    """Prints the headline, charts and variability of any series of timings."""
    _charts(console, name, result)
    for text in _variability(result):
        _line(console, text)


def _charts(console: Console, name: str, result: Measurement) -> None:
    console.print(Text.assemble((plain(name), "bold"), f": {plain(headline(result))}"))
    shown = _series(result)
    low, high = timeline_scale(shown.samples_ns, _WIDTH)
    console.print()
    _line(console, f"over time, medians from {duration(low)} to {duration(high)}")
    _line(console, timeline(shown.samples_ns, _WIDTH))
    _line(console, "distribution")
    for row in histogram(shown.samples_ns):
        _line(console, row)
    console.print()


def _line(console: Console, text: str) -> None:
    print_indented(console, Text(text))


def details(result: MeasureResult) -> list[str]:
    """Lines of detail: processes, claim, latency, variability, host, device and set-up."""
    shown, count = result.representative, len(result.processes)
    lines = []
    if count > 1:
        whole = result.replicates
        medians = ", ".join(duration(p.period.median_ns) for p in whole)
        spread = f"; standard deviation {100 * (result.spread or 0):.2f} %"
        cut = f"; {count - len(whole)} ended early, not counted"
        lines.append(
            f"{count} processes: {medians}"
            + (spread if len(whole) > 1 else "")
            + (cut if len(whole) < count else "")
        )
    lines.append(f"claim: {result.claim}")
    if shown.latency is not None:
        lines.append(f"latency {duration(shown.latency.median_ns)}, call to finished result")
    lines.extend(_variability(shown.period))
    lines.append(_host(shown))
    if shown.device is not None:
        lines.append(_device(shown))
    lines.append(
        f"set-up {seconds(shown.set_up.setup_s)}, {shown.set_up.warm_up.calls} warm-up calls, "
        f"peak memory {size(shown.set_up.peak_memory_bytes)}"
    )
    if not (shown.resolved or result.failed or result.interrupted):
        lines.append("the budget ended before the median was known to 0.5 %: raise --budget")
    return lines


def _variability(measured: Measurement) -> list[str]:
    varies = measured.variability
    lines = [
        f"CV {100 * varies.cv:.2f} %, robust {100 * varies.robust_cv:.2f} %; jitter from call to "
        f"call {100 * varies.jitter:.2f} %"
    ]
    if measured.warmup_dropped:
        lines.append(f"warm-up: the first {measured.warmup_dropped} samples, kept but not counted")
    return lines


def _host(process: ProcessMeasurement) -> str:
    host = process.host
    overhead = (
        "an unknown time"
        if host.overhead_ns is None
        else f"{host.overhead_ns / 1e3:.2f} us ({host.overhead_ns / process.period.median_ns:.2%})"
    )
    switches = host.involuntary_switches
    told = "unknown" if switches is None else f"{switches:,}"
    collected = f" ({duration(host.gc_ns)})" if host.gc_ns else ""
    return (
        f"host: {counted(host.gc_collections, 'garbage collection')}{collected}, "
        f"involuntary switches: {told}; the probe adds {overhead}"
    )


def _device(process: ProcessMeasurement) -> str:
    device = process.device
    assert device is not None
    clock = "unknown" if device.sm_clock_mhz is None else f"{device.sm_clock_mhz:.0f} MHz"
    power = "unknown" if device.power_watts is None else f"{device.power_watts:.0f} W"
    held = "unknown" if device.clock_held_by is None else ", ".join(device.clock_held_by) or "none"
    line = f"device: clock {clock}, power {power}, clock held by: {held}"
    apart = device.clock_difference
    if apart is None or abs(apart) <= CLOCKS_AGREE:
        return line
    return f"{line}; its clock and the host's differ by {100 * apart:+.2f} %: mistrust periods"
