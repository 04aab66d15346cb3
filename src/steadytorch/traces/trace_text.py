"""Reads the text of a trace from a plain or gzip file, and parses it into events."""

from __future__ import annotations

import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedIOBase, BytesIO
from typing import NamedTuple

import msgspec

from steadytorch.errors import TraceError
from steadytorch.traces.schema import RawEvent

MOST_BYTES = 2 << 30
"""Limit on the JSON text of a trace, which is held in memory; 1.4 million events take 0.7 GB."""

_BLOCK = 4 << 20
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
CHUNK = 20_000
"""Events decoded at a time; more take memory and are hardly faster."""
_POSITION = re.compile(r" \(byte (\d+)\)")
_TRUNCATED = "Input data was truncated"
_NOT_A_TRACE = (
    'JSON, but not a trace: it has no "traceEvents" list; give a file written by '
    "torch.profiler's export_chrome_trace"
)

_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_EVENTS = msgspec.json.Decoder(list[RawEvent])
_EVENT = msgspec.json.Decoder(RawEvent)


class TraceText(NamedTuple):
    """A parsed trace.

    Attributes:
        top: values beside the events, as JSON text by key.
        elements: JSON text of each element of `traceEvents`.
    """

    top: Mapping[str, msgspec.Raw]
    elements: list[msgspec.Raw]

    def events(self) -> Iterator[list[RawEvent]]:
        """Yield the events of a trace in chunks; elements that are not events are left out."""
        for start in range(0, len(self.elements), CHUNK):
            chunk = self.elements[start : start + CHUNK]
            try:
                yield _EVENTS.decode(b"[" + b",".join(map(bytes, chunk)) + b"]")
            except (msgspec.ValidationError, UnicodeDecodeError):
                yield list(_sound(chunk))


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the JSON text in a plain or gzip file; the format is detected by content.

    Args:
        path: a regular file.
        most_bytes: limit on the length of the text.

    Raises:
        TraceError: the file is missing, unreadable, not a regular file, a damaged or truncated gzip
            file, or larger than allowed.
    """
    try:
        # A pipe is refused before opening it, which would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TraceError(f"not a file: {os.fspath(path)!r}; give the .json or .json.gz itself")
        with open(path, "rb") as file:
            zipped = file.peek(len(_GZIP)).startswith(_GZIP)
            return _whole(gzip.GzipFile(fileobj=file) if zipped else file, most_bytes)
    except EOFError:
        raise TraceError("the gzip file is cut short") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"the gzip file is damaged: {error}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot open the trace {os.fspath(path)!r}: {why}") from None


def _whole(file: BufferedIOBase, most_bytes: int) -> bytes:
    text = BytesIO()
    while block := file.read(_BLOCK):
        text.write(block)
        if text.tell() > most_bytes:
            raise TraceError(
                f"the trace has more than {most_bytes:,} bytes of JSON, the limit: profile fewer "
                "steps (torch.profiler.schedule(active=...))"
            )
    return text.getvalue()


def parse(text: bytes) -> TraceText:
    """Parse the JSON text of a trace: an object with `traceEvents`, or a plain list of events.

    Raises:
        TraceError: not JSON, nested too deeply, or JSON of another kind.
    """
    text = text.removeprefix(_BOM)
    first = text.lstrip()[:1]
    if first not in (b"{", b"["):
        found = f"starts with {first!r}" if first else "is empty"
        raise TraceError(f"not JSON: the file {found}; give a trace of torch.profiler")
    try:
        top = _TOP.decode(text) if first == b"{" else {"traceEvents": msgspec.Raw(text)}
        return TraceText(top, _ELEMENTS.decode(top.pop("traceEvents")))
    except RecursionError:
        raise TraceError("not a trace: its JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"not JSON: {error.reason} of UTF-8") from None
    except (KeyError, msgspec.ValidationError):
        raise TraceError(_NOT_A_TRACE) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error), len(text)) from None


def _malformed(said: str, size: int) -> TraceError:
    if said == _TRUNCATED:
        return TraceError(f"the file is cut short: its JSON ends early, at byte {size:,}")
    position = _POSITION.search(said)
    why = _POSITION.sub("", said.removeprefix("JSON is malformed: "))
    if position is None:
        return TraceError(f"not JSON: {why}")
    return TraceError(f"not JSON at byte {int(position[1]):,}: {why}")


def _sound(elements: list[msgspec.Raw]) -> Iterator[RawEvent]:
    """Decode trace elements one by one, skipping elements that are not events."""
    for element in elements:
        try:
            yield _EVENT.decode(element)
        except (msgspec.ValidationError, UnicodeDecodeError):
            continue
