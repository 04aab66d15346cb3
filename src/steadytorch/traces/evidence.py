"""Classify host events by category and name: waiting, compiling, allocating, and so on."""

from __future__ import annotations

import re
from enum import IntEnum

import numpy as np

from steadytorch.traces.events import Category, Trace
from steadytorch.traces.steps import CALLS, launch_rows


class Evidence(IntEnum):
    """Reason why the host launches no GPU work during an event."""

    NONE = 0
    PROFILER = 1
    GC = 2
    DATA_WAIT = 3
    COMPILE = 4
    SYNCHRONISATION = 5
    ALLOCATION = 6


RANGES = (Category.CPU_OP, Category.ANNOTATION)

PATTERNS: tuple[tuple[Evidence, tuple[Category, ...], str], ...] = (
    # Names of CUPTI's overhead records, `CUpti_ActivityOverheadKind`. A full command buffer means a
    # full launch queue, not profiler overhead.
    (
        Evidence.COMPILE,
        (Category.OVERHEAD,),
        r"Lazy Function Loading|.*Module Loading|Driver Compiler",
    ),
    (Evidence.NONE, (Category.OVERHEAD,), r"Command Buffer Full"),
    (Evidence.PROFILER, (Category.OVERHEAD,), r".*"),
    (Evidence.PROFILER, (Category.PYTHON,), r".*torch/profiler/profiler\.py\(\d+\): \w+"),
    # `Python GC` comes from the profiler (`record_python_gc_info`), `steadytorch.gc` from our
    # capture.
    (
        Evidence.GC,
        (*RANGES, Category.PYTHON, Category.OTHER),
        r"Python GC.*|steadytorch\.gc.*|gc\.collect|<built-in (function|method) collect>",
    ),
    # torch.utils.data has used these range names since 1.7; other loaders have the word in theirs.
    (
        Evidence.DATA_WAIT,
        RANGES,
        r"enumerate\(Data.*|(?i:.*data_?(loader|pipe)s?(?![a-z]).*)",
    ),
    (
        Evidence.DATA_WAIT,
        (Category.PYTHON,),
        r".*torch/utils/data/dataloader\.py\(\d+\): __next__|.*torchdata/.*: __next__",
    ),
    # `(dynamo_timed)` ends the name of every torch.compile phase.
    (
        Evidence.COMPILE,
        RANGES,
        r".*\(dynamo_timed\)|(?i:.*(triton|inductor|dynamo).*compil(e|ing|ation)\b.*)"
        r"|CachingAutotuner\.benchmark.*",
    ),
    (
        Evidence.COMPILE,
        (Category.PYTHON,),
        r".*torch/_dynamo/convert_frame\.py\(\d+\): \w+|.*triton/compiler/compiler\.py\(\d+\): "
        r"compile|.*triton/testing\.py\(\d+\): do_bench\w*",
    ),
    (
        Evidence.COMPILE,
        CALLS,
        r"(cu|hip)Module(Load|GetFunction)\w*|(cuda|cu)Library(Load|Get)\w*|(cu|hip)Link\w+|nvrtc.*",
    ),
    (
        Evidence.SYNCHRONISATION,
        CALLS,
        r"(cuda|cu|hip)(Stream|Device|Event|Ctx|Thread)Synchronize\w*"
        r"|(cuda|cu|hip)Memcpy(?!\w*(Async|Batch))\w*",
    ),
    # CUPTI's synchronisation records; those that make a stream wait do not block the host.
    (Evidence.SYNCHRONISATION, (Category.SYNC,), r"(?!.*Wait).*"),
    (Evidence.SYNCHRONISATION, RANGES, r"aten::(item|_local_scalar_dense)"),
    (
        Evidence.ALLOCATION,
        CALLS,
        r"(cuda|hip)(Malloc|Free|HostAlloc|HostRegister|HostUnregister|HostMalloc|HostFree"
        r"|MemPool)\w*"
        r"|cuMem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address|Host|Pool)\w*",
    ),
)
"""Evidence, categories to search, and a pattern for the whole name; the first match decides."""

STAGED_BYTES = 64 << 10
"""Maximum size that the driver copies from pageable memory to a device without waiting (CUDA
Driver API, "API synchronization behavior")."""

WAITS = re.compile(r"(cuda|cu|hip)StreamWaitEvent\w*")
"""Calls that make a stream wait for an event of another stream."""


def by_name(trace: Trace, categories: tuple[Category, ...], pattern: str) -> np.ndarray:
    """Return rows in these categories whose whole event name matches the pattern, in order."""
    fits = re.compile(pattern).fullmatch
    wanted = np.array([bool(fits(name)) for name in trace.names], dtype=bool)
    rows = trace.events.of(*categories)
    return rows[wanted[trace.events.name[rows]]] if len(wanted) else rows


def evidence(trace: Trace) -> np.ndarray:
    """Return the `Evidence` value of each event, uint8, shape (rows,)."""
    events = trace.events
    table = np.zeros((len(Category), max(1, len(trace.names))), np.uint8)
    used = np.zeros(table.shape, dtype=bool)
    used[events.category, events.name] = True
    for category, name in np.argwhere(used).tolist():
        table[category, name] = _meaning(Category(category), trace.names[name])
    found = table[events.category, events.name]
    found[_waiting_copies(trace)] = Evidence.SYNCHRONISATION
    return found


def _meaning(category: Category, name: str) -> Evidence:
    for kind, fits in _COMPILED.get(category, ()):
        if fits(name):
            return kind
    return Evidence.NONE


_COMPILED = {
    category: tuple(
        (kind, re.compile(pattern, re.DOTALL).fullmatch)
        for kind, categories, pattern in PATTERNS
        if category in categories
    )
    for category in Category
}


def _waiting_copies(trace: Trace) -> np.ndarray:
    """Return rows of asynchronous copy calls from or to pageable memory, which may block the host.

    Source: CUDA Runtime API, "API synchronization behavior", section on asynchronous transfers.
    """
    copies = by_name(trace, (Category.MEMCPY,), r".*Pageable.*")
    staged = np.isin(copies, by_name(trace, (Category.MEMCPY,), r".*HtoD.*"))
    size = trace.events.bytes[copies]
    copies = copies[~(staged & (size >= 0) & (size <= STAGED_BYTES))]
    calls = launch_rows(trace, copies)
    return calls[calls >= 0]
