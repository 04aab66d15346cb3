"""Python's garbage collector runs within steps."""

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
"""Of the time: what `steady tune` takes for a tie. Collections of the youngest objects happen all
the time and cost less."""
LEAST_VARIANCE = 0.05
"""Of the variance, where single collections stand out of the samples."""

_SLICE = {"gpu": "idle_gc", "cpu": "cpu_gc"}


def rule(case: Case) -> Verdict:
    """Pauses of the collector, by its own announcements (`gc.callbacks`, Python's documentation).

    In the unprofiled samples where there are some, since a profiler makes objects of its own; else
    in the trace. Collections that a GPU-bound step hides cost nothing.
    """
    samples = samples_of(case)
    if samples is not None:
        return _in_samples(samples)
    if case.ledger is not None and (cost := round(case.ledger.mean(_SLICE[case.ledger.kind]))):
        return _in_trace(case, cost)
    return Abstention(NAME, "runs of the garbage collector were not recorded", RECORD)


def _in_samples(samples: Samples) -> Verdict:
    recording = samples.recording
    starts = np.asarray(recording.gc_start_ns, dtype=np.int64)
    announced = np.asarray(recording.gc_duration_ns, dtype=np.int64)
    began = samples.starts_ns[0]
    within = (starts >= began) & (starts <= began + samples.elapsed_ns)
    lengths = _running(recording, starts, announced)
    spent = int(lengths[within].sum())
    share = spent / samples.elapsed_ns
    places = samples.caused_by(GARBAGE_COLLECTION)
    varies = samples.variance_share(places)
    own = 2 * spent >= int(announced[within].sum())  # and not the wait for a core, for the most
    stands_out = varies is not None and varies >= LEAST_VARIANCE
    if not own or not (stands_out or (samples.host_bound and share >= LEAST_SHARE)):
        return ()
    step = samples.median_ns / samples.group
    cost = round(spent / samples.steps if samples.host_bound else samples.excess_ns(places))
    by_generation = Counter(np.asarray(recording.gc_generation, dtype=np.int64)[within].tolist())
    counts = ", ".join(
        f"{count} of generation {generation}" for generation, count in sorted(by_generation.items())
    )
    evidence = [
        f"{many(int(within.sum()), 'collection')} in {many(samples.steps, 'step')}: {counts}",
        f"the longest took {duration(int(lengths[within].max()))}, "
        f"a step {duration(step)} at the median",
    ]
    if len(places):
        evidence.append(f"{many(len(places), 'outlier')} of the timing during a collection")
    return (_finding((), evidence, cost, share, varies),)


def _running(recording: Recording, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How long the collections ran: a thread that waits for a core meanwhile collects nothing."""
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
    evidence = [f"collections own {duration(cost)} of a step in the trace"]
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
        fix="Call gc.collect() and gc.freeze() once after set-up, so that collections skip what "
        "lives on; or collect by hand between steps, with gc.disable() during them. Reference "
        "cycles made in every step are best removed.",
        check="`steady explain WORKLOAD` again with gc.freeze() after set-up",
        false_alarm="objects that only the test makes (logging, metrics) are collected too.",
    )
