"""Options live side by side in processes of their own, all set up at once and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rival_options import AUTOTUNED, compiles
from rival_worker import SetUp

from steadytorch.bench.series import Series
from steadytorch.process.worker import Fault, Worker, WorkerFault, wait_any
from steadytorch.transforms import ambient
from steadytorch.tune.trial import HANDLER as TUNING_HANDLER

OURS, REFERENCE = "steadytorch", "reference"
HANDLER = "rival_worker:RivalHandler"
PREPARED, ENDED = "prepared", ("ready", "failed")
"""Stages: waits for the reference to be checked against; is set up or out of the running."""
LOAD_S = 180.0


@dataclass
class Arm:
    """One option and its process.

    Attributes:
        option: its name.
        worker: its process.
        stage: load, prepare, prepared, check, ready or failed.
        failed: why it is out of the running, None if it is not.
        detail: the end of its log or traceback.
        set_up: how it came to be ready.
        typical_ns: period of an iteration, from a first block while nothing else ran.
        blocks: per metric, its blocks in the order taken, each a list of iterations in ns.
        alone: per metric, a series from after the others had ended.
        spans: when its period blocks were under way, on the host's clock, in ns.
    """

    option: str
    worker: Worker
    stage: str = "load"
    failed: str | None = None
    detail: str = ""
    set_up: SetUp | None = None
    typical_ns: float = float("inf")
    blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    alone: dict[str, Series] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """Whether it can be timed."""
        return self.failed is None

    def samples(self, metric: str) -> list[int]:
        """All its samples in the order taken, in ns."""
        return [t for block in self.blocks.get(metric, []) for t in block]

    def medians(self, metric: str) -> list[float]:
        """Of its blocks, in ns."""
        return [float(np.median(block)) for block in self.blocks.get(metric, [])]

    def reject(self, reason: str, detail: str = "") -> None:
        """Takes it out of the running and ends its process."""
        self.stage, self.failed, self.detail = "failed", reason, detail[-1500:]
        self.worker.kill()


def start_all(
    plan: str | None,
    options: Sequence[str],
    device: str,
    directory: Path,
    cap_s: float,
    tell: Callable[[str], None],
) -> list[Arm]:
    """Sets up ours, if there is a plan, and every option; all at once, sharing the cores.

    Beside them another process makes the reference in float64 that all are checked against.

    Args:
        plan: file of the plan.
        options: names of hand-written options.
        device: where they run.
        directory: holds the payload.
        cap_s: seconds for what is autotuned; twice as many for all others.
        tell: is told what became of each.

    Raises:
        WorkerFault: there is no reference, because the workload itself fails.
    """
    names = [*([OURS] if plan is not None else []), *options]
    reference = Arm(REFERENCE, Worker(TUNING_HANDLER, directory, REFERENCE))
    arms = [
        Arm(name, Worker(HANDLER, directory, f"arm-{i}", _environment(name, options, directory)))
        for i, name in enumerate(names)
    ]
    try:
        for arm in (reference, *arms):
            arm.worker.send("load", device=device, ambient=ambient())
        while waiting := [arm for arm in (reference, *arms) if arm.stage not in ENDED]:
            _wait(waiting)
            for arm in waiting:
                if _moved(arm, plan, cap_s, reference.stage == "ready") and arm.stage in ENDED:
                    tell(f"{arm.option}: {arm.failed or _took(arm)}")
            if reference.failed is not None:
                raise WorkerFault(Fault.RAISED, reference.failed, reference.detail)
    except BaseException:
        for arm in arms:
            arm.worker.kill()
        raise
    finally:
        reference.worker.kill()
    return arms


def _environment(name: str, options: Sequence[str], directory: Path) -> dict[str, str]:
    """A compiler cache of the option's own, and its part of the cores."""
    cores = len(os.sched_getaffinity(0))
    compiled = sum(map(compiles, options)) + 1
    # Twice as many as there are cores: compilers wait for each other's results most of the time.
    threads = cores // 2 if AUTOTUNED in name else 2 * cores // compiled
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / f"cache-{name.replace(' ', '-')}"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, threads)),
    }


def _wait(waiting: Sequence[Arm]) -> None:
    asked = [arm.worker for arm in waiting if arm.stage != PREPARED]
    if asked:
        wait_any(asked, 0.25)


def _moved(arm: Arm, plan: str | None, cap_s: float, has_reference: bool) -> bool:
    """Takes what an arm's worker has answered, and asks for its next stage."""
    if arm.stage == PREPARED:
        if has_reference:
            arm.stage = "check"
            arm.worker.send("check")
        return False
    deadline_s = deadline(arm, cap_s)
    if not arm.worker.ready():
        if not arm.worker.overdue(deadline_s):
            return False
        arm.reject(f"> {deadline_s:.0f} s, not ready", arm.worker.log_tail())
        return True
    try:
        reply = arm.worker.receive(LOAD_S)
    except WorkerFault as fault:
        arm.reject(fault.reason, fault.detail)
        return True
    if arm.stage == "load":
        _ask(arm, plan)
    elif arm.stage == "prepare":
        arm.stage = PREPARED
    else:
        _accept(arm, reply)
    return True


def _ask(arm: Arm, plan: str | None) -> None:
    """The first request to a loaded workload."""
    if arm.option == REFERENCE:
        arm.stage = REFERENCE
        arm.worker.send("reference", seed=0)
    else:
        arm.stage = "prepare"
        ours = plan if arm.option == OURS else None
        arm.worker.send("prepare", option=arm.option, plan=ours)


def _accept(arm: Arm, reply: Any) -> None:
    """The last answer before an arm may be timed."""
    if arm.stage == "check":
        arm.set_up = msgspec.convert(reply, SetUp)
        if arm.set_up.fault is not None:
            arm.reject(arm.set_up.fault)
            return
    arm.stage = "ready"


def deadline(arm: Arm, cap_s: float) -> float:
    """Seconds that its stage may take."""
    if arm.stage != "prepare":
        return LOAD_S
    return cap_s if AUTOTUNED in arm.option else 2 * cap_s


def _took(arm: Arm) -> str:
    return "ready" if arm.set_up is None else f"ready, {arm.set_up.setup_s:.1f} s"
