"""Scripted workers on a fake clock: a whole search takes milliseconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from steadytorch.bench.bench_worker import SetUp
from steadytorch.bench.ramp import LONG_NS
from steadytorch.findings.finding import Finding
from steadytorch.measure.sampler import WarmUp
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.tune.search import Search
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.setup_scheduler import NullListener, SetupScheduler
from steadytorch.tune.tuning_worker import Character, Explained
from steadytorch.verification.verdict import OutputError, Reference, Verification
from steadytorch.workload.workload import Workload

MS = 1e6
OWN_ERROR = OutputError(1e-7, 1e-7)
FLOPS = 1_000_000
"""Operations in the profile of every scripted workload."""

EAGER = TransformSpec("inference_mode")
DETERMINISTIC = TransformSpec("cudnn_deterministic")
FOLD = TransformSpec("fold_batch_norm")
LAYOUT = TransformSpec("channels_last")
TF32 = TransformSpec("tf32")


def died(fault: Fault = Fault.SIGNAL, reason: str = "segmentation fault (SIGSEGV)") -> WorkerFault:
    return WorkerFault(fault, reason)


@dataclass
class Act:
    """Scripted behaviour of one candidate.

    Attributes:
        time_ns: time per iteration.
        error: error against the reference.
        wrong: fault found by verification.
        peak_bytes, setup_s: results of its set-up.
        faults: faults of successive calls by method, over all workers of this candidate; None for
            a call that succeeds.
        blocks_until_death: number of blocks after which it dies; None for never.
    """

    time_ns: float = 10 * MS
    error: OutputError = OWN_ERROR
    wrong: str | None = None
    peak_bytes: int = 100 << 20
    setup_s: float = 1.0
    faults: dict[str, list[WorkerFault | None]] = field(default_factory=dict)
    blocks_until_death: int | None = None


class Stage:
    """The clock, the script and all workers of a search.

    Args:
        acts: behaviour by candidate; the untouched workload is `()`.
        reference: reference of the untouched workload.
        spread: relative noise of a sample.
        findings: findings from profiling the untouched workload.
        interrupt_at: number of the exchange with a worker at which Ctrl-C is pressed.
        slowness: factor by device on all times.
        deaths: number of blocks by device after which its untouched workload dies.
    """

    def __init__(
        self,
        acts: Mapping[Candidate, Act] | None = None,
        *,
        reference: Reference | None = None,
        regime: str = "memory-bound",
        spread: float = 0.002,
        interrupt_at: int | None = None,
        findings: Sequence[Finding] = (),
        slowness: Mapping[str, float] | None = None,
        deaths: Mapping[str, int] | None = None,
    ) -> None:
        self.slowness, self.deaths = dict(slowness or {}), dict(deaths or {})
        self.placed: list[tuple[str, Candidate]] = []
        self.findings = tuple(findings)
        self.told_flops: int | None = None
        self.acts = dict(acts or {})
        self.reference = reference or Reference(OWN_ERROR, "float64", True, True)
        self.regime, self.spread, self.interrupt_at = regime, spread, interrupt_at
        self.seconds = 0.0
        self.exchanges = 0
        self.factor = 1.0
        self.workers: list[ScriptedWorker] = []
        self.events: list[tuple[str, Candidate]] = []
        self._random = random.Random(0)

    def __call__(self, name: str, imports: Sequence[str] = ()) -> Any:
        """Launches a worker."""
        self.workers.append(ScriptedWorker(self, name))
        return self.workers[-1]

    def now(self) -> float:
        return self.seconds

    def act(self, candidate: Candidate) -> Act:
        return self.acts.setdefault(candidate, Act())

    def exchange(self) -> None:
        self.exchanges += 1
        if self.exchanges == self.interrupt_at:
            raise KeyboardInterrupt

    def sample_ns(self, act: Act) -> int:
        noise = 1.0 + self.spread * self._random.gauss(0, 1)
        return max(1, round(act.time_ns * self.factor * noise))

    def tried(self) -> list[Candidate]:
        """Candidates in the order of their set-ups."""
        return [candidate for method, candidate in self.events if method == "set_up"]


class ScriptedWorker:
    """The interface of `process.worker.Worker`, answering from the script."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.name, self._stage = name, stage
        self.alive = True
        self.pid = 1_000_000 + len(stage.workers)
        self._candidate: Candidate = ()
        self._blocks, self.device = 0, ""
        self._pending: tuple[str, dict[str, Any]] | None = None

    def send(self, method: str, **arguments: Any) -> None:
        self._stage.exchange()
        self._pending = method, arguments

    def receive(self, deadline_s: float) -> Any:
        self._stage.exchange()
        assert self._pending is not None
        (method, arguments), self._pending = self._pending, None
        if not self.alive:
            raise died(Fault.EXIT, "process exited with status 1")
        if method == "set_up":
            self._candidate = tuple(msgspec.convert(arguments["candidate"], list[TransformSpec]))
        self._stage.events.append((method, self._candidate))
        try:
            self._meet_fault(method)
        except WorkerFault as fault:
            self.alive = fault.fault in (Fault.RAISED, Fault.OUT_OF_MEMORY)
            raise
        return getattr(self, f"_{method}")(**arguments)

    def call(self, method: str, deadline_s: float, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.receive(deadline_s)

    def ready(self) -> bool:
        return self._pending is not None

    def overdue(self, deadline_s: float) -> bool:
        return False

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.alive = False

    def log_tail(self, limit: int = 2000) -> str:
        return ""

    def _meet_fault(self, method: str) -> None:
        act = self._stage.act(self._candidate)
        waiting = act.faults.get(method)
        fault = waiting.pop(0) if waiting else None
        if fault is not None:
            raise fault
        if method == "block":
            deaths = {act.blocks_until_death}
            if not self._candidate:
                deaths.add(self._stage.deaths.get(self.device))
            if self._blocks in deaths:
                raise died()
            self._blocks += 1

    def _load(self, device: str, ambient: dict[str, str]) -> None:
        self.device = device
        self._stage.seconds += 1.0

    def _set_up(self, candidate: list[Any]) -> Any:
        act = self._stage.act(self._candidate)
        self._stage.seconds += act.setup_s
        self._stage.placed.append((self.device, self._candidate))
        warmed = WarmUp(int(act.setup_s * 1e9), 10, int(act.time_ns), 1)
        return msgspec.to_builtins(SetUp(act.setup_s, warmed, act.peak_bytes))

    def _reference(self, seed: int) -> Any:
        return msgspec.to_builtins(self._stage.reference)

    def _explained(self) -> Any:
        return msgspec.to_builtins(Explained(self._stage.findings, FLOPS))

    def _characterise(self, product_flops: int | None) -> Any:
        self._stage.told_flops = product_flops
        return msgspec.to_builtins(Character(self._stage.regime, 0.0, 0.1))

    def _verify(self) -> Any:
        act = self._stage.act(self._candidate)
        return msgspec.to_builtins(Verification(None if act.wrong else act.error, act.wrong))

    def _compiler_choices(self) -> Any:
        return {"kernels": {"ab/0123456789.best_config": {"XBLOCK": len(self._candidate)}}}

    def _block(self, metric: str, count: int) -> list[int]:
        act = self._stage.act(self._candidate)
        slowness = self._stage.slowness.get(self.device, 1.0)
        times = [round(slowness * self._stage.sample_ns(act)) for _ in range(count)]
        dropped = 2 * act.time_ns if act.time_ns < LONG_NS else 0.0
        self._stage.seconds += 1e-9 * (sum(times) + dropped)
        return times


class Elsewhere:
    """A worker outside any trial that answers after a number of polls.

    Args:
        looks: number of polls until the answer.
        answer: returned, or raised if it is a fault.
    """

    def __init__(self, looks: int, answer: Any) -> None:
        self._left, self._answer = looks, answer

    def ready(self) -> bool:
        self._left -= 1
        return self._left < 0

    def overdue(self, deadline_s: float) -> bool:
        return False

    def receive(self, deadline_s: float) -> Any:
        if isinstance(self._answer, WorkerFault):
            raise self._answer
        return self._answer


class Notes(NullListener):
    """A listener that records its calls and calls back at each new phase."""

    def __init__(self, at_phase: Callable[[str], None] = lambda message: None) -> None:
        self.phases: list[str] = []
        self.timings: dict[str, float] = {}
        self._at_phase = at_phase

    def phase(self, message: str) -> None:
        self.phases.append(message)
        self._at_phase(message)

    def timed(self, label: str, median_ns: float) -> None:
        self.timings[label] = median_ns


def workload() -> Workload:
    return Workload(nn.Linear(2, 2), torch.zeros(1, 2), name="tiny")


def make_search(
    stage: Stage,
    available: list[TransformSpec],
    options: SearchOptions | None = None,
    watcher: Any = None,
    slots: int = 2,
    choose_engines: Any = None,
    pads: Any = bool,
    device: str = "cpu",
    others: Sequence[str] = (),
    of: Workload | None = None,
) -> Search:
    """A search whose workers are the stage's."""
    options, watcher = options or SearchOptions(), watcher or NullListener()
    scheduler = SetupScheduler(stage, device, {}, options, watcher, now=stage.now, others=others)
    return Search(
        of or workload(),
        scheduler,
        available=available,
        not_applicable={"cuda_graph": "no CUDA device"},
        options=options,
        watcher=watcher,
        slots=slots,
        choose_engines=choose_engines,
        pads=pads,
        now=stage.now,
    )
