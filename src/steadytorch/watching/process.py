"""Samples the other Python threads and the debugging modes of the watched process."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadytorch.findings.watched_steps import BusyThread, Setting, SteppedOptimizer

INTERVAL_NS = 250_000_000
"""Time in ns between two samples of the other threads."""
MOST_THREADS = 64
OURS = "steadytorch-"
"""Prefix of the names of steadytorch's own threads."""


class ProcessSampler:
    """Samples the other threads and the debugging modes of the watched process.

    The sampler is created in the watched thread at the first step.

    Args:
        device: `cpu` or a CUDA device.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._device, self._threads = device.partition(":")[0], torch.get_num_threads()
        self._torch: Any = torch
        self._watched = threading.get_native_id()
        self._began = time.perf_counter_ns(), run_and_wait_ns(self._watched)
        self._ended = self._began
        self._samples, self._modes = 0, Counter[str]()
        self._first: dict[int, int] = {}
        self._busy: dict[int, tuple[str, int]] = {}
        self._lines: dict[int, Counter[str]] = {}
        self._looked_ns = 0

    def look(self, line_of: Callable[[int], str]) -> None:
        """Take one sample.

        Args:
            line_of: names the line of the user's code that a thread is running; empty if none.
        """
        self._samples += 1
        self._modes.update(_modes(self._torch, self._device))
        now = time.perf_counter_ns()
        if now - self._looked_ns < INTERVAL_NS:
            return
        self._looked_ns = now
        for thread in threading.enumerate()[:MOST_THREADS]:
            number = thread.native_id
            if number is None or number == self._watched or thread.name.startswith(OURS):
                continue
            spent = run_and_wait_ns(number)
            if spent is None:
                continue
            first = self._first.setdefault(number, spent[0])
            self._busy[number] = thread.name, spent[0] - first
            if thread.ident is not None and (line := line_of(thread.ident)):
                self._lines.setdefault(number, Counter())[line] += 1

    def stop(self) -> None:
        """End the CPU accounting of the watched thread."""
        self._ended = time.perf_counter_ns(), run_and_wait_ns(self._watched)

    def setting(self, optimizers: Iterable[SteppedOptimizer]) -> Setting:
        """Settings of the process, its CPU shares and its busiest threads.

        Args:
            optimizers: the optimizers that stepped.
        """
        from steadytorch.findings.watched_steps import Setting

        elapsed = self._ended[0] - self._began[0]
        off_core, core_wait = self._account(elapsed)
        return Setting(
            device=self._device,
            threads=self._threads,
            cores=_cores(),
            optimizers=tuple(optimizers),
            modes=tuple((name, n / max(1, self._samples)) for name, n in self._modes.items()),
            off_core=off_core,
            core_wait=core_wait,
            others=tuple(self._others(elapsed)),
        )

    def _account(self, elapsed: int) -> tuple[float | None, float | None]:
        """Shares of elapsed time that the watched thread was blocked, and waited for a core."""
        began, ended = self._began[1], self._ended[1]
        if began is None or ended is None or elapsed <= 0:
            return None, None
        ran, waited = ((ended[place] - began[place]) / elapsed for place in range(2))
        return max(0.0, 1.0 - ran - waited), waited

    def _others(self, elapsed: int) -> list[BusyThread]:
        from steadytorch.findings.watched_steps import BusyThread

        found = []
        for number, (name, spent) in self._busy.items():
            seen = self._lines.get(number)
            line = seen.most_common(1)[0][0] if seen else ""
            found.append(BusyThread(name, spent / elapsed if elapsed > 0 else 0.0, line))
        return sorted(found, key=lambda each: -each.busy)[:3]


def run_and_wait_ns(thread: int) -> tuple[int, int] | None:
    """Times in ns that a thread has run and has waited for a CPU core; None if unknown.

    Source: "Scheduler Statistics", Linux documentation.
    """
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)


def core_wait_ns(thread: int) -> int:
    """Time in ns that a runnable thread waited for a CPU core; 0 if unknown."""
    found = run_and_wait_ns(thread)
    return 0 if found is None else found[1]


def _modes(torch: Any, device: str) -> list[str]:
    found = []
    if torch.is_anomaly_enabled():
        found.append("torch.autograd.set_detect_anomaly")
    if torch.autograd.profiler._is_profiler_enabled:
        found.append("torch.profiler")
    if device == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found.append("CUDA_LAUNCH_BLOCKING")
    return found


def _cores() -> int:
    """CPU cores for this process: the usable cores divided by the job's local processes."""
    from steadytorch.device.host import usable_logical_cores

    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_logical_cores() // max(1, int(beside) if beside.isdigit() else 1))
