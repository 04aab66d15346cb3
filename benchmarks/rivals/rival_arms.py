"""Options in separate worker processes, set up in parallel and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
"""Stages in which an arm waits for the reference; stages in which its set-up has ended."""
LOAD_S = 180.0


@dataclass
class Arm:
    """One option and its process.

    Attributes:
        option: its name.
        worker: its process.
        stage: load, prepare, prepared, check, ready or failed.
        failed: why it failed, or None.
        detail: end of its log or traceback.
        set_up: result of the set-up.
        typical_ns: period of an iteration, from a first block with nothing else running.
        blocks: blocks in order by metric, each a list of iterations in ns.
        alone: series by metric, timed after the others had ended.
        spans: start and end of its period blocks on the host's clock, in ns.
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
        """All samples in order, in ns."""
        return [t for block in self.blocks.get(metric, []) for t in block]

    def medians(self, metric: str) -> list[float]:
        """Medians of its blocks, in ns."""
        return [float(np.median(block)) for block in self.blocks.get(metric, [])]

    def reject(self, reason: str, detail: str = "") -> None:
        """Mark it as failed and end its process."""
        self.stage, self.failed, self.detail = "failed", reason, detail[-1500:]
        self.worker.kill()


def within(budget_s: float) -> str:
    """Name of ours as found by a further search, within a budget."""
    return f"{OURS} within {budget_s:.0f} s"


def start_all(
    plans: Mapping[str, str],
    options: Sequence[str],
    device: str,
    directory: Path,
    cap_s: float,
    tell: Callable[[str], None],
) -> list[Arm]:
    """Set up our plans and every option, in parallel on shared cores.

    Another process computes the float64 reference for their checks. What runs out of memory is set
    up once more, with nothing else being set up.

    Args:
        plans: file of each plan, by name.
        options: names of hand-written options.
        device: device to run on.
        directory: folder of the payload.
        cap_s: time limit of autotuned options in seconds; others get twice as much.
        tell: called with the outcome of each option.

    Raises:
        WorkerFault: the workload itself fails, so that there is no reference.
    """
    names = [*plans, *options]
    reference = Arm(REFERENCE, Worker(TUNING_HANDLER, directory, REFERENCE))

    def started(name: str, folder: str) -> Arm:
        environment = _environment(name, options, directory / f"cache-{folder}")
        return Arm(name, Worker(HANDLER, directory, folder, environment))

    def set_up(*unready: Arm) -> None:
        for arm in unready:
            arm.worker.send("load", device=device, ambient=ambient())
        _advance(unready, plans, cap_s, reference, tell)

    arms = [started(name, f"arm-{i}") for i, name in enumerate(names)]
    try:
        set_up(reference, *arms)
        reference.worker.kill()
        for i, arm in enumerate(arms):
            if arm.failed == Fault.OUT_OF_MEMORY:
                arms[i] = started(arm.option, f"arm-{i}-again")
                set_up(arms[i])
    except BaseException:
        for arm in arms:
            arm.worker.kill()
        raise
    finally:
        reference.worker.kill()
    return arms


def _advance(
    unready: Sequence[Arm],
    plans: Mapping[str, str],
    cap_s: float,
    reference: Arm,
    tell: Callable[[str], None],
) -> None:
    """Take arms through their stages until each is ready or has failed."""
    while waiting := [arm for arm in unready if arm.stage not in ENDED]:
        _wait(waiting)
        for arm in waiting:
            if _moved(arm, plans, cap_s, reference.stage == "ready") and arm.stage in ENDED:
                tell(f"{arm.option}: {arm.failed or _took(arm)}")
        if reference.failed is not None:
            raise WorkerFault(Fault.RAISED, reference.failed, reference.detail)


def _environment(name: str, options: Sequence[str], cache: Path) -> dict[str, str]:
    """Environment with the option's own compiler cache `cache` and its share of the cores."""
    cores = len(os.sched_getaffinity(0))
    compiled = sum(map(compiles, options)) + 1
    # Twice the number of cores, because compilers mostly wait.
    threads = cores // 2 if AUTOTUNED in name else 2 * cores // compiled
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, threads)),
    }


def _wait(waiting: Sequence[Arm]) -> None:
    asked = [arm.worker for arm in waiting if arm.stage != PREPARED]
    if asked:
        wait_any(asked, 0.25)


def _moved(arm: Arm, plans: Mapping[str, str], cap_s: float, has_reference: bool) -> bool:
    """Process the answer of an arm's worker and request its next stage."""
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
        _ask(arm, plans)
    elif arm.stage == "prepare":
        arm.stage = PREPARED
    else:
        _accept(arm, reply)
    return True


def _ask(arm: Arm, plans: Mapping[str, str]) -> None:
    """Send the first request to a loaded workload."""
    if arm.option == REFERENCE:
        arm.stage = REFERENCE
        arm.worker.send("reference", seed=0)
    else:
        arm.stage = "prepare"
        arm.worker.send("prepare", option=arm.option, plan=plans.get(arm.option))


def _accept(arm: Arm, reply: Any) -> None:
    """Process the last answer before an arm may be timed."""
    if arm.stage == "check":
        arm.set_up = msgspec.convert(reply, SetUp)
        if arm.set_up.fault is not None:
            arm.reject(arm.set_up.fault)
            return
    arm.stage = "ready"


def deadline(arm: Arm, cap_s: float) -> float:
    """Time limit of its stage in seconds."""
    if arm.stage != "prepare":
        return LOAD_S
    return cap_s if AUTOTUNED in arm.option else 2 * cap_s


def _took(arm: Arm) -> str:
    return "ready" if arm.set_up is None else f"ready, {arm.set_up.setup_s:.1f} s"
