"""Reads what PyTorch's profiler wrote, of any year since 2020, into columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from steadytorch.errors import TraceError
from steadytorch.traces.byte_blocks import BLOCK, Limits, blocks_of, json_blocks, opened
from steadytorch.traces.columns import Gathered
from steadytorch.traces.decimals import LARGEST_NS
from steadytorch.traces.events import Category, Events, Trace
from steadytorch.traces.json_stream import EventStream

UNIX_NS = 10**18
"""Later than this is a unix time (2001 and after); earlier is since some event of the machine."""

GAP_NS = 10**9
"""A time at or before zero, this much before the first one after zero, is a missing one: the
profiler writes zero where the GPU's activity record had none."""

_SWITCHES = {"record_shapes": "shapes", "with_stack": "stacks", "profile_memory": "memory"}
"""Keys of the top level that say what was switched on."""

_LEFT_OUT = {
    "malformed": "{} elements that are no events of the format were left out",
    "zero_timestamp": "{} events without a time (zero) were left out",
    "duration": "{} negative or absurd durations were taken as 0",
    "arguments": "{} events have unreadable arguments, which were ignored",
}


def read_trace(path: str | os.PathLike[str], limits: Limits | None = None) -> Trace:
    """The trace in a file, `.json` or gzipped (by content, whatever the name says).

    Args:
        path: a regular file.
        limits: what to refuse; the defaults suit traces of up to 4 GiB of JSON.

    Raises:
        TraceError: The file is missing, is no file, no JSON, cut short, damaged, beyond the limits,
            or holds no event of PyTorch's profiler.
    """
    name = os.path.basename(os.fspath(path))
    with opened(path) as file:
        return _read(blocks_of(file), name, limits or Limits())


def parse_trace(data: bytes, source: str, limits: Limits | None = None) -> Trace:
    """The trace in these bytes, gzipped or not.

    Args:
        data: what such a file holds.
        source: what errors and `Trace.source` call it.
        limits: as for `read_trace`.

    Raises:
        TraceError: As for `read_trace`.
    """
    blocks = (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
    return _read(blocks, source, limits or Limits())


def _read(blocks: Iterator[bytes], source: str, limits: Limits) -> Trace:
    stream = EventStream(json_blocks(blocks, limits), limits.top_bytes)
    gathered = Gathered()
    try:
        for events in stream:
            gathered.add(events)
            if gathered.rows > limits.events:
                raise TraceError(
                    f"more than {limits.events:,} events, the most that are read: profile fewer "
                    "steps (torch.profiler.schedule(active=...))"
                )
    except TraceError as error:
        raise TraceError(f"{source}: {error}", error.offset) from None
    gathered.irregular["malformed"] += stream.malformed
    return _trace(gathered, stream, source)


def _trace(gathered: Gathered, stream: EventStream, source: str) -> Trace:
    columns = gathered.finish()
    if not (columns["category"] != Category.OTHER).any():
        raise TraceError(_none_here(source, gathered.rows))
    gathered.irregular["zero_timestamp"] += _without_missing_times(columns)
    origin = _from_zero(columns, _value(stream.top, "baseTimeNanoseconds", int) or 0)
    irregular = {kind: count for kind, count in gathered.irregular.items() if count}
    return Trace(
        events=Events(**columns),
        names=tuple(gathered.names),
        threads=tuple(gathered.threads.values),
        inputs=tuple(gathered.inputs.values),
        details=tuple(gathered.details.values),
        origin_ns=origin,
        devices=tuple(_value(stream.top, "deviceProperties", list[dict[str, Any]]) or ()),
        recorded=frozenset(gathered.recorded.union(_switched_on(stream.top, gathered))),
        source=source,
        notes=tuple(_notes(irregular, stream.mended)),
        irregular=irregular,
    )


def _none_here(source: str, rows: int) -> str:
    what = f"its {rows:,} events are another tool's" if rows else "it holds no events"
    return (
        f"{source}: no trace of PyTorch's profiler: {what}; record some steps with torch.profiler "
        "and write them with export_chrome_trace"
    )


def _select(columns: dict[str, np.ndarray], rows: np.ndarray) -> None:
    # One after the other: only one column exists twice.
    for name in columns:
        columns[name] = columns[name][rows]


def _without_missing_times(columns: dict[str, np.ndarray]) -> int:
    """Leaves out the rows whose time is missing; their number."""
    starts = columns["start_ns"]
    late = starts > 0
    if late.all() or not late.any() or starts[late].min() < GAP_NS:
        return 0
    _select(columns, np.flatnonzero(late))
    return int(len(late) - late.sum())


def _from_zero(columns: dict[str, np.ndarray], base_ns: int) -> int | None:
    """Sorts the rows and counts time from the first one; its unix time where the trace tells."""
    starts, ends = columns["start_ns"], columns["end_ns"]
    _select(columns, np.lexsort((starts - ends, starts)))
    first = int(columns["start_ns"][0])
    for name in ("start_ns", "end_ns"):
        columns[name] -= first
    origin = first if first >= UNIX_NS else first + base_ns
    return origin if UNIX_NS <= origin < LARGEST_NS else None


def _value(top: Mapping[str, msgspec.Raw], key: str, kind: Any) -> Any:
    """A value of the top level; None where it is missing or of another kind."""
    try:
        return msgspec.json.decode(top[key], type=kind)
    except (KeyError, ValueError, RecursionError):
        return None


def _switched_on(top: Mapping[str, msgspec.Raw], gathered: Gathered) -> Iterator[str]:
    """What the keys of the top level and the events show."""
    if gathered.inputs.values:
        yield "shapes"
    for key, what in _SWITCHES.items():
        if _value(top, key, int):
            yield what


def _notes(irregular: Mapping[str, int], mended: Mapping[str, int]) -> Iterator[str]:
    for kind, count in irregular.items():
        yield _LEFT_OUT[kind].format(f"{count:,}")
    if mended:
        yield f"the file is not quite JSON; mended: {', '.join(mended)}"
