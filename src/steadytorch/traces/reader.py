"""Read traces of PyTorch's profiler, in all its formats since 2020, into columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from steadytorch.errors import TraceError
from steadytorch.traces.columns import EventTableBuilder
from steadytorch.traces.decimals import LARGEST_NS
from steadytorch.traces.events import Category, Events, Trace
from steadytorch.traces.trace_text import parse, read_text

UNIX_NS = 10**18
"""Later times are unix times (2001 and after); earlier ones count from an event of the machine."""

GAP_NS = 10**9
"""A time at or before zero is missing if the first positive time is at least this much later:
the profiler writes zero if the GPU's activity record had no time."""

_SWITCHES = {"record_shapes": "shapes", "with_stack": "stacks", "profile_memory": "memory"}
"""Top-level keys that show which recording switches were on."""

_LEFT_OUT = {
    "malformed": "omitted {} malformed elements",
    "zero_timestamp": "omitted {} events without a time (zero)",
    "duration": "set {} negative or absurd durations to 0",
    "arguments": "ignored the unreadable arguments of {} events",
}


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read the trace in a `.json` or gzip file; the format is detected by content.

    Args:
        path: a regular file with at most 2 GiB of JSON, which is held in memory.

    Raises:
        TraceError: the file is missing, not a regular file, not JSON, cut short, damaged, too
            large, or has no event of PyTorch's profiler.
    """
    name = os.path.basename(os.fspath(path))
    try:
        return parse_trace(read_text(path), name)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None


def parse_trace(data: bytes, source: str) -> Trace:
    """Parse the JSON text of a trace.

    Args:
        data: the text, UTF-8.
        source: name for `Trace.source`.

    Raises:
        TraceError: not JSON, or it has no event of PyTorch's profiler.
    """
    text = parse(data)
    builder = EventTableBuilder()
    builder.irregular["malformed"] = len(text.elements)
    for events in text.events():
        builder.irregular["malformed"] -= len(events)
        builder.add(events)
    columns = builder.finish()
    if not (columns["category"] != Category.OTHER).any():
        raise TraceError(_none_here(builder.rows))
    builder.irregular["zero_timestamp"] += _without_missing_times(columns)
    origin = _from_zero(columns, _value(text.top, "baseTimeNanoseconds", int) or 0)
    irregular = {kind: count for kind, count in builder.irregular.items() if count}
    return Trace(
        events=Events(**columns),
        names=tuple(builder.names),
        threads=tuple(builder.threads.values),
        inputs=tuple(builder.inputs.values),
        details=tuple(builder.details.values),
        origin_ns=origin,
        devices=tuple(_value(text.top, "deviceProperties", list[dict[str, Any]]) or ()),
        job=_value(text.top, "distributedInfo", dict[str, Any]) or {},
        recorded=frozenset(builder.recorded.union(_switched_on(text.top, builder))),
        source=source,
        notes=tuple(_LEFT_OUT[kind].format(f"{count:,}") for kind, count in irregular.items()),
        irregular=irregular,
    )


def _none_here(rows: int) -> str:
    what = f"its {rows:,} events come from another tool" if rows else "it holds no events"
    return (
        f"not a trace of PyTorch's profiler: {what}; record steps with torch.profiler and "
        "write them with export_chrome_trace"
    )


def _select(columns: dict[str, np.ndarray], rows: np.ndarray) -> None:
    # One column at a time, so that only one exists twice.
    for name in columns:
        columns[name] = columns[name][rows]


def _without_missing_times(columns: dict[str, np.ndarray]) -> int:
    """Drop rows of events that have no start time; return the number of dropped rows."""
    starts = columns["start_ns"]
    late = starts > 0
    if late.all() or not late.any() or starts[late].min() < GAP_NS:
        return 0
    _select(columns, np.flatnonzero(late))
    return int(len(late) - late.sum())


def _from_zero(columns: dict[str, np.ndarray], base_ns: int) -> int | None:
    """Sort the rows and shift times to start at zero; return the Unix time of zero, or None."""
    starts, ends = columns["start_ns"], columns["end_ns"]
    _select(columns, np.lexsort((starts - ends, starts)))
    first = int(columns["start_ns"][0])
    for name in ("start_ns", "end_ns"):
        columns[name] -= first
    origin = first if first >= UNIX_NS else first + base_ns
    return origin if UNIX_NS <= origin < LARGEST_NS else None


def _value(top: Mapping[str, msgspec.Raw], key: str, kind: Any) -> Any:
    """Return the value of a top-level key of a trace; None if missing or of another type."""
    try:
        return msgspec.json.decode(top[key], type=kind)
    except (KeyError, ValueError, RecursionError):
        return None


def _switched_on(top: Mapping[str, msgspec.Raw], builder: EventTableBuilder) -> Iterator[str]:
    """Yield the profiler options, such as "shapes", that were on during recording."""
    if builder.inputs.values:
        yield "shapes"
    for key, what in _SWITCHES.items():
        if _value(top, key, int):
            yield what
