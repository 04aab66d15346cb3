"""Capture data for the diagnosis rules: time a workload unprofiled, then profile it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steadytorch.bench.bench_worker import STOP, SetUp, save_payload
from steadytorch.bench.measure import ProcessMeasurement, ask_series, one_process, start
from steadytorch.bench.series import Series
from steadytorch.device.facts import parse_device
from steadytorch.device.recording import Recording
from steadytorch.device.telemetry import holds_context
from steadytorch.errors import SteadyError, UnsupportedError, UsageError
from steadytorch.explain.explain_worker import TRACE_FILE, Profiled
from steadytorch.findings.finding import Abstention
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.rates.device_rates import Rates
from steadytorch.results.candidate import Candidate
from steadytorch.traces.events import Trace
from steadytorch.traces.operands import DTYPES
from steadytorch.traces.reader import read_trace
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.explain.explain_worker:ExplainHandler"
MEASURED_SHARE = 0.65
PROFILED_SHARE = 0.2
PAUSED_SHARE = 0.15
"""Shares of the time budget for the measurement, the profiled steps, and pauses before calls."""
PAUSE_MS = (10, 100)
PAUSE_ROUNDS = 10
MOST_PAUSED_S = 3.0
FEWEST_ROUNDS = 6
"""Minimum rounds of a pause that the user asked for; chance can be ruled out from five on."""
PATIENCE_S = 300.0
"""Deadline for stages that take seconds, including profiles of a few large steps."""
ENVIRONMENT = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""Two profiles run in one process; with CUDA graphs, CUPTI must not be set up twice."""


@dataclass(frozen=True, eq=False)
class Capture:
    """Observations of a workload; a missing observation is None, with its reason in `gaps`.

    Attributes:
        measured: the unprofiled measurement.
        series: its periods, with the recording of the machine.
        trace: the profiled steps.
        profiled: how the profile went.
        rates: measured limits of the device.
        notes: other observations, by name:
            `threads`: number of threads of the process;
            `cudnn_benchmark`: whether that mode was on, between calls or by the candidate;
            `cudnn_benchmark_late`: whether it was on at the end, but off when convolutions ran in
                the warm-up;
            `clock_offset_ns`: offset from times of a recording to unix time, the clock of the
                trace;
            `profile_recording`: telemetry of the profiled steps;
            `compile_events`: frames whose compilation began in them (None: torch.compile not in
                use);
            `graph_breaks`: count of each reason, only if torch.compile was used;
            `pause_probe`: see `ExplainHandler.pauses`; its `asked` says whether calls come with
                these pauses;
            `own_contexts`: processes besides the worker that hold the GPU for this capture.
        gaps: stages that failed, as abstentions.
        failed: exception that ended the measurement early; None if none did.
        interrupted: whether the user stopped it.
    """

    measured: ProcessMeasurement
    series: Series
    trace: Trace | None = None
    profiled: Profiled | None = None
    rates: Rates | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    gaps: tuple[Abstention, ...] = ()
    failed: str | None = None
    interrupted: bool = False

    @property
    def distortion(self) -> float | None:
        """Slowdown by profiling: profiled over unprofiled median period; None if not profiled."""
        if self.profiled is None:
            return None
        return float(np.median(self.profiled.periods_ns)) / self.measured.period.median_ns


def capture(
    workload: Workload,
    *,
    device: str,
    seconds: float,
    steps: int,
    pause_s: float | None = None,
    candidate: Candidate = (),
    progress: Callable[[str], None] = lambda message: None,
) -> Capture:
    """Measure a workload in a fresh process, then profile steps of it in the same process.

    Ctrl-C ends the capture early and keeps the completed results. Ctrl-C before the measurement
    raises KeyboardInterrupt.

    Args:
        workload: the workload; it never runs in this process.
        device: where to run it, resolved.
        seconds: time budget, excluding start, warm-up and reading the trace.
        steps: maximum number of steps to profile.
        pause_s: time between calls in production. None means back-to-back calls; `PAUSE_MS` are
            then tried for information.
        candidate: transforms to apply.
        progress: receives progress messages.

    Raises:
        UsageError: the workload fails before anything was timed.
    """
    with shared_folder() as directory:
        save_payload(workload, directory)
        worker = Worker(HANDLER, directory, "explain", ENVIRONMENT)
        try:
            captor = _Captor(worker, directory, device, seconds, progress)
            return captor.run(candidate, steps, pause_s)
        except WorkerFault as fault:
            raise UsageError(f"the workload fails: {fault.reason}") from None
        finally:
            worker.kill()


def element_types(trace: Trace) -> list[str]:
    """Floating-point types of the operators' inputs, such as "float32", sorted by name."""
    kinds = {kind for inputs in trace.inputs for kind in inputs.get("types", ())}
    found = {DTYPES[kind] for kind in kinds if kind in DTYPES}
    return sorted(name for name in found if name.startswith(("float", "bfloat")))


class _Captor:
    """Runs all stages of one capture in one worker process.

    Args:
        worker: a fresh worker.
        directory: folder shared with it.
        device: where it runs.
        seconds: time budget of all stages.
        progress: receives progress messages.
    """

    def __init__(
        self,
        worker: Worker,
        directory: Path,
        device: str,
        seconds: float,
        progress: Callable[[str], None],
    ) -> None:
        self._worker, self._directory, self._device = worker, directory, device
        self._seconds, self._progress = seconds, progress
        self._taken: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}
        self._gaps: list[Abstention] = []

    def run(self, candidate: Candidate, steps: int, pause_s: float | None) -> Capture:
        """Run all stages; a failure after the measurement does not end the capture.

        Raises:
            WorkerFault: nothing was measured.
        """
        self._progress("measuring without the profiler")
        set_up = start(self._worker, self._device, candidate)
        measured, series, failed, interrupted = self._measure(set_up)
        if failed is None and not interrupted:
            try:
                self._look_closer(steps, pause_s)
            except KeyboardInterrupt:
                interrupted = True
        return Capture(
            measured=measured,
            series=series,
            notes=self._notes,
            gaps=tuple(self._gaps),
            failed=failed,
            interrupted=interrupted,
            **self._taken,
        )

    def _measure(self, set_up: SetUp) -> tuple[ProcessMeasurement, Series, str | None, bool]:
        series: list[Series] = []

        def ask(metric: str, seconds: float) -> Series:
            stop = self._directory / STOP
            series.append(ask_series(self._worker, stop, set_up, metric, seconds))
            return series[-1]

        seconds = MEASURED_SHARE * self._seconds
        measured, failed, interrupted = one_process(ask, set_up, self._device, seconds)
        return measured, series[0], failed, interrupted

    def _look_closer(self, steps: int, pause_s: float | None) -> None:
        kind, index = parse_device(self._device)
        if kind == "cuda":
            self._notes["own_contexts"] = int(holds_context(index))
        self._progress("calls after pauses")
        with self._stage("idle-ramp", "calls after pauses"):
            self._notes["pause_probe"] = self._pauses(pause_s)
        self._progress("profiling")
        with self._stage("profile", "profiled steps"):
            self._profile(steps)
        with self._stage("notes", "the state of the process"):
            self._notes |= self._worker.call("notes", PATIENCE_S)
        if "trace" in self._taken:
            self._progress("measuring the device's limits")
            with self._stage("roofline", "the device's limits"):
                self._taken["rates"] = self._rates()

    def _pauses(self, pause_s: float | None) -> dict[str, Any]:
        seconds = min(PAUSED_SHARE * self._seconds, MOST_PAUSED_S)
        pauses = PAUSE_MS if pause_s is None else (1e3 * pause_s,)
        if pause_s is not None:  # a requested pause may exceed the budget
            seconds = max(seconds, FEWEST_ROUNDS * pause_s)
        probe = self._worker.call(
            "pauses", PATIENCE_S, pause_ms=list(pauses), rounds=PAUSE_ROUNDS, seconds=seconds
        )
        return {**probe, "asked": pause_s is not None}

    def _profile(self, steps: int) -> None:
        seconds = PROFILED_SHARE * self._seconds
        reply = self._worker.call(
            "profile", PATIENCE_S + 20 * seconds, steps=steps, seconds=seconds
        )
        profiled = msgspec.convert(reply, Profiled)
        trace = read_trace(self._directory / TRACE_FILE)
        if self._device != "cpu" and not len(trace.on_gpu):
            raise UnsupportedError("the profiler recorded no GPU events")
        self._taken |= {"trace": trace, "profiled": profiled}
        self._notes["profile_recording"] = msgspec.convert(profiled.recording, Recording)
        self._notes["compile_events"] = profiled.compilations

    def _rates(self) -> Rates:
        dtypes = element_types(self._taken["trace"])
        reply = self._worker.call("rates", PATIENCE_S, device=self._device, dtypes=dtypes)
        return msgspec.convert(reply, Rates)

    @contextmanager
    def _stage(self, rule: str, what: str) -> Iterator[None]:
        """Run a stage whose failure is recorded as a gap instead of ending the capture."""
        try:
            yield
        except (WorkerFault, SteadyError) as error:
            why = f"{what} could not be captured: {error}"
            self._gaps.append(Abstention(rule, why, "fix the reported error and run it again"))
