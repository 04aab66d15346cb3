"""Find a GPU clock held down by its power limit or by heat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from steadytorch.device.recording import REASON_BITS, reasons
from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.growth import Growth, growth
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.measure.causes import CLOCK, POWER_CAP, THERMAL

NAME = "clock-throttled"
LEAST_HELD = 0.5
"""Minimum share of samples at which a held clock is the state of the run, not an episode."""
LEAST_EPISODE = 0.05
"""Minimum share of samples at which NVML's reason may explain the movement of a counted clock."""
LEAST_EFFECT = 0.0025
"""Minimum standard deviation that the clock adds to samples, over their median: half of a CV of
0.5 %, which counts as steady. It is taken over all samples, since a clock may fall rarely and
far."""
LEAST_READINGS = 10
"""Minimum distinct clock readings for relating samples to the clock."""
LEAST_KNOWN = 0.9
"""Minimum share of samples with a known clock for the same."""
HIGHEST = 0.99
"""Quantile of a counted clock taken as its highest. The maximum is inaccurate: the count over a
short sample errs more."""
MOST_SLOPE = 1.5
"""Maximum slope of relative time over the relative clock period. Clock-bound work has slope 1."""
CERTAIN = 4.0
"""Minimum correlation of time and clock period, in standard errors."""
LEAST_VARIANCE = 0.05

_THERMAL = ("thermal_slowdown", "hardware_thermal_slowdown")
_HOLDS = ("power_cap", "hardware_slowdown", "hardware_power_brake", *_THERMAL)
_MASK = sum(REASON_BITS[name] for name in _HOLDS)


@dataclass(frozen=True, eq=False)
class _Clock:
    """The GPU clock over the steady samples.

    Attributes:
        held: share of samples at which power or heat held it.
        names: reasons that held it.
        others: other reasons from NVML; None if not recorded.
        median_mhz: median clock; 0 if not recorded.
        highest_mhz: highest clock; 0 if not recorded.
        share: share of the samples' variance that the clock explains; 0 if none.
        counted: whether the clock was counted over each sample, not read periodically.
        places: outliers attributed to the clock.
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
    """Report a GPU clock that power or heat holds down, and step times that follow the clock.

    A constant clock limit costs time; an intermittent clock limit adds variance. Only power and
    heat limits count: an idle GPU, or a clock that a user set, is not throttling. The clock
    frequency comes from the GPU's cycle counter if available, else from NVML. Step times that
    follow the cycle counter's clock are reported whatever reason NVML gives. If no clock was
    recorded, steps that only get slower point to growing work. `growth` finds slowdowns of half
    and more, which heat seldom causes.

    Source: "NvmlClocksEventReasons", NVML API reference.
    """
    samples = samples_of(case)
    recorded = samples is not None and samples.column("clock_event_mask") is not None
    if samples is None or not (recorded or _is_counted(samples)):
        grown = growth(case)
        if grown is not None:
            traced_gpu = case.ledger is not None and case.ledger.kind == "gpu"
            on_gpu = traced_gpu if samples is None else samples.on_gpu
            return (_growing(grown, on_gpu),)
        return unrecorded(NAME, samples, "clock_event_mask", "the reason for clock limits")
    clock = _clock(samples)
    varies = samples.variance_share(clock.places) or 0.0
    varies = max(clock.share, varies)
    if clock.counted and clock.share >= LEAST_VARIANCE and clock.held < LEAST_EPISODE:
        return (_finding(samples, clock, varies, _moving(clock, varies)),)
    if not clock.held or (varies < LEAST_VARIANCE and clock.held < LEAST_HELD):
        return ()
    return (_finding(samples, clock, varies, _holding(clock, varies)),)


def _is_counted(samples: Samples) -> bool:
    """Whether the cycle counter gives the clock for enough samples (`LEAST_KNOWN`)."""
    clocks = samples.clocks_mhz
    return clocks is not None and bool(np.mean(clocks > 0) >= LEAST_KNOWN)


def _clock(samples: Samples) -> _Clock:
    masks = samples.level("clock_event_mask")
    seen = 0 if masks is None else int(np.bitwise_or.reduce(masks))
    counted = _is_counted(samples)
    clocks = samples.clocks_mhz if counted else samples.level("sm_clock_mhz")
    if clocks is None:
        clocks = np.zeros(len(samples.durations_ns))
    known = clocks[clocks > 0]  # excludes NaN
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
    """Share of the samples' variance that the clock explains; 0 if the fit may be chance.

    One clock reading spans several samples, so the significance test counts readings. Two drifting
    series always correlate. Therefore, either the fit's residuals must not drift, or changes of the
    times must follow changes of the clock between readings.

    Args:
        times: sample times in ns, shape (samples,).
        clocks: clock over each sample in MHz, same shape; 0 or NaN where unknown.
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
    # One group per reading: the error is that of a reading's mean, not of a sample.
    groups = np.split(np.arange(len(times)), changes)
    x = np.asarray([slowness[group].mean() for group in groups])
    y = np.asarray([np.median(times[group]) for group in groups])
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    # For an autoregression, n readings are worth n (1 - r) / (1 + r) independent ones.
    lag = max(0.0, _correlation(rest[:-1], rest[1:]))
    ways = ((x, y, len(x) * (1 - lag) / (1 + lag)), (np.diff(x), np.diff(y), len(x) - 1.0))
    return fit**2 if any(_is_certain(*way) for way in ways) else 0.0


def _is_certain(x: np.ndarray, y: np.ndarray, worth: float) -> bool:
    """Whether a correlation is significant, given `worth` independent pairs."""
    if worth < LEAST_READINGS:
        return False
    found = _correlation(x, y)
    return found >= CERTAIN * float(np.sqrt(max(1e-12, 1 - found**2) / (worth - 2)))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson correlation; 0 if one of the two series is constant."""
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else 0.0


class _Wording(NamedTuple):
    """Texts of the finding on a clock that is held down, or moves for an unknown reason."""

    title: str
    evidence: str
    confidence: Literal["high", "medium"]
    fix: str


def _holding(clock: _Clock, varies: float) -> _Wording:
    what = "heat" if set(clock.names) & set(_THERMAL) else "the power limit"
    title = f"{what} holds the GPU clock down for {percent(clock.held)} of the time"
    evidence = f"{', '.join(clock.names)} in {percent(clock.held)} of samples"
    fix = (
        "Against heat, improve cooling. A power limit belongs to the machine: an administrator "
        "can raise it, or lock a clock that the GPU can sustain, for even steps."
    )
    if varies < LEAST_VARIANCE:
        return _Wording(title, evidence, "medium", fix)
    title += f", causing {percent(varies)} of the variance"
    return _Wording(title, evidence, "high", fix)


def _moving(clock: _Clock, varies: float) -> _Wording:
    named = ", ".join((*clock.names, *(clock.others or ()))) or "no reason"
    return _Wording(
        f"the GPU clock moves, causing {percent(varies)} of the variance",
        "NVML's reason was not recorded" if clock.others is None else f"NVML reported {named}",
        "medium",
        "An administrator can lock a clock that the GPU can sustain, for even steps. NVML may "
        "report a power limit late, and an idle GPU also lowers its clock.",
    )


def _finding(samples: Samples, clock: _Clock, varies: float, wording: _Wording) -> Finding:
    step = samples.median_ns / samples.group
    slower = 1 - clock.median_mhz / clock.highest_mhz if clock.highest_mhz else 0.0
    cost = round(max(slower * step, samples.excess_ns(clock.places)))
    at = f" (median {clock.median_mhz:.0f} MHz)" if clock.median_mhz else ""
    lines = [f"{wording.evidence}{at}"]
    if clock.share:
        how = "counted over each sample" if clock.counted else "read periodically"
        lines.append(f"the clock ({how}) explains {percent(clock.share)} of the samples' variance")
    if len(clock.places):
        lines.append(f"{many(len(clock.places), 'outlier')} at a lower clock")
    if clock.highest_mhz and slower:
        lines.append(
            f"highest clock seen: {clock.highest_mhz:.0f} MHz; a compute-bound step would take "
            f"{duration(slower * step)} less at it"
        )
    return Finding(
        id=NAME,
        source="hardware contention",
        title=wording.title,
        evidence=tuple(lines),
        slices=("gpu_kernel",),
        cost_ns=cost,
        recoverable_ns=(0, cost),
        variance_share=varies or None,
        confidence=wording.confidence,
        fix=wording.fix,
        check="`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER` during `steady explain WORKLOAD`",
        false_alarm="the step is memory-bound: it hardly follows the SM clock.",
    )


def _growing(grown: Growth, on_gpu: bool) -> Finding:
    cost = round(grown.last_ns - grown.first_ns)
    evidence = [f"{grown.what}: rising over {grown.blocks} consecutive parts"]
    fix = (
        "Look for work that grows: a list, cache or history that each step traverses, a graph that "
        "is kept from step to step, or longer inputs. Growing memory is a sign of it."
    )
    check = "run `steady explain WORKLOAD` again: the step time stays level"
    if on_gpu:
        evidence.append("the clock was not recorded")
        fix += " If the work stays the same, watch the clock, which heat may lower."
        check += "; for the clock, `nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE`"
    return Finding(
        id=NAME,
        source="hardware contention",
        title=f"steps keep slowing down, from {duration(grown.first_ns)} to "
        f"{duration(grown.last_ns)}: the work may grow",
        evidence=tuple(evidence),
        slices=("gpu_kernel",) if on_gpu else (),
        cost_ns=cost,
        recoverable_ns=(0, cost),
        confidence="low",
        fix=fix,
        check=check,
        false_alarm="the work grows on purpose, as with a curriculum of longer inputs.",
    )
