"""Cases for rules: a trace of synthetic events, or samples with a recording beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steadytorch.bench.series import Series
from steadytorch.device.recording import Recording
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.watched_steps import Setting, WatchedSteps
from steadytorch.ledger.ledger import build_ledger
from steadytorch.ledger.variability import variance_shares
from steadytorch.watching.clock import SLICES

from ..traces.recorded import kept
from ..traces.synthetic import (
    annotation,
    kernel,
    launch,
    memcpy,
    op,
    overhead,
    python,
    runtime,
    step,
    trace,
)

__all__ = [
    "annotation",
    "kept",
    "kernel",
    "launch",
    "memcpy",
    "never",
    "noise",
    "op",
    "overhead",
    "python",
    "runtime",
    "steadily",
    "step",
    "the",
    "timed",
    "trace",
    "traced",
    "watched",
]

MS = 1_000_000
US = 1_000
TICK = 15 * MS


def traced(events: Sequence[Any], **known: Any) -> Case:
    """A case of these events."""
    read = trace(list(events))
    ledger = build_ledger(read)
    return Case(trace=read, ledger=ledger, variance=variance_shares(read, ledger), **known)


def watched(
    lines: dict[str, Any] | None = None,
    *,
    setting: Setting | None = None,
    routine: float = 0.0,
    ranks: dict[int, dict[str, tuple[float, float]]] | None = None,
    contended: tuple[int, ...] = (),
    **times: Any,
) -> Case:
    """A case of 100 watched steps with 10 ms of forward, and these times in ns besides."""
    slices = {name: np.full(100, 0.0) for name in SLICES}
    slices["forward"] += 10 * MS
    for name, value in times.items():
        slices[name] = slices[name] + value
    steps = WatchedSteps(
        slices,
        lines or {},
        setting or Setting(),
        routine=routine,
        ranks=ranks or {},
        contended=contended,
    )
    return Case(watched=steps)


def timed(
    durations_ns: Sequence[float],
    *,
    device: str = "cuda",
    host_ns: Sequence[float] | None = None,
    gc: Sequence[tuple[int, int]] = (),
    unknown: dict[str, str] | None = None,
    clocks_mhz: Sequence[float] | None = None,
    **known: Any,
) -> Case:
    """A case of these consecutive samples from time zero, with a tick every 15 ms.

    Args:
        durations_ns: of the samples.
        device: of the recording.
        host_ns: enqueue times; none for latencies.
        gc: start and length of collections.
        unknown: channels that could not be observed.
        clocks_mhz: counted over each sample; None for not counted.
        known: channels by name, each a function of the ticks' times in ns (int64, shape (ticks,)),
            `cpus` and `gc_dropped` of the recording, and further fields of the case.
    """
    durations = np.asarray(durations_ns, dtype=np.int64)
    at = np.arange(0, int(durations.sum()) + 2 * TICK, TICK, dtype=np.int64)
    channels = {
        name: tuple(int(value) for value in np.broadcast_to(known.pop(name)(at), at.shape))
        for name in list(known)
        if name in Recording.__struct_fields__ and callable(known[name])
    }
    recording = Recording(
        device=device,
        interval_ns=TICK,
        at_ns=tuple(at.tolist()),
        gc_start_ns=tuple(start for start, _ in gc),
        gc_duration_ns=tuple(length for _, length in gc),
        gc_generation=(2,) * len(gc),
        gc_dropped=known.pop("gc_dropped", 0),
        unknown=unknown or {},
        cpus=known.pop("cpus", None),
        **channels,
    )
    series = Series(
        durations_ns=durations.tolist(),
        stretches=[(0, len(durations))],
        host_ns=[] if host_ns is None else np.asarray(host_ns, dtype=np.int64).tolist(),
        overhead_ns=0.0,
        group=1,
        resolved=True,
        recording=recording,
        clocks_mhz=None if clocks_mhz is None else list(clocks_mhz),
    )
    return Case(series=series, **known)


def noise(count: int, middle_ns: float = 3 * MS, spread: float = 0.004) -> np.ndarray:
    """Reproducible quiet samples, float64, shape (count,)."""
    return middle_ns * (1 + spread * np.random.default_rng(7).standard_normal(count))


def never(at: np.ndarray) -> np.ndarray:
    """A channel that stays at zero."""
    return np.zeros_like(at)


def steadily(per_second: float) -> Callable[[np.ndarray], np.ndarray]:
    """A counter that rises evenly, by this much a second."""
    return lambda at: (at * 1e-9 * per_second).astype(np.int64)


def the(verdict: Verdict) -> Finding:
    """The one finding of a verdict."""
    assert isinstance(verdict, Sequence), f"abstained: {verdict}"
    assert len(verdict) == 1
    finding = verdict[0]
    low, high = finding.recoverable_ns
    assert 0 <= low <= high
    assert finding.evidence
    assert all(finding.evidence)
    return finding
