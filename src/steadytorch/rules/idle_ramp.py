"""Calls after a pause are slower."""

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
"""Over calls without a pause: an H200 replaying a CUDA graph was seen at 4 % after 10 ms and 9 %
after 100 ms, quiet repetitions within 1 %."""
LEAST_PAUSE_NS = 10_000_000
"""An idle stretch that counts as a pause of the program: the shortest that was tried there."""
CERTAIN = 0.01
"""Chance of so clear a difference between samples that do not differ."""
FEWEST = 5
"""Calls of either kind: the clearest difference among four and four is chance once in 70."""


@dataclass(frozen=True)
class _After:
    """Calls after one pause: medians in ns, and whether chance explains the difference."""

    pause_ms: float
    after_ns: float
    by_chance: bool


def rule(case: Case) -> Verdict:
    """What a pause costs, where the program pauses.

    The capture times calls after pauses and calls after calls, in turns. A finding needs a slower
    median, a difference that the rank test of Mann and Whitney (1947) does not put down to chance,
    and a program that does pause: one whose calls follow each other never pays for it. Pauses show
    as idle stretches in the trace, or are asked about (`asked` in the note).

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
    slow = [a for a in _after(probe) if a.after_ns > (1 + LEAST_SLOWDOWN) * steady]
    if slow and 0 < int(probe.get("rounds", 0)) < FEWEST:
        return _too_few(int(probe["rounds"]))
    slow = [a for a in slow if not a.by_chance]
    if not slow:
        return ()
    worst = max(slow, key=lambda after: after.after_ns)
    cost = round(worst.after_ns - steady)
    lines = [
        f"after {a.pause_ms:g} ms: {duration(a.after_ns)} at the median, "
        f"{percent(a.after_ns / steady - 1)} more than without a pause ({duration(steady)})"
        for a in slow
    ]
    if len(pauses):
        lines.append(
            f"{len(pauses)} stretches of {duration(float(np.median(pauses)))} without work in the "
            "profiled steps"
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
            fix="Where the latency of rare calls matters, keep the device awake with small work "
            "between them, batch requests, or have an administrator lock the clocks.",
            check="`steady explain WORKLOAD` again; compare calls after pauses",
            false_alarm="in production calls follow each other without pauses.",
        ),
    )


def _not_probed(case: Case, pauses: np.ndarray) -> Verdict:
    if case.trace is not None and not len(pauses):
        return ()
    return Abstention(
        NAME,
        "the program pauses, and what a call after a pause takes was not measured"
        if len(pauses)
        else "calls after pauses were not measured",
        "run `steady explain WORKLOAD`, which times calls after pauses",
    )


def _too_few(rounds: int) -> Abstention:
    return Abstention(
        NAME,
        f"calls after pauses look slower, but chance may explain it: there was time for {rounds}",
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
        return False
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(after, steady, alternative="greater").pvalue) > CERTAIN


def _pauses(case: Case) -> np.ndarray:
    """Lengths in ns of the long stretches within the steps in which the device does nothing."""
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
