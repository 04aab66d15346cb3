"""Saved results, read with doubt, and saved measurements against one another."""

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
"""Of the JSON objects that results are written as."""
MOST_BYTES = 256 << 20
"""A sample takes some 22 bytes in the file of a measurement, where it stands twice: this holds ten
million, and reading them takes less than 2 GiB of memory."""

T = TypeVar("T")


class SavedMeasure(msgspec.Struct, frozen=True):
    """What a comparison needs of a saved measurement.

    Attributes:
        workload: its name.
        environment: where it was taken.
        process_medians_ns: median of the period, per complete process, or of all where none is.
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
    """A path in one line, whatever it is called."""
    return str(path) if str(path).isprintable() else repr(str(path))


def content_of(path: Path) -> bytes:
    """The content of a result's file; one of another nature, or too large, holds nobody up.

    Raises:
        UsageError: it is not there, may not be read, is too large or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        with open(descriptor, "rb") as file:
            content = file.read(MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise UsageError(f"{_named(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:  # such as a name with a NUL
        raise UsageError(f"{_named(path)} cannot be read: {error}") from error
    if content is None:
        raise UsageError(f"{_named(path)} is no regular file: name one that --json wrote")
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{_named(path)} has more than {MOST_BYTES >> 20} MiB: measure with a smaller --budget"
        )
    return content


def kind_of(path: Path, content: bytes) -> str:
    """Of which kind a result is.

    Raises:
        UsageError: it is no result, or one of another schema.
    """
    head = decoded(path, content, _Head)
    if head.schema != SCHEMA:
        raise UsageError(f"{_named(path)} has schema {head.schema}, this version reads {SCHEMA}")
    return head.kind


def decoded(path: Path, content: bytes, form: type[T]) -> T:
    """What a result says, as far as a form asks for it.

    Raises:
        UsageError: it is not JSON, or something is missing or of another type.
    """
    try:
        return msgspec.json.decode(content, type=form)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"{_named(path)} is not a saved result: {error}; name a file that --json of this "
            "version wrote"
        ) from error


def read_measure(path: Path) -> SavedMeasure:
    """Reads what `steady measure --json` wrote.

    Raises:
        UsageError: it is not there, not JSON, or of another kind or schema.
    """
    content = content_of(path)
    kind = kind_of(path, content)
    if kind != "measure":
        raise UsageError(
            f"{_named(path)} holds a {kind!r} result: compare takes those of steady measure --json"
        )
    saved = decoded(path, content, _Measure)
    whole = [process for process in saved.processes if process.complete] or saved.processes
    medians = tuple(process.period.median_ns for process in whole)
    if not medians or not all(0 < median < float("inf") for median in medians):
        raise UsageError(f"{_named(path)} holds medians that are no times: {medians}")
    return SavedMeasure(saved.workload, saved.environment, medians)


def compare_files(a: str | Path, b: str | Path) -> tuple[CompareResult, DeviceFacts]:
    """Compares two results that `steady measure --json` saved.

    Returns:
        What they say, and the machine that both were taken on.

    Raises:
        UsageError: one of them holds no measurement, or they are of different machines.
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
                f"{names[0]} and {names[1]} are of different machines ({field} {mine!r} and "
                f"{yours!r}): a difference would say nothing about the workload"
            )


def compare_saved(
    a: tuple[str, Sequence[float]], b: tuple[str, Sequence[float]], metric: str = "period"
) -> CompareResult:
    """Compares two saved measurements by the medians of their processes.

    Processes are the unit of replication: with fewer than three on either side there is nothing to
    tell a difference between programs from one between processes, and no verdict is given.

    Args:
        a: name and median per process in ns.
        b: likewise.
        metric: what the medians are of.
    """
    logs = [np.log(np.asarray(medians, dtype=np.float64)) for _, medians in (a, b)]
    fewest = min(map(len, logs))
    estimate = float(np.expm1(logs[1].mean() - logs[0].mean()))
    low = high = mde = None
    note, verdict = "", "undecided"
    if fewest < LEAST_PROCESSES:
        note = (
            f"{fewest} process{'es' if fewest > 1 else ''} on one side: differences between "
            "processes cannot be told from those between programs; measure with --processes 5"
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
    """Interval of mean(b) - mean(a) for groups of unequal variance (B. Welch, 1947).

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
    """mean(b) - mean(a), its standard error, and the degrees of freedom of that."""
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    parts = errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1)
    freedom = sum(errors) ** 2 / parts if parts else float(len(a) + len(b) - 2)
    return float(b.mean() - a.mean()), sum(errors) ** 0.5, freedom
