"""Repeated choices of engines, and their replay in fresh processes; used by `convolutions.py`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch.bench.bench_worker import PAYLOAD
from steadytorch.conv.choices import read_choices
from steadytorch.process.worker import Worker
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import create
from steadytorch.transforms.base import applied_in_order
from steadytorch.tune.conv import ConvReport, choose_engines
from steadytorch.workload import serialization
from steadytorch.workload.workload import Workload

DEADLINE_S = 300
REPLAYS = 3


class ReplayHandler:
    """A fresh process with a built model, timed to its first result."""

    def __init__(self, directory: Path) -> None:
        self._workload = serialization.load(directory / PAYLOAD).to("cuda")
        self._device = self._workload.device
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()

    def first(self, candidate: list[Any]) -> dict[str, Any]:
        """Time the import of the frontend, applying the candidate, and the first result."""
        from steadytorch.conv.executables import MISSES
        from steadytorch.conv.handles import handle
        from steadytorch.conv.module import engine_convolutions

        specs = msgspec.convert(candidate, list[TransformSpec])
        began = time.perf_counter()
        if any(each.name == "cudnn_engines" for each in specs):
            handle(self._device)
        start = time.perf_counter()
        with (
            torch.no_grad(),
            applied_in_order([create(each) for each in specs], self._workload) as made,
        ):
            applied = time.perf_counter()
            made.model(*self._workload.inputs)
            torch.cuda.synchronize()
            ready = time.perf_counter()
            made.model(*self._workload.inputs)
            torch.cuda.synchronize()
            found = engine_convolutions(made.model)
            return {
                "frontend_s": start - began,
                "applied_s": applied - start,
                "first_s": ready - applied,
                "second_s": time.perf_counter() - ready,
                "total_s": ready - start,
                "convolutions": len(found),
                "fell_back": dict(MISSES),
                "plans_ms": self._plans_ms(found),
            }

    def _plans_ms(self, convolutions: list[Any]) -> list[float]:
        """Time to make each distinct plan again, with its kernel already loaded."""
        from steadytorch.conv.choices import ATEN
        from steadytorch.conv.executables import EngineExecutable

        distinct = {
            (each.problem, each.choice.engine)
            for each in convolutions
            if each.problem
            and each.choice.engine != ATEN
            and str(each.choice) == each.choice.engine
        }
        taken = []
        for problem, engine in distinct:
            start = time.perf_counter()
            with contextlib.suppress(Exception):
                EngineExecutable(problem, engine, self._device)
                taken.append((time.perf_counter() - start) * 1e3)
        return taken


def replays(directory: Path, ours: Any, plain: Any) -> dict[str, Any]:
    """Alternate fresh processes that replay the engines and that run plain PyTorch."""
    found: dict[str, list[Any]] = {"engines": [], "plain": []}
    for number in range(REPLAYS):
        for name, candidate in (("engines", ours), ("plain", plain)):
            worker = Worker("engine_runs:ReplayHandler", directory, f"{name}-{number}")
            try:
                specs = msgspec.to_builtins(candidate)
                found[name].append(worker.call("first", DEADLINE_S, candidate=specs))
            finally:
                worker.close()
    return found


def repeats(
    workload: Workload, first: ConvReport, count: int, first_s: float, **asked: Any
) -> dict[str, Any]:
    """Choose again in further processes, each starting from the first choices."""
    known = read_choices(first.choices)
    found, seconds = [known], [first_s]
    for number in range(1, count):
        start = time.perf_counter()
        report = choose_engines(workload, incumbent=known, **asked)
        seconds.append(time.perf_counter() - start)
        found.append(read_choices(report.choices))
        print(f"choice {number + 1}: {seconds[-1]:.1f} s", flush=True)
    agree = [sum(each.get(key) == choice for key, choice in known.items()) for each in found]
    return {
        "distinct": len(known),
        "agree": agree,
        "seconds": seconds,
        "changed": {
            key: [str(each.get(key)) for each in found]
            for key, choice in known.items()
            if any(each.get(key) != choice for each in found)
        },
    }


def repeat_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    same = sum(count == found["distinct"] for count in found["agree"][1:])
    return [
        f"Chosen again {len(found['agree']) - 1} times from there on: {same} times the same for "
        f"all {found['distinct']} distinct convolutions (agreeing: "
        f"{', '.join(map(str, found['agree'][1:]))}), in {min(found['seconds'][1:]):.1f} to "
        f"{max(found['seconds'][1:]):.1f} s.",
        "",
    ]


def replay_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    ours, plain = found["engines"], found["plain"]

    def middle(runs: list[Any], field: str) -> float:
        return float(np.median([run[field] for run in runs]))

    total, imported = middle(ours, "total_s"), middle(ours, "frontend_s")
    count = ours[0]["convolutions"]
    per_plan = float(np.median([ms for run in ours for ms in run["plans_ms"]] or [np.nan]))
    return [
        f"Replayed in {len(ours)} fresh processes, from a built model to its first result: "
        f"{total:.2f} s ({1e3 * total / max(count, 1):.1f} ms for each of {count} convolutions), "
        f"of which {middle(ours, 'applied_s'):.2f} s for applying the transform; with importing "
        f"the frontend {total + imported:.2f} s. Plain PyTorch: {middle(plain, 'total_s'):.2f} s. "
        f"A plan by name, its kernel loaded: {per_plan:.2f} ms. Fell back to PyTorch: "
        f"{len(ours[0]['fell_back'])} convolutions.",
        "",
    ]
