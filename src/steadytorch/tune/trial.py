"""The trial of one candidate during a search, with its worker process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from steadytorch.bench.bench_worker import SetUp
from steadytorch.bench.ramp import LONG_NS
from steadytorch.measure.measurement import Measurement, summarize
from steadytorch.measure.statistics import order_interval
from steadytorch.plan.record import CompilerChoices, Trial
from steadytorch.process.fork_server import ForkServer
from steadytorch.process.worker import Fault, Worker, WorkerFault
from steadytorch.results.candidate import Candidate
from steadytorch.transforms import compiles
from steadytorch.transforms.precision import precision_of
from steadytorch.tune.search_server import HANDLER
from steadytorch.verification.verdict import Verification

CHOICES_S = 20.0
"""Timeout in seconds for reading the compiler's choices."""


class Launcher(Protocol):
    """Callable that starts a candidate's worker process; tests replace it."""

    def __call__(self, name: str, imports: Sequence[str] = ()) -> Worker:
        """Starts a worker that imports the modules in `imports` and logs under `name`."""
        ...


class WorkerLauncher:
    """Starts tuning workers for one search.

    Args:
        directory: private folder with the payload.
        memory_limit_bytes: host memory above which a worker is killed.
        environment: environment variables set in every worker.
        imports: modules that every worker imports at start.
        server: forks the workers. Forked workers share one address space layout, so pass None to
            sample the variation between processes.
    """

    def __init__(
        self,
        directory: Path,
        memory_limit_bytes: int | None,
        environment: Mapping[str, str],
        imports: Sequence[str] = (),
        server: ForkServer | None = None,
    ) -> None:
        self._directory = directory
        self._limit = memory_limit_bytes
        self._environment = environment
        self._imports = tuple(imports)
        self._server = server

    def __call__(self, name: str, imports: Sequence[str] = ()) -> Worker:
        """Starts a worker."""
        return Worker(
            HANDLER,
            self._directory,
            name,
            self._environment,
            self._limit,
            (*self._imports, *imports),
            server=self._server,
        )


class LiveTrial:
    """A candidate with its worker process and its timing samples.

    Attributes:
        candidate: the transforms.
        device: where the worker runs.
        precision: the candidate's precision class.
        status, reason: see `plan.record.Trial`.
        suggested_by: ids of the findings that suggest it.
        deadline_s: timeout in seconds for each stage of its set-up.
        began_s: when its set-up began on the search's clock, pauses left out.
        stage: starting, set-up, waiting (for the reference), verification or timing.
        inexact: whether it was rejected because its outputs differ too much.
        blocks: blocks in the order taken, each a list of iteration times in ns.
    """

    def __init__(
        self,
        candidate: Candidate,
        worker: Worker,
        suggested_by: tuple[str, ...] = (),
        deadline_s: float = math.inf,
        device: str = "",
    ) -> None:
        self.candidate, self.device = candidate, device
        self.deadline_s = deadline_s
        self.suggested_by = suggested_by
        self.precision = precision_of(candidate)
        self.worker = worker
        self.status = "ok"
        self.reason: str | None = None
        self.fault: Fault | None = None
        self.set_up: SetUp | None = None
        self.verification: Verification | None = None
        self.inexact = False
        self.blocks: list[list[int]] = []
        self.began_s = 0.0
        self._paused_s: float | None = None
        self.stage = "starting"

    @property
    def ok(self) -> bool:
        """Whether the trial has not failed or been rejected, and its worker is alive."""
        return self.status == "ok" and self.worker.alive

    @property
    def screened_ns(self) -> float:
        """Median of the block medians so far, in ns; inf without blocks."""
        return float(np.median(self._medians())) if self.blocks else float("inf")

    def measured(self, metric: str, since: int = 0) -> Measurement:
        """Summary of the samples of all blocks from number `since` on.

        If samples are too few or too correlated for a confidence interval of their median, uses the
        block medians' interval, extended to include the sample median.
        """
        found = summarize([t for block in self.blocks[since:] for t in block], metric)
        if found.median_ci_ns is not None:
            return found
        interval = order_interval(np.asarray(self._medians(since)))
        if interval is not None:
            low, high = interval
            interval = min(low, found.median_ns), max(high, found.median_ns)
        why = found.why_no_ci if interval is None else None
        return msgspec.structs.replace(found, median_ci_ns=interval, why_no_ci=why)

    def _medians(self, since: int = 0) -> list[float]:
        return [float(np.median(block)) for block in self.blocks[since:]]

    def block(self, metric: str, count: int, deadline_s: float) -> list[int]:
        """Times one block of iterations and stores the samples.

        Raises:
            WorkerFault: the worker died or timed out; the trial is rejected.
        """
        self.begin_block(metric, count)
        return self.finish_block(deadline_s)

    def quiet(self, metric: str, deadline_s: float) -> list[int]:
        """Times the first block while set-ups are paused: 5 iterations, or 2 if they are long.

        Raises:
            WorkerFault: see `block`.
        """
        assert self.set_up is not None
        long = self.set_up.warm_up.iteration_ns >= LONG_NS
        return self.block(metric, 2 if long else 5, deadline_s)

    def begin_block(self, metric: str, count: int) -> None:
        """Starts timing a block and returns at once; `finish_block` returns the samples."""
        self.worker.send("block", metric=metric, count=count)

    def finish_block(self, deadline_s: float) -> list[int]:
        """Waits for the block that `begin_block` started and stores its samples.

        Raises:
            WorkerFault: the worker died or timed out; the trial is rejected.
        """
        try:
            times = self.worker.receive(deadline_s)
        except WorkerFault as fault:
            self.reject(fault)
            raise
        self.blocks.append(times)
        return times

    def reject(self, why: WorkerFault | str) -> None:
        """Rejects the trial with a reason and kills its worker."""
        if isinstance(why, WorkerFault):
            self.fault = why.fault
            self.reason = why.reason if self.stage == "timing" else f"{self.stage}: {why.reason}"
            self.status = "failed" if why.fault is Fault.RAISED else "rejected"
        else:
            self.status, self.reason = "rejected", why
        self.worker.kill()

    def skip(self, why: str) -> None:
        """Gives up the trial, of which nothing is known, and kills its worker."""
        self.status, self.reason = "skipped", why
        self.worker.kill()

    def accept_set_up(self, reply: Any) -> None:
        """Stores the worker's set-up result."""
        self.set_up = msgspec.convert(reply, SetUp)

    def accept_verification(self, reply: Any) -> Verification:
        """Stores and returns the worker's verification result."""
        self.verification = msgspec.convert(reply, Verification)
        return self.verification

    def pause(self, now_s: float) -> None:
        """Pauses the worker during set-up; `now_s` is the time on the search's clock."""
        if self._paused_s is None:
            self._paused_s = now_s
            self.worker.pause()

    def resume(self, now_s: float) -> None:
        """Resumes a paused worker; `now_s` is the time on the search's clock."""
        if self._paused_s is not None:
            self.began_s += now_s - self._paused_s
            self._paused_s = None
            self.worker.resume()

    def compiler_choices(self) -> CompilerChoices:
        """Choices that PyTorch's compiler made by autotuning; empty on a CPU.

        Raises:
            WorkerFault: the worker cannot report the choices.
        """
        if not compiles(self.candidate) or not self.device.startswith("cuda"):
            return CompilerChoices()
        return msgspec.convert(self.worker.call("compiler_choices", CHOICES_S), CompilerChoices)

    def frozen(self, allowed: bool) -> Trial:
        """The trial as an immutable record."""
        error = self.verification.error if self.verification else None
        timed = self.measured("") if self.blocks else None
        return Trial(
            transforms=self.candidate,
            precision=self.precision,
            suggested_by=self.suggested_by,
            status=self.status,
            reason=self.reason,
            allowed=allowed,
            error=None if error is None else error.relative_l2,
            peak_memory_bytes=None if self.set_up is None else self.set_up.peak_memory_bytes,
            setup_s=None if self.set_up is None else self.set_up.setup_s,
            median_ns=None if timed is None else timed.median_ns,
            median_ci_ns=None if timed is None else timed.median_ci_ns,
            p90_ns=None if timed is None else timed.p90_ns,
            p99_ns=None if timed is None else timed.p99_ns,
            samples=0 if timed is None else len(timed.samples_ns),
        )
