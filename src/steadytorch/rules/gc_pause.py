"""Find steps that Python's garbage collector delays."""

from __future__ import annotations

from collections import Counter

import numpy as np

from steadytorch.device.recording import Recording
from steadytorch.findings.figures import duration, many, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import step_ns
from steadytorch.findings.samples import RECORD, Samples, samples_of
from steadytorch.measure.causes import GARBAGE_COLLECTION

NAME = "gc-pause"
LEAST_SHARE = 0.005
"""Minimum share of the time: the tie threshold of `steady tune`. Collections of the youngest
generation happen constantly and cost less."""
LEAST_VARIANCE = 0.05
"""Minimum share of the variance, for collections that stand out as outliers."""
FEWEST_OUTLIERS = 2
"""Minimum outliers for the same: one long collection happens in any run."""

_SLICE = {"gpu": "idle_gc", "cpu": "cpu_gc"}


def rule(case: Case) -> Verdict:
    """Report garbage collector pauses, as recorded by `gc.callbacks` (Python documentation).

    Samples taken without the profiler are preferred, since a profiler creates objects itself; the
    trace is the fallback. Collections that a GPU-bound step hides cost nothing.
    """
    samples = samples_of(case)
    if samples is not None:
        return _in_samples(samples)
    if case.ledger is not None and (cost := round(case.ledger.mean(_SLICE[case.ledger.kind]))):
        return _in_trace(case, cost)
    return Abstention(NAME, "garbage collections were not recorded", RECORD)


def _in_samples(samples: Samples) -> Verdict:
    recording = samples.recording
    starts = np.asarray(recording.gc_start_ns, dtype=np.int64)
    announced = np.asarray(recording.gc_duration_ns, dtype=np.int64)
    began = samples.starts_ns[0]
    within = (starts >= began) & (starts <= began + samples.elapsed_ns)
    lengths = _running(recording, starts, announced)
    listed, listed_ns = int(within.sum()), int(announced[within].sum())
    count, total_ns = _all(samples, listed, listed_ns)
    # Dropped collections are shorter than most waits for a core.
    spent = int(lengths[within].sum()) + total_ns - listed_ns
    share = spent / samples.elapsed_ns
    places = samples.caused_by(GARBAGE_COLLECTION)
    varies = samples.variance_share(places)
    own = 2 * spent >= total_ns  # at least half is not waiting for a core
    stands_out = varies is not None and varies >= LEAST_VARIANCE and len(places) >= FEWEST_OUTLIERS
    if not own or not (stands_out or (samples.host_bound and share >= LEAST_SHARE)):
        return ()
    step = samples.median_ns / samples.group
    cost = round(spent / samples.steps if samples.host_bound else samples.excess_ns(places))
    evidence = [f"{many(count, 'collection')} in {many(samples.steps, 'step')}"]
    if listed:
        which = f"the longest {listed} are " if listed < count else ""
        evidence[0] += f": {which}{_by_generation(recording, within)}"
        evidence.append(
            f"the longest took {duration(int(lengths[within].max()))}; the median step takes "
            f"{duration(step)}"
        )
    if len(places):
        evidence.append(f"{many(len(places), 'outlier')} during a collection")
    return (_finding((), evidence, cost, share, varies),)


def _by_generation(recording: Recording, within: np.ndarray) -> str:
    generations = np.asarray(recording.gc_generation, dtype=np.int64)[within].tolist()
    return ", ".join(f"{n} of generation {old}" for old, n in sorted(Counter(generations).items()))


def _all(samples: Samples, listed: int, listed_ns: int) -> tuple[int, int]:
    """Number and time in ns of all collections during the samples.

    Short collections that the recorder dropped are in its counters, which are read at its ticks.

    Args:
        samples: the samples.
        listed: recorded collections during the samples.
        listed_ns: their time.
    """
    if not samples.recording.gc_dropped:
        return listed, listed_ns
    counted = [
        round((samples.rate(channel) or 0.0) * samples.elapsed_ns)
        for channel in ("collections", "collecting_ns")
    ]
    return max(listed, counted[0]), max(listed_ns, counted[1])


def _running(recording: Recording, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Running times of the collections in ns, without time spent waiting for a CPU core."""
    if recording.wait_ns is None:
        return lengths
    at, waited = (
        np.asarray(column, dtype=np.int64) for column in (recording.at_ns, recording.wait_ns)
    )
    meanwhile = np.interp(starts + lengths, at, waited) - np.interp(starts, at, waited)
    return lengths - np.minimum(lengths, meanwhile.astype(np.int64))


def _in_trace(case: Case, cost: int) -> Verdict:
    if case.ledger is None or (share := cost / step_ns(case.ledger)) < LEAST_SHARE:
        return ()
    name = _SLICE[case.ledger.kind]
    evidence = [f"collections take {duration(cost)} of a step in the trace"]
    return (_finding((name,), evidence, cost, share, variance_of(case, name)),)


def _finding(
    slices: tuple[str, ...], evidence: list[str], cost: int, share: float, varies: float | None
) -> Finding:
    return Finding(
        id=NAME,
        source="synchronisation",
        title=f"Python's garbage collector takes {percent(share)} of the time: "
        f"{duration(cost)} a step",
        evidence=tuple(evidence),
        slices=slices,
        cost_ns=cost,
        recoverable_ns=(0, cost),
        variance_share=varies,
        confidence="high",
        fix="Call gc.collect() and gc.freeze() once after set-up, so that collections skip "
        "long-lived objects. Or call gc.disable() and collect between steps. Remove reference "
        "cycles that each step creates.",
        check="run `steady explain WORKLOAD` again with gc.freeze() after set-up",
        false_alarm="only the test creates the collected objects (logging, metrics).",
    )
