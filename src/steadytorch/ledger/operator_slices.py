"""Split the steps of a trace without GPU events into slices by kind of operator."""

from __future__ import annotations

import re

import numpy as np

from steadytorch.ledger.idle_owners import ANYWHERE, Host, Owned, TimeAllocator
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import Evidence, by_name
from steadytorch.traces.intervals import Spans, crossings, intersect, self_times

CPU_SLICES = (
    "cpu_compute",
    "cpu_elementwise",
    "cpu_copy",
    "cpu_operator",
    "cpu_communication",
    "cpu_allocation",
    "cpu_data_wait",
    "cpu_waiting",
    "cpu_compile",
    "cpu_gc",
    "cpu_python",
    "cpu_profiler",
    "cpu_forward",
    "cpu_backward",
    "cpu_optimizer",
    "cpu_evaluation",
    "cpu_synchronisation",
    "cpu_script",
    "unknown",
)
"""Slices of a step in a trace without GPU events.

- `cpu_compute`: convolutions, matrix products, attention, recurrent layers.
- `cpu_elementwise`: elementwise operators, reductions, normalisation, pooling, fused passes.
- `cpu_copy`: copies, layout changes, concatenation, gathering.
- `cpu_operator`: all other operators: views, calls of other operators, custom ones.
- `cpu_communication`: collectives between processes.
- `cpu_allocation`: operators that only allocate.
- `cpu_data_wait`: the input pipeline, whatever it did.
- `cpu_waiting`: a Python call that waits: sleep, lock, queue, pipe (only with stacks).
- `cpu_compile`, `cpu_gc`, `cpu_profiler`: as in `ledger.SLICES`.
- `cpu_python`: Python between operators, or short waits, which no record tells apart; without
stacks, only stretches shorter than `idle_owners.LAUNCH_LIMIT_NS`.
- `cpu_forward`, `cpu_backward`, `cpu_optimizer`, `cpu_evaluation`, `cpu_synchronisation`,
`cpu_script`: the parts of a step recorded by `steady run --keep-slow`, which records no operators.
- `unknown`: no record gives a reason."""

PARTS = {
    "steadytorch.dataloader": "cpu_data_wait",
    "steadytorch.copies": "cpu_copy",
    "steadytorch.forward": "cpu_forward",
    "steadytorch.backward": "cpu_backward",
    "steadytorch.optimizer": "cpu_optimizer",
    "steadytorch.synchronisation": "cpu_synchronisation",
    "steadytorch.evaluation": "cpu_evaluation",
    "steadytorch.collection": "cpu_gc",
    "steadytorch.script": "cpu_script",
}
"""Ranges that a watch records instead of operators, with their slices."""

KINDS = (
    (
        "cpu_communication",
        r"c10d::.*|gloo:.*|nccl:.*|mpi:.*|_c10d_functional::.*|record_param_comms",
    ),
    ("cpu_allocation", r"aten::(new_)?empty(_like|_strided|_permuted|_quantized)?|aten::resize_"),
    (
        "cpu_compute",
        r".*(conv(olution)?(?!ert)|(?<![a-z])(s|b|add|addb|baddb)?mm(?![a-z])|matmul|linear|einsum|attention|attn|gemm|bilinear_form"
        r"|lstm|gru(_|$)|rnn|_fft|::dot$|::mv$|::vdot$|::outer$).*",
    ),
    (
        "cpu_copy",
        r".*::(copy_?|_?to(_copy|_dense|_mkldnn|_cpu)?|clone|contiguous|cat|concat|stack|pad"
        r"|constant_pad_nd|repeat|repeat_interleave|roll|flip|tile|gather|index_select|take"
        r"|im2col|col2im|pixel_shuffle|pixel_unshuffle|channel_shuffle|mkldnn_reorder\w*"
        r"|_reshape_copy|_copy_from\w*|index|_cat|embedding|select_copy|permute_copy)",
    ),
    (
        "cpu_operator",
        r".*::(view\w*|_unsafe_view|reshape\w*|_reshape_alias|t|transpose|permute|expand\w*|slice"
        r"|select|narrow|as_strided\w*|squeeze\w*|unsqueeze|flatten|unflatten|detach\w*|alias|split"
        r"|chunk|unbind|numpy_T|swapaxes|movedim|resolve_\w+|lift\w*|is_\w+|item"
        r"|_local_scalar_dense|set_|result_type|requires_grad_)",
    ),
    ("cpu_elementwise", r"aten::.*|.*fused.*|inductor.*|.*(norm|pool|softmax|relu|gelu).*"),
    ("cpu_operator", r".*"),
)
"""Slices of operators, by a pattern for the whole name; the first match decides."""

WAITING = re.compile(
    r"<built-in .*\b(sleep|acquire|poll|select|epoll|recv\w*|wait\w*|read|readinto|accept|join)\b.*"
    r"|.*\b(threading|queue|selectors|connection|subprocess|popen_fork|synchronize)\.py\(\d+\): "
    r"(wait|get|select|poll|join|acquire|_recv|recv\w*|_wait\w*|__enter__)"
)
"""Matches the profiler's names of Python frames that wait."""


def own_host(trace: Trace, time: Spans, marks: np.ndarray) -> Owned:
    """Assign one owner to every ns of `time`.

    Recorded events of the profiler and the garbage collector take precedence, then step parts from
    `steady.watch`, data loading and compilation, then the main thread's innermost operators. Where
    the main thread has neither operators nor running Python code, operators of other threads own
    the time; the main thread may be waiting for them.

    Args:
        trace: a trace without GPU events.
        time: the steps.
        marks: rows of the step marks.
    """
    main, *others = _threads(trace, marks)
    allocator = TimeAllocator(time, CPU_SLICES)
    host = Host(trace, marks, (main,))
    for kind in ANYWHERE:
        rows, spans = host.evidence_of(kind, None)
        allocator.assign(_slice(kind), spans, rows)
    _assign_parts(allocator, trace, main, marks)
    for kind in (Evidence.DATA_WAIT, Evidence.COMPILE):
        rows, spans = host.evidence_of(kind, main)
        allocator.assign(_slice(kind), spans, rows)
    _assign_operators(allocator, trace, host.work_of(main))
    frames, frame_time = _frames(trace, main)
    waits, native = _matching(trace, frames, WAITING), _matching(trace, frames, _NATIVE)
    if len(frames):
        allocator.assign("cpu_python", frame_time.pick(~waits & ~native), frames[~waits & ~native])
    for thread in others:
        _assign_operators(allocator, trace, host.work_of(thread))
    allocator.assign("cpu_waiting", frame_time.pick(waits), frames[waits])
    allocator.assign("cpu_python", frame_time.pick(native), frames[native])
    allocator.assign("unknown", intersect(allocator.left, host.quiet))
    allocator.assign("cpu_python", time)
    return allocator.owned()


_NATIVE = re.compile(r"<built-in .*")
"""Calls out of Python, in which a thread may wait for another."""


def _slice(kind: Evidence) -> str:
    return f"cpu_{kind.name.lower()}"


def _threads(trace: Trace, marks: np.ndarray) -> list[int]:
    """The thread of the step marks, then all other threads with operators, busiest first."""
    events = trace.events
    rows = events.of(Category.CPU_OP)
    worked = np.bincount(
        events.thread[rows],
        weights=(events.end_ns - events.start_ns)[rows],
        minlength=1,
    )
    order = np.argsort(-worked, kind="stable")
    threads = order[worked[order] > 0].tolist()
    main = int(events.thread[marks[0]]) if len(marks) else (threads or [-1])[0]
    return [main, *(thread for thread in threads if thread != main)]


def recorded_parts(trace: Trace, name: str = "|".join(map(re.escape, PARTS))) -> np.ndarray:
    """Rows of the ranges that `steady.watch` records instead of operators, in order."""
    return by_name(trace, (Category.ANNOTATION,), name)


def _assign_parts(allocator: TimeAllocator, trace: Trace, main: int, marks: np.ndarray) -> None:
    """Assign the step parts that `steady.watch` recorded; the innermost range owns the time."""
    events = trace.events
    if not len(recorded_parts(trace)):
        return
    rows = np.setdiff1d(events.of(Category.ANNOTATION), marks, assume_unique=True)
    rows = rows[(events.thread[rows] == main) & (events.end_ns[rows] > events.start_ns[rows])]
    owner, inner = self_times(events.start_ns[rows], events.end_ns[rows])
    for name, kind in PARTS.items():
        part = recorded_parts(trace, re.escape(name))
        part = part[events.end_ns[part] > events.start_ns[part]]
        _, place, spans = crossings(Spans(events.start_ns[part], events.end_ns[part]), inner)
        allocator.assign(kind, spans, rows[owner[place]])


def _assign_operators(allocator: TimeAllocator, trace: Trace, rows: np.ndarray) -> None:
    """Assign each operator of one thread its self time, without nested operators."""
    events = trace.events
    rows = rows[events.end_ns[rows] > events.start_ns[rows]]
    owner, spans = self_times(events.start_ns[rows], events.end_ns[rows])
    owner = rows[owner]
    kinds = _kinds(trace, owner)
    for kind in np.unique(kinds).tolist():
        mine = kinds == kind
        allocator.assign(CPU_SLICES[kind], spans.pick(mine), owner[mine])


def _kinds(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Slice of each operator, as its index in `CPU_SLICES`."""
    names, place = np.unique(trace.events.name[rows], return_inverse=True)
    kinds = [CPU_SLICES.index(operator_slice(trace.names[name])) for name in names.tolist()]
    return np.array(kinds, dtype=np.int64)[place]


def operator_slice(name: str) -> str:
    """Slice that receives the self time of the operator with this name."""
    return next(kind for kind, fits in _COMPILED if fits(name))


_COMPILED = tuple((kind, re.compile(text, re.DOTALL).fullmatch) for kind, text in KINDS)


def _frames(trace: Trace, thread: int) -> tuple[np.ndarray, Spans]:
    """Rows of a thread's innermost Python frames, and the time of each."""
    events = trace.events
    rows = events.of(Category.PYTHON)
    rows = rows[(events.thread[rows] == thread) & (events.end_ns[rows] > events.start_ns[rows])]
    owner, spans = self_times(events.start_ns[rows], events.end_ns[rows])
    return rows[owner], spans


def _matching(trace: Trace, rows: np.ndarray, pattern: re.Pattern[str]) -> np.ndarray:
    """Mask of the rows whose whole event name matches the pattern."""
    names, place = np.unique(trace.events.name[rows], return_inverse=True)
    fits = [pattern.fullmatch(trace.names[name]) is not None for name in names.tolist()]
    return np.array(fits, dtype=bool)[place]
