"""Reads, validates and compares measurements saved as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.measure.race import ALPHA, LEAST_PROCESSES, POWER, TIE, verdict_of
from steadytorch.measure.statistics import detectable
from steadytorch.results.compare import CompareResult, Effect, Side
from steadytorch.results.measure import MeasureResult
from steadytorch.results.saved import content_of, decode, kind_of, named


class SavedMeasure(msgspec.Struct, frozen=True):
    """The parts of a saved measurement that a comparison needs.

    Attributes:
        workload: name of the workload.
        environment: facts about the device.
        process_medians_ns: median period of each complete process, or of all if none is complete.
    """

    workload: str
    environment: DeviceFacts
    process_medians_ns: tuple[float, ...]


def read_measure(path: Path) -> SavedMeasure:
    """Reads a result that `steady measure --json` saved.

    Raises:
        UsageError: the file is missing, not JSON, or of another kind or schema.
    """
    content = content_of(path)
    kind = kind_of(path, content)
    if kind != "measure":
        raise UsageError(
            f"{named(path)} holds a {kind!r} result: pass one from steady measure --json"
        )
    saved = decode(path, content, kind)
    result: MeasureResult = saved.result
    medians = tuple(process.period.median_ns for process in result.replicates)
    if not medians or not all(0 < median < float("inf") for median in medians):
        raise UsageError(f"{named(path)} holds invalid medians: {medians}; measure again")
    return SavedMeasure(saved.head.workload, saved.head.environment, medians)


def compare_files(a: str | Path, b: str | Path) -> tuple[CompareResult, DeviceFacts]:
    """Compares two results that `steady measure --json` saved.

    Returns:
        The comparison, and the machine that both were taken on.

    Raises:
        UsageError: a file holds no measurement, or they come from different machines.
    """
    first, second = read_measure(Path(a)), read_measure(Path(b))
    _must_match(first.environment, second.environment, (str(a), str(b)))
    sides = (str(a), first.process_medians_ns), (str(b), second.process_medians_ns)
    return compare_saved(*sides), first.environment


def _must_match(one: DeviceFacts, other: DeviceFacts, names: tuple[str, str]) -> None:
    for field in ("device", "name", "mig_profile", "cores_logical"):
        mine, yours = getattr(one, field), getattr(other, field)
        if mine != yours:
            raise UsageError(
                f"{names[0]} and {names[1]} come from different machines ({field} {mine!r} and "
                f"{yours!r}): measure both on one machine"
            )


def compare_saved(
    a: tuple[str, Sequence[float]], b: tuple[str, Sequence[float]], metric: str = "period"
) -> CompareResult:
    """Compares two saved measurements by the medians of their processes.

    Processes are the unit of replication. With fewer than three processes on a side there is no
    verdict, because variation between processes cannot be estimated.

    Args:
        a: name and median of each process in ns.
        b: the same for B.
        metric: the metric of the medians.
    """
    logs = [np.log(np.asarray(medians, dtype=np.float64)) for _, medians in (a, b)]
    fewest = min(map(len, logs))
    estimate = float(np.expm1(logs[1].mean() - logs[0].mean()))
    low = high = mde = None
    note, verdict = "", "undecided"
    if fewest < LEAST_PROCESSES:
        note = (
            f"{fewest} process{'es' if fewest > 1 else ''} on one side: too few to estimate the "
            "variation between processes; measure with --processes 5"
        )
    else:
        low, high = map(float, np.expm1(welch_interval(logs[0], logs[1], 1 - ALPHA)))
        _, error, freedom = _welch(logs[0], logs[1])
        mde = float(np.expm1(detectable(freedom, ALPHA, POWER) * error)) if error else 0.0
        verdict = verdict_of(low, high, TIE)
    effect = Effect(
        estimate=estimate,
        low=low,
        high=high,
        verdict=verdict,
        claim="process" if low is None else "machine",
        pairs=0,
        processes=fewest,
        mde=mde,
    )
    sides = [Side(name, float(np.median(medians))) for name, medians in (a, b)]
    return CompareResult.of(effect, a=sides[0], b=sides[1], metric=metric, note=note)


def welch_interval(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[float, float]:
    """Confidence interval of mean(b) - mean(a) for groups of unequal variance (Welch, 1947).

    Args:
        a: shape (n,), n >= 2.
        b: shape (m,), m >= 2.
        confidence: nominal coverage.
    """
    from scipy.special import stdtrit

    difference, error, freedom = _welch(a, b)
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * error if error else 0.0
    return difference - half, difference + half


def _welch(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Returns mean(b) - mean(a), its standard error and Welch's degrees of freedom."""
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    parts = errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1)
    freedom = sum(errors) ** 2 / parts if parts else float(len(a) + len(b) - 2)
    return float(b.mean() - a.mean()), sum(errors) ** 0.5, freedom
