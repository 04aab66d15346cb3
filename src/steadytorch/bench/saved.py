"""Reading saved results, validated on read, and comparing saved measurements."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from steadytorch.bench.verdict import CompareResult, Effect, Side
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.measure.race import ALPHA, LEAST_PROCESSES, POWER, TIE, verdict_of
from steadytorch.measure.statistics import detectable

SCHEMA = 1
"""Schema version of result files."""
MOST_BYTES = 256 << 20
"""Largest file read. Each sample takes about 22 bytes, so this holds ten million samples; reading
them takes less than 2 GiB of memory."""

T = TypeVar("T")


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


class _Period(msgspec.Struct):
    median_ns: float


class _Process(msgspec.Struct):
    period: _Period
    complete: bool = True


class _Head(msgspec.Struct):
    schema: int
    kind: str


class _Measure(msgspec.Struct):
    workload: str
    environment: DeviceFacts
    processes: list[_Process]


def _named(path: Path) -> str:
    """A path as printable text."""
    return str(path) if str(path).isprintable() else repr(str(path))


def content_of(path: Path) -> bytes:
    """The content of a result file; never blocks on a pipe or reads an oversized file whole.

    Raises:
        UsageError: the file is missing, unreadable, too large or not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        with open(descriptor, "rb") as file:
            content = file.read(MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise UsageError(f"{_named(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:  # such as a path with a NUL byte
        raise UsageError(f"{_named(path)} cannot be read: {error}") from error
    if content is None:
        raise UsageError(f"{_named(path)} is not a regular file: pass one that --json wrote")
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{_named(path)} exceeds {MOST_BYTES >> 20} MiB: measure with a smaller --budget"
        )
    return content


def kind_of(path: Path, content: bytes) -> str:
    """The kind of a result.

    Raises:
        UsageError: the content is not a result, or has another schema.
    """
    head = decoded(path, content, _Head)
    if head.schema != SCHEMA:
        raise UsageError(f"{_named(path)} has schema {head.schema}, this version reads {SCHEMA}")
    return head.kind


def decoded(path: Path, content: bytes, form: type[T]) -> T:
    """Decodes a result into a struct; other fields are ignored.

    Raises:
        UsageError: the content is not JSON, or a field is missing or has another type.
    """
    try:
        return msgspec.json.decode(content, type=form)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"{_named(path)} is not a saved result: {error}; pass a file that this version wrote "
            "with --json"
        ) from error


def read_measure(path: Path) -> SavedMeasure:
    """Reads what `steady measure --json` wrote.

    Raises:
        UsageError: the file is missing, not JSON, or of another kind or schema.
    """
    content = content_of(path)
    kind = kind_of(path, content)
    if kind != "measure":
        raise UsageError(
            f"{_named(path)} holds a {kind!r} result: pass one from steady measure --json"
        )
    saved = decoded(path, content, _Measure)
    whole = [process for process in saved.processes if process.complete] or saved.processes
    medians = tuple(process.period.median_ns for process in whole)
    if not medians or not all(0 < median < float("inf") for median in medians):
        raise UsageError(f"{_named(path)} holds invalid medians: {medians}; measure again")
    return SavedMeasure(saved.workload, saved.environment, medians)


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

    Processes are the unit of replication. With fewer than three on a side there is no verdict,
    because variation between processes cannot be estimated.

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
    return CompareResult(
        a=Side(a[0], float(np.median(a[1]))),
        b=Side(b[0], float(np.median(b[1]))),
        metric=metric,
        effect=Effect(
            estimate=estimate,
            low=low,
            high=high,
            verdict=verdict,
            claim="process" if low is None else "machine",
            pairs=0,
            processes=fewest,
            mde=mde,
        ),
        note=note,
    )


def welch_interval(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of mean(b) - mean(a) for groups of unequal variance (Welch, 1947).

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
    """mean(b) - mean(a), its standard error and the degrees of freedom."""
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    parts = errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1)
    freedom = sum(errors) ** 2 / parts if parts else float(len(a) + len(b) - 2)
    return float(b.mean() - a.mean()), sum(errors) ** 0.5, freedom
