"""The GPU's clock is held down by its power limit or by heat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from steadytorch.device.recording import REASON_BITS, reasons
from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.growth import Growth, growth
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.measure.causes import CLOCK, POWER_CAP, THERMAL

NAME = "clock-throttled"
LEAST_HELD = 0.5
"""Of the time, from which on a held clock is the state of the run and not an episode."""
LEAST_EPISODE = 0.05
"""The same from which on what NVML named may be what moves the clock that was counted."""
LEAST_EFFECT = 0.0025
"""Standard deviation of what the clock adds to samples, over their median: half of a CV of 0.5 %,
which counts as steady. Over all samples, since a clock may fall seldom and far."""
LEAST_READINGS = 10
"""Different readings of the clock without which nothing is said of how samples follow it."""
LEAST_KNOWN = 0.9
"""Of the samples, whose clock must be known for that."""
HIGHEST = 0.99
"""Quantile of a counted clock that stands for the highest: of a short time it is off by more."""
MOST_SLOPE = 1.5
"""Of relative time over the relative period of the clock: work that is bound by it has 1."""
CERTAIN = 4.0
"""Standard errors that the correlation of time and the clock's period must have."""
LEAST_VARIANCE = 0.05

_THERMAL = ("thermal_slowdown", "hardware_thermal_slowdown")
_HOLDS = ("power_cap", "hardware_slowdown", "hardware_power_brake", *_THERMAL)
_MASK = sum(REASON_BITS[name] for name in _HOLDS)


@dataclass(frozen=True, eq=False)
class _Clock:
    """What is known of the clock over the steady samples.

    Attributes:
        held: share of ticks at which power or heat held it.
        names: what held it.
        others: what else NVML named; None where it was not asked.
        median_mhz: 0 where the clock itself was not recorded.
        highest_mhz: likewise.
        share: of the variance of the samples, by how they follow the clock; 0 where they do not.
        counted: whether the clock was counted over each sample, not read now and then.
        places: outliers put down to it.
    """

    held: float
    names: tuple[str, ...]
    others: tuple[str, ...] | None
    median_mhz: float
    highest_mhz: float
    share: float
    counted: bool
    places: np.ndarray


def rule(case: Case) -> Verdict:
    """Clock event reasons of NVML beside the samples, and how samples follow the clock.

    A limit that holds the clock all along costs time, one that comes and goes makes variance. Only
    the limits of power and heat count: an idle GPU, or clocks that someone set, are no throttling.
    How samples follow it is told by the counter of cycles where there is one, else by NVML.
    Where samples follow a clock that was counted, this is told whatever NVML says of the reason.
    Where no clock is known, steps that only ever get slower are taken as a sign of heat.

    Source: "NvmlClocksEventReasons", NVML API reference.
    """
    samples = samples_of(case)
    recorded = samples is not None and samples.column("clock_event_mask") is not None
    if samples is None or not (recorded or _is_counted(samples)):
        grown = growth(case)
        if grown is not None:
            return (_heating(grown),)
        return unrecorded(NAME, samples, "clock_event_mask", "what holds the clock")
    clock = _clock(samples)
    varies = samples.variance_share(clock.places) or 0.0
    varies = max(clock.share, varies)
    if clock.counted and clock.share >= LEAST_VARIANCE and clock.held < LEAST_EPISODE:
        return (_finding(samples, clock, varies, _moving(clock, varies)),)
    if not clock.held or (varies < LEAST_VARIANCE and clock.held < LEAST_HELD):
        return ()
    return (_finding(samples, clock, varies, _holding(clock, varies)),)


def _is_counted(samples: Samples) -> bool:
    """Whether the clock over enough samples is known from the counter."""
    clocks = samples.clocks_mhz
    return clocks is not None and bool(np.mean(clocks > 0) >= LEAST_KNOWN)


def _clock(samples: Samples) -> _Clock:
    masks = samples.level("clock_event_mask")
    seen = 0 if masks is None else int(np.bitwise_or.reduce(masks))
    counted = _is_counted(samples)
    clocks = samples.clocks_mhz if counted else samples.level("sm_clock_mhz")
    if clocks is None:
        clocks = np.zeros(len(samples.durations_ns))
    known = clocks[clocks > 0]  # which NaN is not
    return _Clock(
        held=0.0 if masks is None else float(np.mean(masks & _MASK != 0)),
        names=reasons(seen & _MASK),
        others=None if masks is None else reasons(seen & ~_MASK),
        median_mhz=float(np.median(known)) if len(known) else 0.0,
        highest_mhz=float(np.quantile(known, HIGHEST if counted else 1.0)) if len(known) else 0.0,
        share=followed(samples.durations_ns, clocks),
        counted=counted,
        places=samples.caused_by(POWER_CAP, THERMAL, CLOCK),
    )


def followed(times: np.ndarray, clocks: np.ndarray) -> float:
    """Share of the variance of samples that the clock explains; 0 where that may be chance.

    A reading holds for several samples, so the readings count, not the samples. What wanders has a
    line with whatever else wanders: so either what the line leaves does not wander any more, or
    samples follow the clock in their changes from reading to reading.

    Args:
        times: of the samples in ns, shape (samples,).
        clocks: MHz over each, likewise; 0 or NaN where unknown.
    """
    known = clocks > 0
    if np.mean(known) < LEAST_KNOWN:
        return 0.0
    times, clocks = times[known], clocks[known]
    changes = np.flatnonzero(np.diff(clocks)) + 1
    if len(changes) + 1 < LEAST_READINGS:
        return 0.0
    slowness = float(np.median(clocks)) / clocks
    slope = float(np.polyfit(slowness, times, 1)[0] / np.median(times))
    if slope * float(np.std(slowness)) < LEAST_EFFECT or slope > MOST_SLOPE:
        return 0.0
    fit = float(np.corrcoef(slowness, times)[0, 1])
    # The error of a mean over a reading, not of a sample: one group for each reading.
    groups = np.split(np.arange(len(times)), changes)
    x = np.asarray([slowness[group].mean() for group in groups])
    y = np.asarray([np.median(times[group]) for group in groups])
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    # Of an autoregression: worth n (1 - r) / (1 + r) independent ones.
    lag = max(0.0, _correlation(rest[:-1], rest[1:]))
    ways = ((x, y, len(x) * (1 - lag) / (1 + lag)), (np.diff(x), np.diff(y), len(x) - 1.0))
    return fit**2 if any(_is_certain(*way) for way in ways) else 0.0


def _is_certain(x: np.ndarray, y: np.ndarray, worth: float) -> bool:
    """Whether a correlation is none by chance, of so many independent pairs."""
    if worth < LEAST_READINGS:
        return False
    found = _correlation(x, y)
    return found >= CERTAIN * float(np.sqrt(max(1e-12, 1 - found**2) / (worth - 2)))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else 0.0


class _Told(NamedTuple):
    """What is said of a clock that is held, or that moves for reasons that are not known."""

    title: str
    evidence: str
    confidence: Literal["high", "medium"]
    fix: str


def _holding(clock: _Clock, varies: float) -> _Told:
    what = "heat" if set(clock.names) & set(_THERMAL) else "the power limit"
    title = f"{what} holds the GPU's clock for {percent(clock.held)} of the time"
    evidence = f"{', '.join(clock.names)}: at {percent(clock.held)} of the samples"
    fix = (
        "Better cooling, where it is heat. A power limit is a property of the machine: an "
        "administrator can raise it, or lock a clock that can be kept, which makes steps even."
    )
    if varies < LEAST_VARIANCE:
        return _Told(title, evidence, "medium", fix)
    title += f", and makes {percent(varies)} of the variance"
    return _Told(title, evidence, "high", fix)


def _moving(clock: _Clock, varies: float) -> _Told:
    named = ", ".join((*clock.names, *(clock.others or ()))) or "no reason for it"
    return _Told(
        f"the GPU's clock moves, which makes {percent(varies)} of the variance",
        "NVML did not say why" if clock.others is None else f"NVML named {named}",
        "medium",
        "An administrator can lock a clock that the GPU can keep, which makes steps even. NVML may "
        "tell of a power limit later than it acts; a GPU that waits lowers its clock too.",
    )


def _finding(samples: Samples, clock: _Clock, varies: float, told: _Told) -> Finding:
    step = samples.median_ns / samples.group
    slower = 1 - clock.median_mhz / clock.highest_mhz if clock.highest_mhz else 0.0
    cost = round(max(slower * step, samples.excess_ns(clock.places)))
    at = f" (median {clock.median_mhz:.0f} MHz)" if clock.median_mhz else ""
    lines = [f"{told.evidence}{at}"]
    if clock.share:
        how = "counted over each sample" if clock.counted else "read now and then"
        lines.append(
            f"the clock ({how}) explains {percent(clock.share)} of the variance of the samples"
        )
    if len(clock.places):
        lines.append(f"{len(clock.places)} outliers fall on a lower clock")
    if clock.highest_mhz and slower:
        lines.append(
            f"the highest clock seen is {clock.highest_mhz:.0f} MHz; a step bound by arithmetic "
            f"would take {duration(slower * step)} less there"
        )
    return Finding(
        id=NAME,
        source="hardware contention",
        title=told.title,
        evidence=tuple(lines),
        slices=("gpu_kernel",),
        cost_ns=cost,
        recoverable_ns=(0, cost),
        variance_share=varies or None,
        confidence=told.confidence,
        fix=told.fix,
        check="`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER` during `steady explain WORKLOAD`",
        false_alarm="a step bound by memory hardly follows the clock of the multiprocessors.",
    )


def _heating(grown: Growth) -> Finding:
    cost = round(grown.last_ns - grown.first_ns)
    return Finding(
        id=NAME,
        source="hardware contention",
        title=f"steps get slower and slower: {duration(grown.first_ns)} at first, "
        f"{duration(grown.last_ns)} at the end, as when heat lowers the clock",
        evidence=(f"{grown.what}: rising over {grown.blocks} parts in a row", "no clock is known"),
        slices=("gpu_kernel",),
        cost_ns=cost,
        recoverable_ns=(0, cost),
        confidence="low",
        fix="Watch clocks and temperature over the run; where they do not fall, look for work "
        "that grows: a list, a cache or a history that each step goes through.",
        check="`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE`, or `steady explain WORKLOAD` on a "
        "machine that shows clocks",
        false_alarm="the inputs grow from step to step, or the program itself keeps growing.",
    )
