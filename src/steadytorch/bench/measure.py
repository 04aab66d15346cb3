"""Measures a workload in fresh processes: warm-up, uninterrupted sampling and telemetry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steadytorch import transforms
from steadytorch.bench.bench_worker import STOP, TAKEN, BrokenOff, save_payload
from steadytorch.bench.series import Series
from steadytorch.device.facts import resolve_device
from steadytorch.device.recording import COUNTERS, LEVELS, Recording, reasons
from steadytorch.errors import UsageError
from steadytorch.measure.measurement import summarize
from steadytorch.measure.race import LEAST_PROCESSES
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Fault, Worker, WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import Candidate
from steadytorch.results.measure import (
    DeviceBlock,
    HostBlock,
    MeasureResult,
    ProcessMeasurement,
    SetUp,
    replicates_of,
)
from steadytorch.workload.given import workload_of
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.bench.bench_worker:WorkloadHandler"
LATENCY_SHARE = 0.3
"""Share of the sampling time for latency, which is a separate series on CUDA."""
SETUP_S = 600.0
PATIENCE_S = 10.0
"""Timeout for the samples of an interrupted series; the worker checks twice a second."""


def measure(
    workload: Workload | tuple[Any, Any],
    *,
    processes: int = 1,
    budget: str | float = "20s",
    device: str | None = None,
    candidate: Candidate = (),
    progress: Callable[[str], None] = lambda message: None,
) -> MeasureResult:
    """Measures a workload in fresh processes, one after another.

    Ctrl-C ends the measurement early and keeps the samples taken so far.

    Args:
        workload: the workload or its `(model, inputs)`; not run in this process.
        processes: number of processes; three or more support a claim for the machine.
        budget: total sampling time, such as `20s`; start and warm-up come on top.
        device: where to run; None for the workload's device.
        candidate: transforms to apply; empty for untouched.
        progress: called with progress messages.

    Raises:
        UsageError: the workload fails before anything was timed, or an argument is wrong.
        KeyboardInterrupt: interrupted by the user before anything was timed.
    """
    if processes < 1:
        raise UsageError(f"cannot measure in {processes} processes: give 1 or more")
    seconds = parse_duration(budget) / processes
    workload = workload_of(workload)
    target = resolve_device(device or str(workload.device))
    done: list[ProcessMeasurement] = []
    failed, interrupted = None, False
    try:
        with shared_folder() as directory:
            save_payload(workload, directory)
            while len(done) < processes and failed is None and not interrupted:
                progress(f"process {len(done) + 1} of {processes}")
                worker, set_up = Worker(HANDLER, directory, f"measure-{len(done)}"), None
                try:
                    set_up = start(worker, target, candidate)
                    ask = partial(ask_series, worker, directory / STOP, set_up)
                    taken, failed, interrupted = one_process(ask, set_up, target, seconds)
                except WorkerFault as fault:
                    if done:
                        raise
                    taken, failed = (
                        _broken_off(worker, fault, target)
                        if set_up is None
                        else _left_behind(directory, set_up, fault, target)
                    )
                finally:
                    worker.kill()
                done.append(taken)
    except WorkerFault as fault:
        failed = fault.reason
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    if not done:
        raise UsageError(f"the workload fails: {failed}")
    return _together(tuple(done), failed, interrupted)


def _together(
    done: tuple[ProcessMeasurement, ...], failed: str | None, interrupted: bool
) -> MeasureResult:
    counted = replicates_of(done)
    logs = np.log([process.period.median_ns for process in counted])
    if len(counted) == 1:
        claim, interval = "process", counted[0].period.median_ci_ns
    elif len(counted) < LEAST_PROCESSES:
        claim, interval = "process", None
    else:
        claim, interval = "machine", t_interval(logs)
    return MeasureResult.of(
        done,
        claim=claim,
        median_ns=float(np.exp(logs.mean())),
        median_ci_ns=interval,
        spread=float(np.std(logs, ddof=1)) if len(counted) > 1 else None,
        failed=failed,
        interrupted=interrupted,
    )


def t_interval(logs: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the geometric mean of independent values, given their logarithms."""
    from scipy.stats import t

    half = t.ppf((1 + confidence) / 2, len(logs) - 1) * np.std(logs, ddof=1) / np.sqrt(len(logs))
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def start(worker: Worker, device: str, candidate: Candidate) -> SetUp:
    """Loads the payload in a worker, applies a candidate and warms it up.

    Raises:
        WorkerFault: the worker raised, died or timed out.
    """
    worker.call("load", SETUP_S, device=device, ambient=transforms.ambient())
    reply = worker.call("set_up", SETUP_S, candidate=msgspec.to_builtins(candidate))
    return msgspec.convert(reply, SetUp)


def one_process(
    ask: Callable[[str, float], Series], set_up: SetUp, device: str, seconds: float
) -> tuple[ProcessMeasurement, str | None, bool]:
    """Measures in one process; returns the measurement, failure or None, and an early-stop flag."""
    on_gpu = device.startswith("cuda")
    period = last = ask("period", seconds * (1.0 - LATENCY_SHARE if on_gpu else 1.0))
    if not period.durations_ns:
        raise WorkerFault(Fault.RAISED, period.failed or "no iteration finished")
    recording = msgspec.convert(period.recording, Recording)
    latency = None
    if on_gpu and period.failed is None and not period.stopped:
        last = ask("latency", LATENCY_SHARE * seconds)
        if last.durations_ns:
            latency = last.summary("latency")
    taken = ProcessMeasurement(
        period=period.summary("period"),
        latency=latency,
        set_up=set_up,
        resolved=period.resolved,
        host=host_block(
            np.median(period.host_ns or period.durations_ns), period.overhead_ns, recording
        ),
        device=_device(recording, period.clock_difference) if on_gpu else None,
        unknown=recording.unknown,
        complete=last.failed is None and not last.stopped,
    )
    return taken, last.failed, last.stopped


def ask_series(worker: Worker, stop: Path, set_up: SetUp, metric: str, seconds: float) -> Series:
    """Times a series of iterations in a worker.

    Ctrl-C creates the file `stop` and returns a partial series.
    """
    worker.send("series", metric=metric, seconds=seconds)
    try:
        reply = worker.receive(60.0 + 20.0 * (seconds + set_up.warm_up.iteration_ns * 1e-9))
    except KeyboardInterrupt:
        stop.touch()
        try:
            reply = worker.receive(PATIENCE_S)
        except WorkerFault:
            raise KeyboardInterrupt from None
    return msgspec.convert(reply, Series)


def _broken_off(worker: Worker, fault: WorkerFault, device: str) -> tuple[ProcessMeasurement, str]:
    """Recovers the samples of a process whose workload raised during warm-up.

    Raises:
        WorkerFault: there are none.
    """
    reply = worker.call("broken_off", PATIENCE_S) if fault.raised is not None else None
    if reply is None:
        raise fault
    broken = msgspec.convert(reply, BrokenOff)
    return _unrecorded(broken.series.durations_ns, "latency", broken.set_up, device), fault.reason


def _left_behind(
    directory: Path, set_up: SetUp, fault: WorkerFault, device: str
) -> tuple[ProcessMeasurement, str]:
    """Recovers the samples of a process that died during the timing of periods.

    Raises:
        WorkerFault: there are none.
    """
    kept = directory / TAKEN.format(metric="period")
    samples = kept.read_bytes() if kept.exists() else b""
    durations = np.frombuffer(samples[: len(samples) // 8 * 8], dtype=np.int64)
    if not len(durations):
        raise fault
    return _unrecorded(durations.tolist(), "period", set_up, device), fault.reason


def _unrecorded(
    durations_ns: list[int], metric: str, set_up: SetUp, device: str
) -> ProcessMeasurement:
    """Makes a measurement from samples that have no telemetry."""
    nothing = Recording(device=device.partition(":")[0], interval_ns=0)
    return ProcessMeasurement(
        period=summarize(durations_ns, metric),
        latency=None,
        set_up=set_up,
        resolved=False,
        host=host_block(np.median(durations_ns), None, nothing),
        device=None,
        unknown=dict.fromkeys((*COUNTERS, *LEVELS), "the workload failed and left no recording"),
        complete=False,
    )


def host_block(
    enqueue_ns: np.floating, overhead_ns: float | None, recording: Recording
) -> HostBlock:
    """Summarises a recording's host counters, the enqueue time and the probe's overhead."""

    def rise(column: tuple[int, ...] | None) -> int | None:
        return column[-1] - column[0] if column else None

    return HostBlock(
        enqueue_median_ns=float(enqueue_ns),
        overhead_ns=overhead_ns,
        gc_collections=len(recording.gc_start_ns) + recording.gc_dropped,
        gc_ns=sum(recording.gc_duration_ns) + recording.gc_dropped_ns,
        involuntary_switches=rise(recording.involuntary_switches),
        major_faults=rise(recording.major_faults),
        steal_ns=rise(recording.steal_ns),
        recorder_share=recording.cpu_share,
    )


def _device(recording: Recording, clock_difference: float | None) -> DeviceBlock:
    def middle(column: tuple[int, ...] | None, scale: float) -> float | None:
        return float(np.median(column)) * scale if column else None

    mask = recording.clock_event_mask
    held = None if mask is None else {name for m in set(mask) for name in reasons(m)}
    others = recording.other_gpu_processes
    return DeviceBlock(
        sm_clock_mhz=middle(recording.sm_clock_mhz, 1.0),
        power_watts=middle(recording.power_milliwatts, 1e-3),
        clock_held_by=None if held is None else tuple(sorted(held)),
        other_processes=max(others) if others else None,
        clock_difference=clock_difference,
    )
