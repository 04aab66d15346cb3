"""Measurement results. All times are in ns per iteration unless the field name says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steadytorch.results.shown import Shown


class Outlier(msgspec.Struct, frozen=True):
    """An outlier among the samples, with its cause.

    Attributes:
        index: its place in `samples_ns`.
        sample_ns: its duration.
        cause: the event seen at that time, or `unattributed`.
    """

    index: int
    sample_ns: int
    cause: str


class Variability(msgspec.Struct, frozen=True):
    """Variability of a series' steady part. Fields are fractions unless their names say otherwise.

    Attributes:
        cv: standard deviation over mean.
        robust_cv: 1.4826 MAD over median; equals `cv` for normal samples.
        iqr_over_median: interquartile range over median.
        p99_over_median: ratio; None if p99 is.
        jitter: median absolute change from sample to sample, over median.
        von_neumann: mean squared change over variance. 2 for independent samples, less if they are
            correlated; None for a constant series.
        drift_percent_per_minute: Theil-Sen slope against elapsed time; None below ten samples. A
            series shorter than a second says little about a minute.
        regimes: number of levels in the series.
        outliers_per_1000: outliers per thousand samples.
    """

    cv: float
    robust_cv: float
    iqr_over_median: float
    p99_over_median: float | None
    jitter: float
    von_neumann: float | None
    drift_percent_per_minute: float | None
    regimes: int
    outliers_per_1000: float


class Measurement(Shown, msgspec.Struct, frozen=True):
    """Timing samples of one series, with summary statistics.

    The summary statistics leave out the warm-up; `samples_ns` keeps every sample.

    Attributes:
        metric: `period` or `latency`; see `measure.sampler`.
        median_ns: the headline.
        median_ci_ns: 95 % interval of the median; None if the samples support none.
        why_no_ci: why there is no interval, else None.
        p90_ns: 90th percentile.
        p99_ns: 99th percentile; None below 1,000 effective samples.
        max_ns: the slowest sample.
        mean_ns: arithmetic mean, for throughput.
        cv: standard deviation over mean.
        p99_over_median: ratio; None if p99 is.
        samples_ns: every sample, in the order taken.
        p99_ci_ns: 95 % interval of p99; None if the samples support none.
        warmup_dropped: number of samples at the start that the summary leaves out.
        steady: whether the other samples stay at one level.
        why_unsteady: why not, else None.
        outliers: samples that stand out, with causes.
        variability: how the steady part varies.
    """

    metric: str
    median_ns: float
    median_ci_ns: tuple[float, float] | None
    why_no_ci: str | None
    p90_ns: float
    p99_ns: float | None
    max_ns: float
    mean_ns: float
    cv: float
    p99_over_median: float | None
    samples_ns: tuple[int, ...]
    p99_ci_ns: tuple[float, float] | None
    warmup_dropped: int
    steady: bool
    why_unsteady: str | None
    outliers: tuple[Outlier, ...]
    variability: Variability


class WarmUp(msgspec.Struct, frozen=True):
    """The warm-up of a step.

    Attributes:
        first_call_ns: synchronised latency of the very first call, which compiles.
        calls: number of calls in all.
        iteration_ns: median latency without the first call, a rough estimate.
        group: iterations per sample, so that a sample exceeds the clock's resolution.
    """

    first_call_ns: int
    calls: int
    iteration_ns: int
    group: int


class SetUp(msgspec.Struct, frozen=True):
    """The set-up cost of a candidate: time, warm-up and peak memory.

    Attributes:
        setup_s: seconds to apply it and make the first call, compilation included. Starting the
            process and loading the model are not counted.
        warm_up: its warm-up.
        peak_memory_bytes: peak up to the end of the warm-up, of device memory (CUDA) or of
            resident host memory (CPU).
    """

    setup_s: float
    warm_up: WarmUp
    peak_memory_bytes: int


class HostBlock(msgspec.Struct, frozen=True):
    """Activity of the host during a measurement; a field is None if it could not be observed.

    Attributes:
        enqueue_median_ns: time to enqueue an iteration; on the CPU, the iteration itself.
        overhead_ns: cost of the probe per iteration, measured on an empty step; None if the
            workload failed before.
        gc_collections: runs of Python's garbage collector.
        gc_ns: their total time.
        involuntary_switches: times a thread lost its core.
        major_faults: pages read from a disk.
        steal_ns: CPU time taken by other virtual machines, over all cores.
        recorder_share: CPU time of the recorder over the time recorded.
    """

    enqueue_median_ns: float
    overhead_ns: float | None
    gc_collections: int
    gc_ns: int
    involuntary_switches: int | None
    major_faults: int | None
    steal_ns: int | None
    recorder_share: float


class DeviceBlock(msgspec.Struct, frozen=True):
    """State of the GPU during a measurement; a field is None if it could not be observed.

    Attributes:
        sm_clock_mhz: median SM clock.
        power_watts: median power draw.
        clock_held_by: reasons that limited the clock at any tick.
        other_processes: most other processes with a context, seen at once.
        clock_difference: periods by the device's clock over those by the host's, minus one.
    """

    sm_clock_mhz: float | None
    power_watts: float | None
    clock_held_by: tuple[str, ...] | None
    other_processes: int | None
    clock_difference: float | None = None


class ProcessMeasurement(msgspec.Struct, frozen=True):
    """The measurement taken in one process.

    Attributes:
        period: end of an iteration to the end of the next.
        latency: call to finished result; None on the CPU, where it equals the period.
        set_up: how the workload was set up.
        resolved: whether the median was known well enough when the budget ended.
        host: the host meanwhile.
        device: the GPU meanwhile; None on the CPU.
        unknown: channel to the reason why it could not be observed.
        complete: whether the process ran to its end: not interrupted, no exception.
    """

    period: Measurement
    latency: Measurement | None
    set_up: SetUp
    resolved: bool
    host: HostBlock
    device: DeviceBlock | None
    unknown: dict[str, str]
    complete: bool = True


class MeasureResult(Measurement, frozen=True, kw_only=True):
    """A measurement over one or more processes; create it with `MeasureResult.of`.

    Median, interval, samples and outliers come from all processes. `host`, `device`, `unknown` and
    the other fields of `Measurement` come from the representative process.

    Attributes:
        host: the host during the representative process.
        device: the GPU during it; None on the CPU.
        unknown: channel to the reason why it could not be observed.
        claim: `machine` from three replicates on, else `process`.
        spread: standard deviation of the replicates' log medians; None for one replicate.
        failed: the exception that ended the measurement early, else None. Earlier samples are kept.
        interrupted: whether the user stopped it.
        processes: in the order taken; at least one.
    """

    host: HostBlock
    device: DeviceBlock | None
    unknown: dict[str, str]
    claim: str
    spread: float | None
    failed: str | None = None
    interrupted: bool = False
    processes: tuple[ProcessMeasurement, ...]

    @classmethod
    def of(
        cls,
        processes: Sequence[ProcessMeasurement],
        claim: str,
        median_ns: float,
        median_ci_ns: tuple[float, float] | None,
        spread: float | None,
        failed: str | None = None,
        interrupted: bool = False,
    ) -> MeasureResult:
        """Creates a result from the measurements of one or more processes.

        Args:
            processes: in the order taken; at least one.
            claim: `process` or `machine`.
            median_ns: of the replicate, or the geometric mean of the replicates' medians.
            median_ci_ns: 95 % interval: within the replicate, or by Student's t over the
                replicates' log medians; None if the samples support none.
            spread: standard deviation of the replicates' log medians; None for one replicate.
            failed: the exception that ended the measurement early.
            interrupted: whether the user stopped it.
        """
        shown = representative_of(processes)
        own = {name: getattr(shown.period, name) for name in Measurement.__struct_fields__}
        own |= {
            "median_ns": median_ns,
            "median_ci_ns": median_ci_ns,
            "samples_ns": tuple(t for each in processes for t in each.period.samples_ns),
            "outliers": _all_outliers(processes),
        }
        if median_ci_ns is not None:
            own["why_no_ci"] = None
        elif len(replicates_of(processes)) > 1:
            own["why_no_ci"] = "an interval over processes needs three of them"
        return cls(
            **own,
            host=shown.host,
            device=shown.device,
            unknown=shown.unknown,
            claim=claim,
            spread=spread,
            failed=failed,
            interrupted=interrupted,
            processes=tuple(processes),
        )

    @property
    def replicates(self) -> tuple[ProcessMeasurement, ...]:
        """The complete processes, or all processes if none is complete."""
        return replicates_of(self.processes)

    @property
    def representative(self) -> ProcessMeasurement:
        """The process whose median is the middle one of all replicates.

        Raises:
            LookupError: there are no processes, as a saved file may have it.
        """
        return representative_of(self.processes)


def replicates_of(processes: Sequence[ProcessMeasurement]) -> tuple[ProcessMeasurement, ...]:
    """The processes that ran to completion, or all processes if none did."""
    return tuple(each for each in processes if each.complete) or tuple(processes)


def representative_of(processes: Sequence[ProcessMeasurement]) -> ProcessMeasurement:
    """The process whose median is the middle one of all replicates."""
    ranked = sorted(replicates_of(processes), key=lambda process: process.period.median_ns)
    return ranked[(len(ranked) - 1) // 2]


def _all_outliers(processes: Sequence[ProcessMeasurement]) -> tuple[Outlier, ...]:
    """The outliers of all processes, with indices into the processes' concatenated samples."""
    found: list[Outlier] = []
    before = 0
    for process in processes:
        for each in process.period.outliers:
            found.append(Outlier(before + each.index, each.sample_ns, each.cause))
        before += len(process.period.samples_ns)
    return tuple(found)
