"""Saved results: the file format that `--json` writes, and its strict decoder.

A saved file is one JSON object with `schema`, `kind`, the fields of `Head` and the result's fields.
"""

from __future__ import annotations

import datetime
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from steadytorch.errors import UsageError
from steadytorch.results.compare import CompareResult
from steadytorch.results.conv import ConvReport
from steadytorch.results.explain import Explanation
from steadytorch.results.gate import GateResult
from steadytorch.results.machine import CheckUp, DeviceFacts
from steadytorch.results.measure import MeasureResult
from steadytorch.results.ranks import RankComparison
from steadytorch.results.sweep import Sweep
from steadytorch.results.track import TrackResult
from steadytorch.results.tune import Replayed, Searched, TuneReport
from steadytorch.results.watched import Watched

SCHEMA = 1
"""Version of the JSON format."""
MOST_BYTES = 256 << 20
"""Largest file read. A measurement takes some 22 bytes a sample, so 256 MiB hold ten million
samples; decoding them takes less than 2 GiB of memory."""
FORMS: dict[str, Any] = {
    "compare": CompareResult,
    "conv": ConvReport,
    "doctor": CheckUp,
    "explain": Explanation,
    "gate": GateResult,
    "measure": MeasureResult,
    "ranks": RankComparison,
    "run": Watched,
    "sweep": Sweep,
    "track": TrackResult,
    "tune": TuneReport,
}
"""Kind of result to its struct."""

_SURROGATES = re.compile("[\ud800-\udfff]")
T = TypeVar("T")


class Head(msgspec.Struct, frozen=True):
    """The metadata that all saved results share.

    Attributes:
        workload: its name; empty for `doctor`.
        environment: the machine that the result comes from.
        created: time of writing, ISO 8601.
    """

    workload: str
    environment: DeviceFacts
    created: str


class Saved(NamedTuple):
    """A saved result, decoded."""

    kind: str
    head: Head
    result: Any


class _Format(msgspec.Struct):
    schema: int
    kind: str


class _Replay(msgspec.Struct):
    replayed: bool


def to_json(result: Any, workload: str, environment: DeviceFacts) -> bytes:
    """Encodes a result as the JSON content of a saved file.

    Args:
        result: a struct of `FORMS`.
        workload: its name; empty for `doctor`.
        environment: the machine that the result comes from.
    """
    (kind,) = (kind for kind, form in FORMS.items() if isinstance(result, form))
    head = {
        "schema": SCHEMA,
        "kind": kind,
        "workload": workload,
        "environment": msgspec.to_builtins(environment),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    document = head | msgspec.to_builtins(result)
    try:
        encoded = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a file name need not be UTF-8
        encoded = msgspec.json.encode(_encodable(document))
    return msgspec.json.format(encoded, indent=1) + b"\n"


def _encodable(value: Any) -> Any:
    """The value with each lone surrogate in its strings replaced by U+FFFD."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def content_of(path: Path) -> bytes:
    """Reads the bytes of a saved file; never blocks, for example on a named pipe.

    Raises:
        UsageError: the file is missing, unreadable, too large or not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        with open(descriptor, "rb") as file:
            content = file.read(MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise UsageError(f"{named(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:  # such as a name with a NUL
        raise UsageError(f"{named(path)} cannot be read: {error}") from error
    if content is None:
        raise UsageError(f"{named(path)} is not a regular file: pass one that --json wrote")
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{named(path)} exceeds {MOST_BYTES >> 20} MiB: measure with a smaller --budget"
        )
    return content


def kind_of(path: Path, content: bytes) -> str:
    """The `kind` field of a saved result; the value need not be a key of `FORMS`.

    Args:
        path: the source, for messages.
        content: of the file.

    Raises:
        UsageError: the content is not a result, or has another schema.
    """
    found = _decoded(path, content, _Format)
    if found.schema != SCHEMA:
        raise UsageError(f"{named(path)} has schema {found.schema}, this version reads {SCHEMA}")
    return found.kind


def decode(path: Path, content: bytes, kind: str) -> Saved:
    """Decodes a saved result.

    Args:
        path: the source, for messages.
        content: of the file.
        kind: its kind, one of `FORMS`.

    Raises:
        UsageError: the content is not JSON, or a field is missing or has another type.
    """
    head = _decoded(path, content, Head)
    form = FORMS[kind]
    if form is TuneReport:
        form = Replayed if _decoded(path, content, _Replay).replayed else Searched
    return Saved(kind, head, _decoded(path, content, form))


def _decoded(path: Path, content: bytes, form: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=form)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"{named(path)} is not a saved result: {error}; pass a file that this version wrote "
            "with --json"
        ) from error


def named(path: Path) -> str:
    """A path as one line of printable text, for messages."""
    return str(path) if str(path).isprintable() else repr(str(path))
