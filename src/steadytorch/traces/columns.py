"""Gather trace events into NumPy columns chunk by chunk, storing repeated values once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import numpy as np

from steadytorch.traces.decimals import LARGEST_NS, nanoseconds
from steadytorch.traces.events import Category
from steadytorch.traces.schema import (
    COLUMNS,
    INPUTS,
    SYNC_THREADS,
    CallArguments,
    MemoryArguments,
    OperatorArguments,
    RawEvent,
    category_of,
    integer,
    number_in,
)

_OPERATOR = msgspec.json.Decoder(OperatorArguments)
_CALL = msgspec.json.Decoder(CallArguments)
_MEMORY = msgspec.json.Decoder(MemoryArguments)
_DICTIONARY = msgspec.json.Decoder(dict[str, Any])

DTYPES = {
    "start_ns": np.int64,
    "end_ns": np.int64,
    "category": np.uint8,
    "name": np.int32,
    "thread": np.int32,
    "device": np.int32,
    "stream": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "bytes": np.int64,
    "inputs": np.int32,
    "details": np.int32,
}
_LONGEST_NS = LARGEST_NS // 4
"""Longer durations are invalid; the bound also keeps differences of times within int64."""

_ARGUMENTS = ("device", "stream", "correlation", "external", "bytes", "inputs", "details")
"""Columns that default to -1 if an event's arguments omit them."""


class Interned:
    """A table of distinct values, numbered in order of first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, key: Hashable, value: Callable[[], Any]) -> int:
        """Return the number of the value with this key; if new, `value()` creates the value."""
        found = self.numbers.get(key)
        if found is None:
            self.values.append(value())
            found = self.numbers[key] = len(self.values) - 1
        return found


class EventTableBuilder:
    """Builds the columns of a trace from chunks of events.

    Attributes:
        names, threads, inputs, details: as in `Trace`.
        irregular: as in `Trace`.
        recorded: as in `Trace`, as far as the events show it.
        rows: number of rows so far.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.threads = Interned()
        self.inputs = Interned()
        self.details = Interned()
        self.irregular: Counter[str] = Counter()
        self.recorded: set[str] = set()
        self.rows = 0
        self._chunks: list[dict[str, np.ndarray]] = []
        self._thread_numbers: dict[Hashable, int] = {}

    def add(self, events: Sequence[RawEvent]) -> None:
        """Add the events of one chunk to the columns."""
        kept, categories = self._kept(events)
        starts = nanoseconds([bytes(event.ts) for event in kept])
        timed = np.flatnonzero(starts > -_LONGEST_NS)
        if len(timed) < len(kept):
            self.irregular["malformed"] += len(kept) - len(timed)
            kept, starts = [kept[row] for row in timed], starts[timed]
            categories = [categories[row] for row in timed]
        if not kept:
            return
        columns = {name: np.full(len(kept), -1, DTYPES[name]) for name in _ARGUMENTS}
        number = self.names
        chunk = {
            "start_ns": starts,
            "end_ns": starts + self._durations(kept),
            "category": np.array(categories, DTYPES["category"]),
            "name": np.array(
                [number.setdefault(event.name, len(number)) for event in kept], DTYPES["name"]
            ),
        }
        # A list, since an enum recomputes its hash at each lookup.
        readers = [_READERS.get(category) for category in Category]
        threads = []
        for row, (event, category) in enumerate(zip(kept, categories, strict=True)):
            threads.append(self._thread(event, category))
            read = readers[category]
            if read is not None:
                read(self, event, row, columns)
        chunk["thread"] = np.array(threads, DTYPES["thread"])
        self._chunks.append(chunk | columns)
        self.rows += len(kept)

    def finish(self) -> dict[str, np.ndarray]:
        """Return the columns of `Events` in order of arrival, and free the chunks."""
        columns = {}
        for name, dtype in DTYPES.items():
            parts = [chunk.pop(name) for chunk in self._chunks]
            columns[name] = np.concatenate(parts) if parts else np.empty(0, dtype)
        return columns

    def _kept(self, events: Sequence[RawEvent]) -> tuple[list[RawEvent], list[int]]:
        kept, categories = [], []
        for event in events:
            category = category_of(event)
            if category is not None:
                kept.append(event)
                categories.append(category)
        return kept, categories

    def _durations(self, events: Sequence[RawEvent]) -> np.ndarray:
        durations = nanoseconds([bytes(event.dur) or b"0" for event in events])
        absurd = (durations < 0) | (durations > _LONGEST_NS)
        if absurd.any():
            self.irregular["duration"] += int(absurd.sum())
            durations[absurd] = 0
        return durations

    def _thread(self, event: RawEvent, category: int) -> int:
        key = (event.pid, event.tid, event.cat)
        found = self._thread_numbers.get(key)
        if found is None:
            on_gpu = category in _STREAMS
            pair = (str(event.pid), str(_stream(event) if on_gpu else event.tid))
            found = self._thread_numbers[key] = self.threads.number(pair, lambda: pair)
        return found

    def _arguments(self, decoder: msgspec.json.Decoder[Any], event: RawEvent) -> Any:
        """Decode an event's arguments; None if arguments are missing or have the wrong types."""
        if not event.args:
            return None
        try:
            return decoder.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.irregular["arguments"] += 1
            return None

    def _operator(self, event: RawEvent, row: int, columns: dict[str, np.ndarray]) -> None:
        said: OperatorArguments | None = self._arguments(_OPERATOR, event)
        if said is None:
            return
        columns["external"][row] = said.external if said.external != -1 else said.external_old
        if said.stack:
            self.recorded.add("stacks")
        dims = said.dims or said.dims_old
        if dims:
            texts = (bytes(dims), bytes(said.types), bytes(said.strides), bytes(said.concrete))
            columns["inputs"][row] = self.inputs.number(texts, lambda: _inputs(texts))

    def _call(self, event: RawEvent, row: int, columns: dict[str, np.ndarray]) -> None:
        said: CallArguments | None = self._arguments(_CALL, event)
        if said is not None:
            columns["correlation"][row] = said.correlation
            columns["external"][row] = said.external if said.external != -1 else said.external_old

    def _memory(self, event: RawEvent, row: int, columns: dict[str, np.ndarray]) -> None:
        self.recorded.add("memory")
        said: MemoryArguments | None = self._arguments(_MEMORY, event)
        if said is not None:
            columns["bytes"][row] = said.bytes
            columns["device"][row] = said.device if said.device_type else -1

    def _on_gpu(self, event: RawEvent, row: int, columns: dict[str, np.ndarray]) -> None:
        said: dict[str, Any] = self._arguments(_DICTIONARY, event) or {}
        columns["device"][row] = integer(said.get("device", number_in(event.pid)), 31)
        columns["stream"][row] = integer(said.get("stream", _stream(event)), 31)
        columns["correlation"][row] = integer(said.get("correlation"))
        columns["external"][row] = integer(said.get("External id", said.get("external id")))
        columns["bytes"][row] = integer(said.get("bytes"))
        details = {key: value for key, value in said.items() if key not in COLUMNS}
        if details:
            key = msgspec.json.encode(details)
            columns["details"][row] = self.details.number(key, lambda: details)

    def _sync(self, event: RawEvent, row: int, columns: dict[str, np.ndarray]) -> None:
        self.recorded.add("sync")
        self._on_gpu(event, row, columns)

    def _python(self, *_: Any) -> None:
        self.recorded.add("stacks")


_STREAMS = {
    Category.KERNEL,
    Category.MEMCPY,
    Category.MEMSET,
    Category.SYNC,
    Category.GPU_ANNOTATION,
}
"""Categories whose thread is a CUDA stream."""

_READERS: dict[int, Callable[[EventTableBuilder, RawEvent, int, dict[str, np.ndarray]], None]] = {
    Category.CPU_OP: EventTableBuilder._operator,
    Category.ANNOTATION: EventTableBuilder._operator,
    Category.RUNTIME: EventTableBuilder._call,
    Category.DRIVER: EventTableBuilder._call,
    Category.KERNEL: EventTableBuilder._on_gpu,
    Category.MEMCPY: EventTableBuilder._on_gpu,
    Category.MEMSET: EventTableBuilder._on_gpu,
    Category.GPU_ANNOTATION: EventTableBuilder._on_gpu,
    Category.SYNC: EventTableBuilder._sync,
    Category.PYTHON: EventTableBuilder._python,
    Category.MEMORY: EventTableBuilder._memory,
}


def _stream(event: RawEvent) -> int:
    """Return the CUDA stream number in an event's thread field."""
    number = number_in(event.tid)
    return number - SYNC_THREADS if number >= SYNC_THREADS and "sync" in event.cat else number


def _inputs(texts: tuple[bytes, ...]) -> dict[str, Any]:
    """Decode an operator's recorded inputs; a list with invalid UTF-8 becomes empty."""
    return {key: _list(text) for key, text in zip(INPUTS, texts, strict=True)}


def _list(text: bytes) -> list[Any]:
    try:
        return msgspec.json.decode(text, type=list[Any]) if text else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
