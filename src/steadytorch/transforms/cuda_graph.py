"""Records the whole step as one CUDA graph and replays it."""

from __future__ import annotations

import gc
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.graphs.graph_io_patching import Linked, link, placer
from steadytorch.graphs.pointers import rest
from steadytorch.graphs.recording import first_cause, recording
from steadytorch.graphs.static_buffers import Results, StaticInputs, feeder, results, static_inputs
from steadytorch.rewrite.conversion import own_device
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import INFERENCE_ONLY, decide, hooked, no_cuda, off_device
from steadytorch.workload.containers import Lent
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

_WARMUP_CALLS = 3
_WRITES_INPUTS = "the model writes to its inputs, which a replay would do to its copies of them"
_WRITES_CONTAINERS = "the model writes to a container it is given, which a replay does not"


class CudaGraph(Transform):
    """One launch per call instead of one per kernel.

    A call copies its tensors into static inputs, by nodes of the graph where these can do it,
    replays, and returns copies of the outputs. The copies are ordered on the caller's current
    stream. Arguments that are no tensors are recorded as constants, and so is every decision that
    the model takes on the host. Calls from several threads take turns. A call within the recording
    of another graph becomes a part of that one.

    The yielded model has three more attributes: `static_inputs`, the arguments at fixed addresses
    (passing one of these tensors saves its copy); `exact`, the same call without a check of the
    signature; and `aliasing`, the same call, but it returns the graph's own buffers, which the next
    call overwrites.
    """

    name = "cuda_graph"
    risk = Risk.EXACT
    records = True

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Graph capture."""
        return (Claim.CAPTURE,)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, inference, no hooks, and all inputs on the device.

        Whether the step can be recorded is seen in `applied`.
        """
        return decide(
            no_cuda(facts),
            (workload.is_training, INFERENCE_ONLY),
            hooked(workload),
            off_device(workload),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Runs the model a few times, records it, and yields a workload that replays it.

        Raises:
            UnsupportedError: the step cannot be recorded; the message says what CUDA refused.
        """
        hooks, reason = hooked(workload)  # those of a stored plan's model may be new
        if hooks:
            raise UnsupportedError(reason)
        device = own_device(workload)
        with torch.cuda.device(device):
            pool = _pool_of(workload.untouched, torch.cuda.current_device())
            static = static_inputs(workload.inputs, workload.kwargs)
            graph, recorded = _record(workload.model, static, pool)
        pool.graphs += 1
        try:
            yield workload.with_model(_replayer(recorded))
        finally:
            with pool.lock:
                pool.graphs -= 1
                for node in recorded.linked.inputs:
                    node.close()
                # A replay may still be running, in memory that resetting gives back.
                torch.cuda.synchronize(device)
                graph.reset()


class _Memory:
    """Where the memory of a pool lies.

    Args:
        handle: of the pool.
    """

    def __init__(self, handle: tuple[int, int]) -> None:
        self._handle = tuple(handle)
        self._starts: list[int] = []
        self._segments: list[range] = []

    def look(self) -> None:
        """Finds out where it is now: a recording may make it larger."""
        self._segments = [
            range(segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._handle
        ]
        self._segments.sort(key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._segments]

    def around(self, address: int) -> range | None:
        """The segment that an address lies in; None if it lies elsewhere."""
        at = bisect_right(self._starts, address)
        return self._segments[at - 1] if at and address in self._segments[at - 1] else None


class _Pool:
    """Memory that the graphs of one model share, and the order of their replays.

    Sharing is sound only if no two of them run at once: `lock` orders their launches, and `follow`
    makes a stream wait for the one of the replay before.
    """

    def __init__(self, index: int) -> None:
        from torch._C import _cuda_getCurrentRawStream, _cuda_isCurrentStreamCapturing

        self.index = index
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(index)
        self.graphs = 0
        self.memory = _Memory(self.handle)
        self.lock = threading.Lock()
        # A stream's address, where `torch.cuda.current_stream` would make an object at each call.
        self.address: Callable[[int], int] = _cuda_getCurrentRawStream
        self.is_recording: Callable[[], bool] = _cuda_isCurrentStreamCapturing
        self.last_address: int | None = None
        self.last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Makes replays run on the current stream, after what the last one was given."""
        current = torch.cuda.current_stream(self.index)
        if self.last is not None:
            current.wait_stream(self.last)
        self.last, self.last_address = current, current.cuda_stream


# Weak on both sides: neither the model nor the pool lives longer for being known here.
_POOLS: weakref.WeakKeyDictionary[Any, weakref.ref[_Pool]] = weakref.WeakKeyDictionary()


def _pool_of(model: Any, index: int) -> _Pool:
    try:
        known = _POOLS.get(model)
        pool = None if known is None else known()
        # PyTorch cannot use a pool again once its last graph is gone.
        if pool is None or pool.index != index or not pool.graphs:
            pool = _Pool(index)
            _POOLS[model] = weakref.ref(pool)
    except TypeError:  # a callable that has no hash, or cannot be referred to weakly
        pool = _Pool(index)
    return pool


def _record(
    model: Any, static: StaticInputs, pool: _Pool
) -> tuple[torch.cuda.CUDAGraph, _Recorded]:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # Past the method in Python that stands before the one that launches.
    replay = super(torch.cuda.CUDAGraph, graph).replay
    current = torch.cuda.current_stream(pool.index)
    with torch.no_grad():
        pool.stream.wait_stream(current)
        # This puts the stream back; torch.cuda.graph does not when recording fails.
        with torch.cuda.stream(pool.stream):
            before = _versions(static)
            # It may compile. Memory is not the pool's yet, so that other graphs go on.
            lent = Lent(tuple(static))
            args, kwargs = lent.arguments
            for _ in range(_WARMUP_CALLS):
                model(*args, **kwargs)
            if _versions(static) != before:
                raise UnsupportedError(_WRITES_INPUTS)
            if lent.is_written():
                raise UnsupportedError(_WRITES_CONTAINERS)
            try:
                with pool.lock, _collector_paused():  # `link` may record as well
                    pool.follow()  # what proves links replays it, in memory that others use
                    with recording(graph, pool.handle, pool.stream):
                        outputs = model(*args, **kwargs)
                    pool.memory.look()
                    inputs, around = tensors_of(tuple(static)), pool.memory.around
                    linked = link(graph, replay, inputs, tensors_of(outputs), around)
            except Exception as error:
                raise UnsupportedError(
                    f"the step cannot be recorded as a CUDA graph: {first_cause(error)}"
                ) from error
        current.wait_stream(pool.stream)
    return graph, _Recorded(replay, linked, static, outputs, pool, model)


def _versions(static: StaticInputs) -> list[int]:
    return [tensor._version for tensor in tensors_of(tuple(static))]


@contextmanager
def _collector_paused() -> Iterator[None]:
    # A collection during capture may free memory of the device, which CUDA refuses then.
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Recorded(NamedTuple):
    """What a replay needs; `model` is what was recorded."""

    replay: Callable[[], None]
    linked: Linked
    static: StaticInputs
    outputs: Any
    pool: _Pool
    model: Callable[..., Any]


def _replayer(recorded: _Recorded) -> Callable[..., Any]:
    # Replays need no grad mode, so callers set none; the model within a recording does.
    recorded = recorded._replace(model=torch.no_grad()(recorded.model))
    args, kwargs = recorded.static
    copies, own = _results(recorded)
    call = exact = _general_replayer(recorded, copies)
    aliasing = _general_replayer(recorded, own)
    if (
        recorded.linked.inputs
        and not kwargs
        and len(args) == 1
        and isinstance(args[0], torch.Tensor)
    ):
        exact, aliasing = _exact_replayer(recorded, copies), _exact_replayer(recorded, own)
        call = _single_replayer(args[0], exact, call)
    vars(call).update(static_inputs=recorded.static, exact=exact, aliasing=aliasing)
    return call


def _results(recorded: _Recorded) -> tuple[Results, Results]:
    """Results that stay as they are, and the graph's own outputs."""
    outputs, pointers = tensors_of(recorded.outputs), recorded.linked.outputs
    placers = [
        None if pointer is None else placer(pointer, output)
        for pointer, output in zip(pointers, outputs, strict=True)
    ]
    moved = [pointer for pointer in pointers if pointer is not None]

    def rest_all() -> None:
        for pointer in moved:
            rest(pointer)

    return results(recorded.outputs, placers), Results(rest_all, lambda placed: recorded.outputs)


def _general_replayer(recorded: _Recorded, found: Results) -> Callable[..., Any]:
    feed = feeder(recorded.static, [node.feed for node in recorded.linked.inputs])
    place, collect = found
    replay, pool, model = recorded.replay, recorded.pool, recorded.model
    lock, address, index, is_recording = pool.lock, pool.address, pool.index, pool.is_recording

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_recording():
            return model(*args, **kwargs)
        with lock:
            if address(index) != pool.last_address:
                pool.follow()
            feed(args, kwargs)
            placed = place()
            replay()
            return collect(placed)

    return call


def _exact_replayer(recorded: _Recorded, found: Results) -> Callable[[torch.Tensor], Any]:
    """The same for the most common call, with nothing on the way that it does not need."""
    replay, pool, model = recorded.replay, recorded.pool, recorded.model
    node, (place, collect) = recorded.linked.inputs[0], found
    lock, address, index, is_recording = pool.lock, pool.address, pool.index, pool.is_recording
    move = node.mover()

    def exact(x: torch.Tensor, /) -> Any:
        if is_recording():
            return model(x)
        with lock:
            if address(index) != pool.last_address:
                pool.follow()
            at = x.data_ptr()
            if at != node.source or x.is_neg():
                move(x, at)
            placed = place()
            replay()
            return collect(placed)

    return exact


def _single_replayer(
    static: torch.Tensor, exact: Callable[..., Any], general: Callable[..., Any]
) -> Callable[[torch.Tensor], Any]:
    """Takes the short way with tensors of the recorded signature, and converts all others."""
    expected = (static.shape, static.stride(), static.dtype, static.device)

    def call(x: torch.Tensor, /) -> Any:
        is_plain = type(x) is torch.Tensor
        is_exact = is_plain and (x.shape, x.stride(), x.dtype, x.device) == expected
        return exact(x) if is_exact else general(x)

    return call
