"""Runs of the agreement between real processes, each with one fault; used by the tests too."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_process import DEADLINE_S, Fault, Setting, run_rank, watch_stalls

LATE_S = 2.0
"""Allowed wait past the deadline."""
STALLED_S = 1.0
"""A process that did not run for so long makes its run unfit to judge timeouts."""
HUNG_S = 90.0
STEPS = ("vote", "answer", "plan", "propose", "serve")
# Forked: starting eight interpreters with PyTorch takes half a minute of two cores.
PROCESSES = multiprocessing.get_context("fork")


def _all_hit(size: int, draw: random.Random) -> Setting:
    return Setting(size, ("a",) * size)


def _one_miss(size: int, draw: random.Random) -> Setting:
    missing = draw.randrange(size)
    return Setting(size, tuple(None if rank == missing else "a" for rank in range(size)))


def _all_miss(size: int, draw: random.Random) -> Setting:
    return Setting(size, (None,) * size, searches=draw.random() < 0.7)


def _different_plans(size: int, draw: random.Random) -> Setting:
    return Setting(size, (*(draw.choice(["a", "b", None]) for _ in range(size - 1)), "c"))


def _late(size: int, draw: random.Random) -> Setting:
    late, delay = draw.randrange(size), DEADLINE_S + draw.choice([-2.7, -0.2, 0.0, 0.2, 1.0])
    return replace(
        _one_miss(size, draw), delays_s=tuple(delay if r == late else 0.0 for r in range(size))
    )


def _cannot_build(size: int, draw: random.Random) -> Setting:
    return replace(_one_miss(size, draw), problems={draw.randrange(size): "out of memory"})


def _with_fault(kind: str, after: bool | None = None) -> Callable[[int, random.Random], Setting]:
    def setting(size: int, draw: random.Random) -> Setting:
        step = draw.choice(STEPS)
        # Only the leader decides, and only the lowest rank with a plan publishes it.
        rank = 0 if step in ("propose", "serve") else draw.randrange(size)
        choices = _one_miss(size, draw).choices
        if step == "plan":
            rank = next(r for r, choice in enumerate(choices) if choice)
        when = draw.random() < 0.5 if after is None else after
        return Setting(size, choices, faults=(Fault(rank, kind, step, when),))

    return setting


SCENARIOS: dict[str, Callable[[int, random.Random], Setting]] = {
    "all hit": _all_hit,
    "one miss": _one_miss,
    "all miss": _all_miss,
    "different plans": _different_plans,
    "late rank": _late,
    "cannot build": _cannot_build,
    "rank killed": _with_fault("kill"),
    "corrupt bytes": _with_fault("damage", after=False),
    "store killed": _with_fault("kill store"),
    "store stopped": _with_fault("stop store"),
    "elastic restart": _with_fault("kill"),
    "second start": _one_miss,
}


def run(scenario: str, size: int, seed: int, folder: Path, backend: str = "gloo") -> dict[str, Any]:
    """Runs one scenario.

    Args:
        scenario: a name of `SCENARIOS`.
        size: number of ranks.
        seed: seed of the run.
        folder: an empty folder of this run.
        backend: of the process group.

    Returns:
        The setting, the outcomes of the ranks that live, and what was wrong; empty if nothing was.
    """
    setting = SCENARIOS[scenario](size, random.Random(f"{scenario} {size} {seed}"))
    setting = replace(setting, backend=backend)
    receive, send = PROCESSES.Pipe(False)
    stalls = PROCESSES.RawArray("d", size + 1)
    store = PROCESSES.Process(target=_serve_store, args=(send, stalls), daemon=True)
    store.start()
    assert store.pid is not None
    try:
        port = receive.recv()
        settings = [setting]
        if scenario in ("elastic restart", "second start"):
            hits = ("a",) * size if scenario == "second start" else setting.choices
            settings.append(Setting(size, hits, attempt=1, backend=backend))
        attempts = [_attempt(each, port, store.pid, folder, stalls) for each in settings]
    finally:
        with suppress(ProcessLookupError):
            os.kill(store.pid, signal.SIGKILL)
        store.join()
    stall_s = max(stalls)
    wrong = [
        text
        for each, found in zip(settings, attempts, strict=True)
        for text in _wrong(each, found, stall_s)
    ]
    restarted = len(attempts) == 2 and stall_s < STALLED_S
    if restarted and {o["outcome"] for o in attempts[1]} != {"serve a"}:
        wrong.append("the second start does not serve the plan")
    return {
        "scenario": scenario,
        "size": size,
        "seed": seed,
        "faults": [vars(fault) for fault in setting.faults],
        "delays_s": setting.delays_s,
        "outcomes": [[o["outcome"] for o in found] for found in attempts],
        "reasons": sorted({o["reason"] for found in attempts for o in found if o["reason"]}),
        "longest_wait_s": max((w for f in attempts for o in f for w in o["waits_s"]), default=0.0),
        "total_wait_s": max((sum(o["waits_s"]) for f in attempts for o in f), default=0.0),
        "stall_s": stall_s,
        "wrong": wrong,
    }


def _wrong(setting: Setting, found: list[dict[str, Any]], stall_s: float) -> list[str]:
    wrong = []
    outcomes = {o["outcome"] for o in found} - {"stopped"}
    if len(outcomes) > 1:
        wrong.append(f"several outcomes: {sorted(outcomes)}")
    killed = {f.rank for f in setting.faults if f.kind == "kill"}
    missing = set(range(setting.size)) - {o["rank"] for o in found} - killed
    if missing:
        wrong.append(f"no outcome of ranks {sorted(missing)}")
    # A rank that does not run cannot return in time.
    most_s = setting.deadline_s + LATE_S + stall_s
    if any(wait > most_s for o in found for wait in o["waits_s"]):
        wrong.append("a wait past the deadline")
    if stall_s >= STALLED_S:
        return wrong
    if not setting.faults and not setting.delays_s and not setting.problems:
        expected = any(setting.choices) or setting.searches
        if any(o["outcome"].startswith("serve") is not expected for o in found):
            wrong.append(f"expected {'a plan' if expected else 'untouched'}")
    if any(o["outcome"] == "stopped" for o in found) and not _loses_store(setting):
        wrong.append("stopped although the store was there")
    return wrong


def _loses_store(setting: Setting) -> bool:
    """Whether the store goes, or holds a decision that cannot be read."""
    return any(
        f.kind.endswith("store") or (f.kind == "damage" and f.step in ("propose", "serve"))
        for f in setting.faults
    )


def _attempt(
    setting: Setting, port: int, store_pid: int, folder: Path, stalls: Any
) -> list[dict[str, Any]]:
    end = folder / "end"
    end.unlink(missing_ok=True)
    processes: list[BaseProcess] = [
        PROCESSES.Process(target=run_rank, args=(rank, setting, port, store_pid, folder, stalls))
        for rank in range(setting.size)
    ]
    for process in processes:
        process.start()
    limit = time.monotonic() + HUNG_S

    def path(rank: int) -> Path:
        return folder / f"{setting.attempt}.{rank}.json"

    def pending() -> bool:
        return any(p.is_alive() and not path(rank).exists() for rank, p in enumerate(processes))

    while pending() and time.monotonic() < limit:
        time.sleep(0.005)
    end.touch()
    for process in processes:
        process.join(max(0.1, min(5.0, limit - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    ranks = [rank for rank in range(setting.size) if path(rank).exists()]
    return [json.loads(path(rank).read_text()) for rank in ranks]


def _serve_store(send: Any, stalls: Any) -> None:
    watch_stalls(stalls, len(stalls) - 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send.send(store.port)
    signal.pause()
