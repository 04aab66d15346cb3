"""Stores a profiler trace as columns: one row per event, one NumPy array per field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np


class Category(IntEnum):
    """Kind of a trace event, independent of the profiler version that named it."""

    OTHER = 0
    CPU_OP = 1
    ANNOTATION = 2
    RUNTIME = 3
    DRIVER = 4
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    SYNC = 8
    OVERHEAD = 9
    PYTHON = 10
    GPU_ANNOTATION = 11
    MEMORY = 12


ON_GPU = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
"""Events that keep the GPU busy."""


@dataclass(frozen=True, eq=False)
class Events:
    """Trace events as columns of equal length, sorted by start, then longer events first.

    Attributes:
        start_ns: int64, from the trace's origin.
        end_ns: int64; equals the start for instants.
        category: uint8, a `Category`.
        name: int32, index into `Trace.names`.
        thread: int32, index into `Trace.threads`; for GPU events, that of the stream.
        device: int32, index of the GPU; -1 if none (and for memory events of the host).
        stream: int32, CUDA stream; -1 if none.
        correlation: int64, joins a runtime call with the GPU events it launched; -1 if none.
        external: int64, joins runtime calls and GPU events with the operator; -1 if none.
        bytes: int64, size of copies, fills and memory events (negative when freed); else -1.
        inputs: int32, index into `Trace.inputs`; -1 if shapes were not recorded.
        details: int32, index into `Trace.details`; -1 if the event has none.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    category: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray
    external: np.ndarray
    bytes: np.ndarray
    inputs: np.ndarray
    details: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    def of(self, *categories: Category) -> np.ndarray:
        """Return the rows of events in these categories, in order, shape (rows,)."""
        return np.flatnonzero(np.isin(self.category, categories))


@dataclass(frozen=True, eq=False)
class Trace:
    """One trace recorded by PyTorch's profiler.

    Attributes:
        events: the columns.
        names: distinct names.
        threads: distinct pairs of process id and thread (or stream), as text.
        inputs: distinct combinations of recorded operator inputs: dictionaries with the keys
            `dims`, `types`, `strides`, `concrete`, each a list with one entry per input.
        details: distinct arguments of GPU events and synchronisations, with the trace's own keys
            (`grid`, `block`, `blocks per SM`, `est. achieved occupancy %`, `kind`, ...), except
            those with a column.
        origin_ns: unix time of time zero, in ns; None if the trace has none.
        devices: `deviceProperties` as found.
        job: `distributedInfo` as found, such as `rank`, `world_size` and `backend`; empty outside
            of a job of several ranks.
        recorded: recording switches that were on: any of "shapes", "stacks", "memory", "sync".
        source: file name or "capture".
        notes: omissions while reading, as sentences.
        irregular: number of irregular events by kind: `zero_timestamp` (omitted), `duration`
            (negative or absurd; set to 0), `malformed` (omitted), `arguments` (kept without them).
    """

    events: Events
    names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    inputs: tuple[dict[str, Any], ...] = ()
    details: tuple[dict[str, Any], ...] = ()
    origin_ns: int | None = None
    devices: tuple[dict[str, Any], ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    recorded: frozenset[str] = frozenset()
    source: str = ""
    notes: tuple[str, ...] = ()
    irregular: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def on_gpu(self) -> np.ndarray:
        """Rows of kernels, copies and fills, which keep a GPU busy; in order, shape (rows,)."""
        return self.events.of(*ON_GPU)

    def name_of(self, row: int) -> str:
        """Return the name of the event in this row."""
        return self.names[self.events.name[row]]

    def inputs_of(self, row: int) -> dict[str, Any] | None:
        """Return the recorded inputs of an operator; None if its inputs were not recorded."""
        index = int(self.events.inputs[row])
        return None if index < 0 else self.inputs[index]
