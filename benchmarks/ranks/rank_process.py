"""One rank of a fault run: a real process with a gloo group, and the fault it is to suffer."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from steadytorch.ranks import agreement
from steadytorch.ranks.agreement import Agreement, Ballot, Refusal, UncertainError
from steadytorch.ranks.group import Ranks, ranks_of

PLAN = b"plan " * 2000
DEADLINE_S = 3.0


@dataclass(frozen=True)
class Fault:
    """A fault at one step of the protocol.

    Attributes:
        rank: the rank that suffers it.
        kind: `kill` (this rank), `kill store`, `stop store`, `damage` (what it writes).
        step: what is written then: vote, answer, plan, or search, propose, serve, untouched.
        after: whether the write has happened.
    """

    rank: int
    kind: str
    step: str
    after: bool = False


@dataclass(frozen=True)
class Setting:
    """What the ranks of a run bring along.

    Attributes:
        size: number of ranks.
        choices: the plan of each rank; None for a miss.
        delays_s: seconds by which each rank is late.
        searches: whether the leader may search.
        problems: reason by rank that cannot build the plan.
        faults: faults of the run.
        deadline_s: the deadline.
        attempt: number of restarts before this run.
        backend: of the process group; `nccl` gives each rank a GPU of its own.
    """

    size: int
    choices: tuple[str | None, ...]
    delays_s: tuple[float, ...] = ()
    searches: bool = False
    problems: dict[int, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    deadline_s: float = DEADLINE_S
    attempt: int = 0
    backend: str = "gloo"


class FaultyStore:
    """A store that suffers a fault at the chosen step of this rank."""

    def __init__(self, store: Any, faults: tuple[Fault, ...], store_pid: int) -> None:
        self._store, self._faults, self._pid = store, list(faults), store_pid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        step = key.partition("/")[0]
        self._strike(step, after=False)
        self._store.set(key, self._damaged(step, value))
        self._strike(step, after=True)

    def compare_set(self, key: str, seen: str, value: str) -> Any:
        step = json.loads(value)["kind"]
        self._strike(step, after=False)
        found = self._store.compare_set(key, seen, self._damaged(step, value))
        self._strike(step, after=True)
        return found

    def _damaged(self, step: str, value: Any) -> Any:
        if any(f.kind == "damage" and f.step == step for f in self._faults):
            return value[: len(value) // 2] + (b"?" if isinstance(value, bytes) else "?")
        return value

    def _strike(self, step: str, after: bool) -> None:
        for fault in [f for f in self._faults if f.step == step and f.after is after]:
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "kill store":
                os.kill(self._pid, signal.SIGKILL)
            elif fault.kind == "stop store":
                os.kill(self._pid, signal.SIGSTOP)
            if fault.kind != "damage":
                self._faults.remove(fault)


def watch_stalls(stalls: Any, place: int) -> None:
    """Notes for how long this process did not run at most, in seconds, in its place of an array."""

    def watch() -> None:
        last = time.monotonic()
        while True:
            time.sleep(0.01)
            now = time.monotonic()
            stalls[place] = max(stalls[place], now - last - 0.01)
            last = now

    Thread(target=watch, daemon=True).start()


def run_rank(
    rank: int, setting: Setting, port: int, store_pid: int, folder: Path, stalls: Any
) -> None:
    """Joins the group, takes part in one agreement and writes the outcome to a file."""
    watch_stalls(stalls, rank)
    raw = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    if setting.backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        setting.backend,
        store=dist.PrefixStore(f"gloo/{setting.attempt}", raw),
        rank=rank,
        world_size=setting.size,
        timeout=timedelta(seconds=60),
    )
    ranks = ranks_of()
    assert ranks is not None
    dist.barrier()  # a rank is late only by the delay of its setting
    # As with torchrun, whose store keeps the keys of the runs before a restart.
    ranks = replace(ranks, store=raw, deadline_s=setting.deadline_s)
    faults = tuple(f for f in setting.faults if f.rank == rank)
    prefixed = agreement._with_prefix
    agreement._with_prefix = lambda store, prefix: FaultyStore(
        prefixed(store, prefix), faults, store_pid
    )
    # Outcomes go beside the store, since a fault may have taken it.
    result = _outcome(rank, setting, ranks)
    part = folder / f"{setting.attempt}.{rank}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"{setting.attempt}.{rank}.json")
    deadline = time.monotonic() + 60
    while not (folder / "end").exists() and time.monotonic() < deadline:
        time.sleep(0.005)  # a rank that leaves would close its gloo pairs
    os._exit(0)


def _outcome(rank: int, setting: Setting, ranks: Ranks) -> dict[str, Any]:
    choice = setting.choices[rank]
    payload = None if choice is None else choice.encode() + PLAN

    def search(gpus: tuple[str, ...]) -> tuple[str, bytes]:
        time.sleep(0.3)
        return "found", b"found" + PLAN

    ballot = Ballot("subject", {}, choice, payload, None, search if setting.searches else None)
    time.sleep(setting.delays_s[rank] if setting.delays_s else 0)
    one = Agreement(ranks)
    start = time.monotonic()
    answer = one.propose(ballot)
    waits = [time.monotonic() - start]
    if not isinstance(answer, Refusal):
        served = choice or ("found" if setting.searches else None)
        if answer is not None:
            served = answer.removesuffix(PLAN).decode()
        start = time.monotonic()
        try:
            answer = one.finish(setting.problems.get(rank))
        except UncertainError as error:
            return {"rank": rank, "outcome": "stopped", "reason": str(error), "waits_s": waits}
        finally:
            waits.append(time.monotonic() - start)
        if answer is None:
            return {"rank": rank, "outcome": f"serve {served}", "reason": "", "waits_s": waits}
    return {"rank": rank, "outcome": "untouched", "reason": answer.reason, "waits_s": waits}
