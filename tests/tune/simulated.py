"""Searches on random workloads, with set-ups that overlap, on a simulated clock."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from scripted import MS, Act, NullListener, ScriptedWorker, Stage, workload

from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.tune import setup_scheduler
from steadytorch.tune.search import Search
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.setup_scheduler import SetupScheduler
from steadytorch.verification.verdict import OutputError

BF16 = TransformSpec("cast_weights", (("dtype", "bf16"),))
AUTOCAST = TransformSpec("autocast", (("dtype", "bf16"),))
LAYOUT, GRAPH, EAGER = map(TransformSpec, ("channels_last", "cuda_graph", "inference_mode"))
FOLD, BENCHMARK = TransformSpec("fold_batch_norm"), TransformSpec("cudnn_deterministic")
COMPILED = [
    TransformSpec("compile", (("mode", mode), ("freezing", freezing)))
    for mode, freezing in (("default", True), ("default", False), ("reduce-overhead", True))
]
ATTENTION = [
    TransformSpec("attention_backend", (("backend", name),)) for name in ("cudnn", "efficient")
]
AVAILABLE = [FOLD, BF16, LAYOUT, *COMPILED, *ATTENTION, EAGER, BENCHMARK, GRAPH]
RANGES = {
    "cast_weights": (0.45, 1.0),
    "autocast": (0.5, 1.05),
    "channels_last": (0.7, 1.15),
    "cuda_graph": (0.3, 0.98),
    "compile": (0.4, 0.95),
    "attention_backend": (0.97, 1.15),
    "inference_mode": (0.93, 1.0),
    "fold_batch_norm": (0.95, 1.02),
    "cudnn_deterministic": (0.98, 1.1),
    "compile_loss": (0.85, 1.02),
    "optimizer": (0.9, 1.02),
    "step_graph": (0.3, 0.98),
}
"""How many times as long an iteration takes with a transform."""
SECONDS = {"load": 4.0, "reference": 4.0, "explained": 3.0, "characterise": 1.0, "verify": 1.0}
"""What a worker takes for a request."""


class Machine(Stage):
    """A random workload on a random machine.

    Args:
        seed: draws both.
        compile_s: seconds to compile; None to draw them.
        inexact: transforms that change the outputs too much.
    """

    def __init__(
        self, seed: int, compile_s: float | None = None, inexact: Collection[TransformSpec] = ()
    ) -> None:
        super().__init__(regime=random.Random(seed).choice(["compute-bound", "launch-bound"]))
        self.seed, draw = seed, random.Random(seed)
        self.untouched_ns = MS * math.exp(draw.uniform(math.log(1), math.log(60)))
        drawn_s = draw.uniform(9, 35) * draw.lognormvariate(0, 0.3) * draw.choice([0.8, 1, 1, 2])
        self.compile_s = compile_s or drawn_s
        self.inexact = frozenset(inexact)

    def __call__(self, name: str, imports: Sequence[str] = ()) -> Any:
        self.workers.append(SimulatedWorker(self, name))
        return self.workers[-1]

    def act(self, candidate: Candidate) -> Act:
        if candidate not in self.acts:
            time_ns, setup_s = self.untouched_ns, 1.0
            for spec in candidate:
                draw = random.Random(f"{self.seed} {spec}")
                time_ns *= draw.uniform(*RANGES[spec.name])
                if spec.name == "compile":
                    setup_s += self.compile_s * draw.uniform(0.9, 1.2)
            if candidate:
                time_ns *= random.Random(f"{self.seed} {candidate}").uniform(0.97, 1.03)
            self.acts[candidate] = Act(time_ns, setup_s=setup_s)
            if self.inexact.intersection(candidate):
                self.acts[candidate].error = OutputError(1.0, 1.0)
        return self.acts[candidate]

    def wait_any(self, workers: Any, timeout_s: float) -> None:
        """Advances the clock to the next answer."""
        answers = [w.done_s for w in workers if w._pending and w.paused_s is None]
        self.seconds = max(self.seconds, min([self.seconds + timeout_s, *answers]))


class SimulatedWorker(ScriptedWorker):
    """Answers after as long as the work takes; paused time does not count."""

    done_s, paused_s = math.inf, None

    def send(self, method: str, **arguments: Any) -> None:
        super().send(method, **arguments)
        takes_s = SECONDS.get(method, 0.0)
        if method == "set_up":
            candidate = msgspec.convert(arguments["candidate"], list[TransformSpec])
            takes_s = self._stage.act(tuple(candidate)).setup_s
        self.done_s = self._stage.seconds + takes_s

    def receive(self, deadline_s: float) -> Any:
        if self.done_s > self._stage.seconds + deadline_s:
            self._stage.seconds += deadline_s
            self.kill()
            raise WorkerFault(Fault.DEADLINE, "no answer, killed")
        now = self._stage.seconds = max(self._stage.seconds, self.done_s)
        with mock.patch.object(self._stage, "seconds", now):
            reply = super().receive(deadline_s)
            after = self._stage.seconds
        # The clock has moved by the time of `send` already, except for blocks.
        self._stage.seconds = after if not self._is_scheduled else now
        return reply

    def ready(self) -> bool:
        return self._pending is not None and self._stage.seconds >= self.done_s

    def pause(self) -> None:
        self.paused_s = self._stage.seconds

    def resume(self) -> None:
        if self.paused_s is not None:
            self.done_s += self._stage.seconds - self.paused_s
            self.paused_s = None

    _is_scheduled = True

    def _block(self, metric: str, count: int) -> list[int]:
        self._is_scheduled = False
        return super()._block(metric, count)

    def _load(self, device: str, ambient: dict[str, str]) -> None:
        self._is_scheduled = True

    def _set_up(self, candidate: list[Any]) -> Any:
        self._is_scheduled = True
        return super()._set_up(candidate)


class Outcome(NamedTuple):
    """One search.

    Attributes:
        chosen_ns: time of an iteration with the plan.
        seconds: what the search took.
        compiled: whether the plan is compiled.
        ended: how the search says it ended.
    """

    chosen_ns: float
    seconds: float
    compiled: bool
    ended: str


def search(
    machine: Machine,
    budget_s: float,
    slots: int = 8,
    watcher: Any = None,
    available: Sequence[TransformSpec] = AVAILABLE,
    device: str = "cuda:0",
    pads: Any = bool,
    given: Any = None,
) -> Any:
    """Runs a search on a machine; returns its result."""
    options = SearchOptions(budget_s=budget_s, precision="bf16")
    watcher = watcher or NullListener()
    scheduler = SetupScheduler(
        machine, device, {}, options, watcher, spare_cores=slots >= 4, now=machine.now
    )
    with mock.patch.object(setup_scheduler, "wait_any", machine.wait_any):
        return Search(
            given or workload(),
            scheduler,
            available=available,
            not_applicable={},
            options=options,
            watcher=watcher,
            slots=slots,
            pads=pads,
            now=machine.now,
        ).run()


def outcome(seed: int, budget_s: float, slots: int = 8, compile_s: float | None = None) -> Outcome:
    """The plan of a search on a random machine."""
    machine = Machine(seed, compile_s)
    found = search(machine, budget_s, slots)
    chosen = machine.act(found.chosen)
    compiled = any(spec.name == "compile" for spec in found.chosen)
    return Outcome(chosen.time_ns, found.seconds, compiled, found.ended)
