"""Parse the text of a trace into events, a few megabytes at a time, and locate errors by byte.

A cut position is guessed, and the decoder confirms it: `[` + text + `]` is JSON only if the text
ends between two events. Likewise `{...,"traceEvents":[` + `]}` is JSON only if that key is at the
top level.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from steadytorch.errors import TraceError
from steadytorch.traces.byte_blocks import BLOCK
from steadytorch.traces.json_repair import mend
from steadytorch.traces.schema import RawEvent

_EVENTS = msgspec.json.Decoder(list[RawEvent])
_EVENT = msgspec.json.Decoder(RawEvent)
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])

_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*(,)\s*\{")
_REACH = 64 << 10
"""Bytes before the end of the text that are searched for a cut first."""
_GUESSES = 4
_LONGEST = 8 << 20
"""Maximum bytes of one event; those of real traces have a few thousand."""
_NESTED = 8
"""Maximum `traceEvents` keys examined in a block; each costs a decoding."""
_MALFORMED = 100_000
"""Elements that are not events, beyond which (and beyond the events) the file is another format."""
_POSITION = re.compile(r"\(byte (\d+)\)")
_TRAILING = "trailing characters"
_BOM = b"\xef\xbb\xbf"


class _BrokenError(Exception):
    """Invalid JSON; `position` is where it breaks, None for its end."""

    def __init__(self, why: str, position: int | None) -> None:
        super().__init__(why)
        self.position = position


class EventStream:
    """Iterate over lists of events; `top` is complete after the iteration.

    Attributes:
        top: values beside the events, as JSON text by key.
        mended: repairs, with the number of chunks.
        events: number of events.
        malformed: number of omitted elements that were not events.

    Raises:
        TraceError: while iterating: not JSON, not a trace, nested too deeply, an event without an
            end, or more than `top_bytes` before or after the events.
    """

    def __init__(self, blocks: Iterator[bytes], top_bytes: int) -> None:
        self.top: dict[str, msgspec.Raw] = {}
        self.mended: Counter[str] = Counter()
        self.events = self.malformed = 0
        self._blocks = blocks
        self._top_bytes = top_bytes
        self._text = b""
        self._offset = 0
        self._ended = False

    def __iter__(self) -> Iterator[list[RawEvent]]:
        in_object = self._open()
        closed = False
        while not closed:
            events, closed = self._chunk()
            yield events
        self._close(in_object)

    # Buffer -------------------------------------------------------------------------------------

    def _more(self) -> None:
        """Append about one block to the current text."""
        parts, wanted = [self._text], BLOCK
        while wanted > 0 and not self._ended:
            block = next(self._blocks, None)
            self._ended = block is None
            parts.append(block or b"")
            wanted -= len(parts[-1])
        self._text = b"".join(parts)

    def _more_of_top(self) -> None:
        if len(self._text) > self._top_bytes:
            raise TraceError(
                f"more than {self._top_bytes:,} bytes without events, from byte {self._offset:,} "
                "on: not a trace of PyTorch's profiler",
                self._offset,
            )
        self._more()

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._offset += count

    # Structure ----------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Advance to the first event; return whether the event list is a value of an object."""
        self._more_of_top()
        if self._text.startswith(_BOM):
            self._drop(len(_BOM))
        self._drop(len(self._text) - len(self._text.lstrip()))
        first = self._text[:1]
        if first == b"[":
            self._drop(1)
            return False
        if first != b"{":
            what = f"no content from byte {self._offset} on"
            if first:
                told = f"'{first.decode()}'" if first.isascii() else f"byte {first[0]:#04x}"
                what = f"it starts with {told} at byte {self._offset}"
            raise TraceError(f"not JSON: {what}", self._offset)
        seen = 0
        while not self._found_events(seen):
            if self._ended:
                self._refuse()
            seen = max(0, len(self._text) - _REACH)
            self._more_of_top()
        return True

    def _found_events(self, seen: int) -> bool:
        for match in islice(_KEY.finditer(self._text, seen), _NESTED):
            end = match.end()
            try:
                top = self._sound(_TOP, self._text[:end] + b"]}", end)
            except _BrokenError as broken:
                if broken.position is None or broken.position >= end:
                    continue
                raise self._error(broken) from None
            del top["traceEvents"]
            self.top |= top
            self._drop(end)
            return True
        return False

    def _refuse(self) -> None:
        """Raise the reason for having no events: invalid JSON, or JSON of another kind."""
        try:
            self._sound(_TOP, self._text, len(self._text))
        except _BrokenError as broken:
            raise self._error(broken) from None
        raise TraceError(
            'JSON, but not a trace: it has no "traceEvents" list; give a file written by '
            "torch.profiler's export_chrome_trace"
        )

    def _chunk(self) -> tuple[list[RawEvent], bool]:
        """Return some events, and whether the list ends after them."""
        tried = 0
        while tried < _LONGEST:
            self._more()
            if self._ended:
                break
            for cut in self._cuts(tried):
                found = self._up_to(cut)
                if found is not None:
                    return found
            tried = len(self._text)
        return self._rest()

    def _cuts(self, tried: int) -> list[int]:
        """Positions of commas that seem to separate events, last ones first."""
        near = max(tried - _REACH, len(self._text) - _REACH, 0)
        for start in (near, max(tried - _REACH, 0)):
            cuts = [match.start(1) for match in _BETWEEN.finditer(self._text, start)]
            if cuts:
                return cuts[: -_GUESSES - 1 : -1]
        return []

    def _up_to(self, cut: int) -> tuple[list[RawEvent], bool] | None:
        """The events before this comma; None if it lies within an event."""
        try:
            events = self._events(b"[" + self._text[:cut] + b"]", cut + 1)
        except _BrokenError as broken:
            if broken.position is None or broken.position > cut:
                return None
            if _TRAILING in str(broken):
                return self._rest()
            raise self._error(broken, -1) from None
        self._drop(cut + 1)
        return events, False

    def _rest(self) -> tuple[list[RawEvent], bool]:
        """The events up to the end of the list, which the decoder finds."""
        text = b"[" + self._text
        end = len(text)
        try:
            try:
                events = self._events(text, end)
            except _BrokenError as broken:
                if broken.position is None or _TRAILING not in str(broken):
                    raise
                end = text.rindex(b"]", 0, broken.position) + 1
                events = self._events(text[:end], end)
        except _BrokenError as broken:
            raise self._error(broken, -1) from None
        self._drop(end - 1)
        return events, True

    def _close(self, in_object: bool) -> None:
        """Parse the text after the events: further keys, or nothing."""
        while not self._ended:
            self._more_of_top()
        prefix = b'{"":0' if in_object else b'{"":0}'
        text = prefix + self._text
        try:
            self.top |= self._sound(_TOP, text, len(text))
        except _BrokenError as broken:
            raise self._error(broken, -len(prefix)) from None
        del self.top[""]

    # Decoding -----------------------------------------------------------------------------------

    def _events(self, text: bytes, own: int) -> list[RawEvent]:
        """Decode a list of events; one by one if some have fields of unexpected types."""
        try:
            events = self._sound(_EVENTS, text, own)
        except msgspec.ValidationError:
            events = list(self._one_by_one(self._sound(_ELEMENTS, text, own)))
        self.events += len(events)
        return events

    def _one_by_one(self, elements: list[msgspec.Raw]) -> Iterator[RawEvent]:
        for element in elements:
            try:
                yield self._sound(_EVENT, bytes(element), 0)
            except (msgspec.ValidationError, _BrokenError):
                self.malformed += 1
                if self.malformed > max(_MALFORMED, self.events + len(elements) // 2):
                    raise TraceError(
                        f"{self.malformed:,} elements are not events: not a trace of PyTorch's "
                        "profiler"
                    ) from None

    def _sound(self, decoder: msgspec.json.Decoder[Any], text: bytes, own: int) -> Any:
        """Decode; on an error within the first `own` bytes, repair the text and try again."""
        try:
            return self._decode(decoder, text)
        except _BrokenError as broken:
            at = len(text) if broken.position is None else broken.position
            if at >= own or _TRAILING in str(broken):
                raise
            mended, what = mend(text)
            if not what:
                raise
        decoded = self._decode(decoder, mended)
        self.mended.update(what)
        return decoded

    def _decode(self, decoder: msgspec.json.Decoder[Any], text: bytes) -> Any:
        try:
            return decoder.decode(text)
        except RecursionError:
            raise TraceError(
                f"nested too deeply, somewhere after byte {self._offset:,}", self._offset
            ) from None
        except UnicodeDecodeError as error:
            raise _BrokenError(f"{error.reason} of UTF-8", _no_utf8(text)) from None
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as error:
            position = _POSITION.search(str(error))
            why = str(error).removeprefix("JSON is malformed: ")
            raise _BrokenError(why, int(position[1]) if position else None) from None

    def _error(self, broken: _BrokenError, shift: int = 0) -> TraceError:
        if broken.position is None and not self._ended:
            return TraceError(
                f"no event ends within {len(self._text):,} bytes from byte {self._offset:,} on",
                self._offset,
            )
        if broken.position is None:
            at = self._offset + len(self._text)
            return TraceError(f"the file is cut short: its JSON ends early, at byte {at:,}", at)
        at = self._offset + broken.position + shift
        why = _POSITION.sub("", str(broken)).strip()
        return TraceError(f"not JSON at byte {at:,}: {why}", at)


def _no_utf8(text: bytes) -> int:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0
