"""A trace with one event of every kind, and helpers to look up what was read."""

from __future__ import annotations

from typing import Any

from .synthetic import (
    annotation,
    gpu_annotation,
    launch,
    memcpy,
    memory,
    memset,
    op,
    overhead,
    python,
    runtime,
    step,
    sync,
)

MS = 1_000_000
EVENTS = (
    step(3, 0, 9 * MS),
    op(
        "aten::mm",
        1 * MS,
        2 * MS,
        external=11,
        dims=[[8, 16], [16, 4]],
        types=["float", "float"],
        strides=[[16, 1], [4, 1]],
        concrete=["", ""],
    ),
    *launch(
        "sgemm", call=(1 * MS, 1 * MS + 5000), gpu=(3 * MS, 4 * MS), correlation=5, external=11
    ),
    runtime("cuLaunchKernel", 2 * MS, 2 * MS + 1000, correlation=6, driver=True),
    memcpy("Memcpy HtoD (Pageable -> Device)", 4 * MS, 5 * MS, correlation=7, size=64, stream=8),
    memset(5 * MS, 6 * MS, correlation=8, size=32, device=1),
    sync("Stream Sync", 6 * MS, 7 * MS, stream=7, correlation=9),
    gpu_annotation("ProfilerStep#3", 3 * MS, 6 * MS),
    memory(6 * MS, -128),
    memory(6 * MS + 1000, 256, device=-1),
    overhead("Buffer Flush", 7 * MS, 8 * MS),
    annotation("mine", 8 * MS, 9 * MS),
    python("model.py(3): forward", 8 * MS, 9 * MS),
)


def rows_of(read: Any) -> list[tuple[int, int, str]]:
    """Start, end and name of each event, sorted."""
    events = read.events
    return sorted(
        (int(events.start_ns[at]), int(events.end_ns[at]), read.name_of(at))
        for at in range(len(events))
    )


def row_of(read: Any, name: str) -> int:
    """Row of the event of this name."""
    return next(at for at in range(len(read.events)) if read.name_of(at) == name)
