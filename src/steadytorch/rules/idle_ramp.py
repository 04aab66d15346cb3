"""Find calls that are slower after a pause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.traces.intervals import union
from steadytorch.traces.steps import HOST, gpu_rows

NAME = "idle-ramp"
LEAST_SLOWDOWN = 0.03
"""Minimum slowdown over calls without a pause. An H200 replaying a CUDA graph was 4 % slower
after 10 ms and 9 % after 100 ms; quiet repetitions agree within 1 %."""
LEAST_PAUSE_NS = 10_000_000
"""Minimum idle stretch that counts as a pause: the shortest that was tried there."""
CERTAIN = 0.01
"""Maximum p-value of the rank test."""
FEWEST = 5
"""Minimum calls of either kind: with four and four, the clearest difference is chance once in
70."""


@dataclass(frozen=True)
class _After:
    """Calls after pauses of one length: median time, and whether chance explains a slowdown."""

    pause_ms: float
    after_ns: float
    by_chance: bool


def rule(case: Case) -> Verdict:
    """Report how much longer a call takes after a pause, if the program pauses.

    The capture alternates between calls after pauses and back-to-back calls. A finding needs a
    slower median, a rank test (Mann and Whitney, 1947) that rules out chance, and a program that
    pauses. A program pauses if its trace has long idle stretches, or if the user asked about pauses
    (`asked` in the note). Pauses longer than any idle stretch count only if the user asked.

    Source: clocks fall while a GPU is idle ("gpu_idle" among the clock event reasons, NVML
    reference), and processors leave idle states late (Linux, "CPU Idle Time Management").
    """
    probe = (case.notes or {}).get("pause_probe")
    pauses = _pauses(case)
    if not isinstance(probe, Mapping) or not probe.get("after_ns"):
        return _not_probed(case, pauses)
    if not probe.get("asked") and not len(pauses):
        return ()
    steady = float(probe["steady_ns"])
    longest_ns = np.inf if probe.get("asked") else pauses.max()
    tried = [a for a in _after(probe) if a.pause_ms * 1e6 <= longest_ns]
    slow = [a for a in tried if a.after_ns > (1 + LEAST_SLOWDOWN) * steady]
    if slow and 0 < int(probe.get("rounds", 0)) < FEWEST:
        return _too_few(int(probe["rounds"]))
    slow = [a for a in slow if not a.by_chance]
    if not slow:
        return ()
    worst = max(slow, key=lambda after: after.after_ns)
    cost = round(worst.after_ns - steady)
    lines = [
        f"after {a.pause_ms:g} ms: median {duration(a.after_ns)}, "
        f"{percent(a.after_ns / steady - 1)} more than without a pause ({duration(steady)})"
        for a in slow
    ]
    if len(pauses):
        lines.append(
            f"{len(pauses)} idle stretches in the profiled steps, median "
            f"{duration(float(np.median(pauses)))}"
        )
    return (
        Finding(
            id=NAME,
            source="hardware contention",
            title=f"a call after a pause of {worst.pause_ms:g} ms takes "
            f"{percent(worst.after_ns / steady - 1)} longer",
            evidence=tuple(lines),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="medium",
            fix="If the latency of rare calls matters, keep the device busy with small work "
            "between them, batch requests, or have an administrator lock the clocks.",
            check="run `steady explain WORKLOAD` again and compare calls after pauses",
            false_alarm="in production, calls follow each other without pauses.",
        ),
    )


def _not_probed(case: Case, pauses: np.ndarray) -> Verdict:
    if case.trace is not None and not len(pauses):
        return ()
    return Abstention(
        NAME,
        "the program pauses, but calls after pauses were not measured"
        if len(pauses)
        else "calls after pauses were not measured",
        "run `steady explain WORKLOAD`, which times calls after pauses",
    )


def _too_few(rounds: int) -> Abstention:
    return Abstention(
        NAME,
        f"calls after pauses look slower, but only {rounds} of {FEWEST} rounds fit the budget",
        "run `steady explain WORKLOAD` with a larger --budget or a shorter --pause",
    )


def _after(probe: Mapping[str, Any]) -> list[_After]:
    pauses, medians = list(probe["pause_ms"]), list(probe["after_ns"])
    every = probe.get("after_samples_ns") or [None] * len(medians)
    steady = probe.get("steady_samples_ns") or ()
    return [
        _After(float(pause), float(median), _by_chance(taken, steady))
        for pause, median, taken in zip(pauses, medians, every, strict=True)
    ]


def _by_chance(after: Sequence[int] | None, steady: Sequence[int]) -> bool:
    if after is None or not len(after) or not len(steady):
        return True
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(after, steady, alternative="greater").pvalue) > CERTAIN


def _pauses(case: Case) -> np.ndarray:
    """Lengths in ns of the long idle stretches of the device during the profiled steps."""
    if case.trace is None or case.ledger is None or not case.ledger.steps:
        return np.empty(0, np.int64)
    events, ledger = case.trace.events, case.ledger
    rows = gpu_rows(case.trace, ledger.device) if ledger.kind == "gpu" else events.of(*HOST)
    busy = union(events.start_ns[rows], events.end_ns[rows])
    gaps = busy.start[1:] - busy.end[:-1]
    inside = (busy.end[:-1] >= ledger.steps[0].start_ns) & (
        busy.start[1:] <= ledger.steps[-1].end_ns
    )
    return gaps[inside & (gaps >= LEAST_PAUSE_NS)]
