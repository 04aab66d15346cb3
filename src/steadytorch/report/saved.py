"""Saved results, read with doubt: they come from anywhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.report.text import plain

SCHEMA = 1
"""Of the documents that this version writes and reads."""
MOST_BYTES = 256 << 20
"""A sample takes some 22 bytes in the file of a measurement, where it stands twice: this holds ten
million, and reading them takes less than 2 GiB of memory."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What results of all kinds have in common.

    Attributes:
        workload: its name; empty where there is none.
        environment: where it was taken.
        created: when, ISO 8601.
    """

    workload: str
    environment: DeviceFacts
    created: str


class _Head(msgspec.Struct):
    schema: int
    kind: str


def read_bytes(path: Path) -> bytes:
    """The content of a regular file of bounded size; a pipe or a device holds nobody up.

    Raises:
        UsageError: it is not there, may not be read, is too large or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{plain(path)} is no regular file: name one that --json wrote")
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{plain(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:  # such as a name with a NUL
        raise UsageError(f"{plain(path)} cannot be read: {error}") from error
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{plain(path)} has more than {MOST_BYTES >> 20} MiB: measure with a smaller --budget"
        )
    return content


def kind_of(path: Path, content: bytes) -> str:
    """Of which kind a result is.

    Raises:
        UsageError: it is no result, or one of another schema.
    """
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise not_a_result(path, error) from error
    if head.schema != SCHEMA:
        raise UsageError(f"{plain(path)} has schema {head.schema}, this version reads {SCHEMA}")
    return head.kind


def not_a_result(path: Path, error: Exception) -> UsageError:
    """The error for a file that is none, or of which something is missing or wrong."""
    return UsageError(
        f"{plain(path)} is not a saved result: {error}; name a file that --json wrote"
    )
