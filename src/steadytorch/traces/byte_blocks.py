"""Read the bytes of a trace in blocks, gzipped or not, within limits."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import BinaryIO

import msgspec

from steadytorch.errors import TraceError

BLOCK = 4 << 20
"""Bytes read at a time. Larger blocks take more memory and are hardly faster."""

_GZIP = b"\x1f\x8b"
_GRACE = 64 << 20
"""Output that any file may inflate to, whatever its ratio."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a reader before it refuses a trace; bytes are those of the JSON text.

    Attributes:
        json_bytes: size of the whole file.
        ratio: JSON bytes per gzipped byte. Real traces have 10 to 50; a bomb of one repeated byte
            has 1,030, the maximum of deflate.
        events: rows; sorting takes about 150 bytes of memory each.
        top_bytes: size of the text before the events, and of the text after them.
    """

    json_bytes: int = 4 << 30
    ratio: int = 300
    events: int = 30_000_000
    top_bytes: int = 64 << 20


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        TraceError: the file is missing or unreadable, or is a directory, a pipe or a device.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would block until it has a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot open the trace {os.fspath(path)!r}: {why}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TraceError(f"not a file: {os.fspath(path)!r}; give the .json or .json.gz itself")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """The file's bytes, `BLOCK` at a time."""
    try:
        while block := file.read(BLOCK):
            yield block
    except OSError as error:
        raise TraceError(f"cannot read the trace: {error.strerror or error}") from None


def json_blocks(blocks: Iterator[bytes], limits: Limits) -> Iterator[bytes]:
    """Yield the JSON text in blocks, inflating gzip content whatever the file's name.

    Raises:
        TraceError: while iterating: a broken or endless gzip file, or more bytes than allowed.
    """
    first = next(blocks, b"")
    blocks = chain((first,), blocks)
    if first.startswith(_GZIP):
        blocks = _ahead(_inflated(blocks, limits))
    total = 0
    for block in blocks:
        total += len(block)
        if total > limits.json_bytes:
            raise TraceError(
                f"the trace has more than {limits.json_bytes:,} bytes of JSON, the limit: "
                "profile fewer steps (torch.profiler.schedule(active=...))",
                limits.json_bytes,
            )
        yield block


def _inflated(blocks: Iterator[bytes], limits: Limits) -> Iterator[bytes]:
    """Yield the content of all gzip members in blocks of at most `BLOCK` bytes."""
    taken = given = 0
    inflate = zlib.decompressobj(wbits=31)
    for block in blocks:
        taken += len(block)
        while block:
            try:
                out = inflate.decompress(block, BLOCK)
            except zlib.error as error:
                raise TraceError(f"the gzip file is damaged: {error}", given) from None
            given += len(out)
            if given > max(_GRACE, limits.ratio * taken):
                raise TraceError(
                    f"the gzip file inflates more than {limits.ratio}-fold, to over {given:,} "
                    "bytes; refused, since traces do not",
                    given,
                )
            yield out
            block = inflate.unconsumed_tail
            if inflate.eof:
                # Zeros after the end are padding; anything else is another member.
                block = inflate.unused_data.lstrip(b"\0")
                if block:
                    inflate = zlib.decompressobj(wbits=31)
    if not inflate.eof:
        raise TraceError(f"the gzip file is cut short after {given:,} bytes of JSON", given)


def _ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same blocks while a second thread prepares the next (zlib releases the GIL)."""
    with ThreadPoolExecutor(1, "inflate") as pool:
        pending = pool.submit(next, blocks, None)
        while (block := pending.result()) is not None:
            pending = pool.submit(next, blocks, None)
            yield block
