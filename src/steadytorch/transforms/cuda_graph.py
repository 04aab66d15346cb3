"""Records a whole model call as one CUDA graph and replays it."""

from __future__ import annotations

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
from steadytorch.graphs.recording import collector_paused, first_cause, recording
from steadytorch.graphs.static_buffers import Results, StaticInputs, feeder, results, static_inputs
from steadytorch.rewrite.conversion import own_device
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import INFERENCE_ONLY, decide, hooked, no_cuda, off_device
from steadytorch.workload.containers import BorrowedArguments
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

_WARMUP_CALLS = 3
_WRITES_INPUTS = "the model writes to its inputs, but a replay would write to copies of them"
_WRITES_CONTAINERS = "the model writes to a list or dict argument, which a replay would not repeat"


class CudaGraph(Transform):
    """Records the model call as one CUDA graph: one launch per call instead of one per kernel.

    Where possible, the graph reads the caller's tensors and writes to new output tensors directly.
    Inputs and outputs that the graph cannot access directly are copied to and from static buffers.
    Copies and replay run on the caller's current stream.

    Non-tensor arguments and host control flow are fixed when the graph is recorded. Calls from
    several threads take turns. A call during another graph's capture runs the model, which becomes
    part of that graph.

    The yielded model has three extra attributes:

    - `static_inputs`: the arguments at fixed addresses; passing one of them saves a copy.
    - `exact`: same call, but does not check the input signature.
    - `aliasing`: same call, but returns the graph's own buffers, which the next call overwrites.
    """

    name = "cuda_graph"
    risk = Risk.EXACT
    records = True

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Graph capture."""
        return (Claim.CAPTURE,)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, inference, a model without hooks, and all inputs on the device.

        Whether the call can be recorded is tested by `applied`, not by this method.
        """
        return decide(
            no_cuda(facts),
            (workload.is_training, INFERENCE_ONLY),
            hooked(workload),
            off_device(workload),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Run the model a few times, record a call, and yield a workload that replays the graph.

        Raises:
            UnsupportedError: the step cannot be recorded; the message names CUDA's error.
        """
        hooks, reason = hooked(workload)  # a stored plan's model may have got hooks since
        if hooks:
            raise UnsupportedError(reason)
        device = own_device(workload)
        with torch.cuda.device(device):
            pool = _pool_of(workload.untouched, torch.cuda.current_device())
            static = static_inputs(workload.inputs, workload.kwargs)
            graph, recorded = record(workload.model, static, pool)
        pool.graphs += 1
        try:
            yield workload.with_model(replayer(recorded))
        finally:
            with pool.lock:
                pool.graphs -= 1
                for node in recorded.linked.inputs:
                    node.close()
                # Resetting frees memory that a running replay may still use.
                torch.cuda.synchronize(device)
                graph.reset()


class PoolMemory:
    """Address ranges of a CUDA graph memory pool.

    Args:
        handle: the pool's handle.
    """

    def __init__(self, handle: tuple[int, int]) -> None:
        self._handle = tuple(handle)
        self._starts: list[int] = []
        self._segments: list[range] = []

    def look(self) -> None:
        """Refresh the address ranges, since a recording may have grown the pool."""
        self._segments = [
            range(segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._handle
        ]
        self._segments.sort(key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._segments]

    def around(self, address: int) -> range | None:
        """Return the pool segment that contains an address, or None."""
        at = bisect_right(self._starts, address)
        return self._segments[at - 1] if at and address in self._segments[at - 1] else None


class Pool:
    """Memory pool shared by the CUDA graphs of one model; orders their replays.

    Sharing memory is safe only if no two graphs run at once. `lock` serialises launches, and
    `follow` makes a stream wait for the stream of the previous replay.
    """

    def __init__(self, index: int) -> None:
        from torch._C import _cuda_getCurrentRawStream, _cuda_isCurrentStreamCapturing

        self.index = index
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(index)
        self.graphs = 0
        self.memory = PoolMemory(self.handle)
        self.lock = threading.Lock()
        # The raw stream: `torch.cuda.current_stream` would create an object at each call.
        self.address: Callable[[int], int] = _cuda_getCurrentRawStream
        self.is_recording: Callable[[], bool] = _cuda_isCurrentStreamCapturing
        self.last_address: int | None = None
        self.last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Move replays to the current stream, which first waits for the previous replay stream."""
        current = torch.cuda.current_stream(self.index)
        if self.last is not None:
            current.wait_stream(self.last)
        self.last, self.last_address = current, current.cuda_stream


# Weak on both sides, so that this table keeps neither models nor pools alive.
_POOLS: weakref.WeakKeyDictionary[Any, weakref.ref[Pool]] = weakref.WeakKeyDictionary()


def _pool_of(model: Any, index: int) -> Pool:
    try:
        known = _POOLS.get(model)
        pool = None if known is None else known()
        # PyTorch cannot reuse a pool after its last graph is gone.
        if pool is None or pool.index != index or not pool.graphs:
            pool = Pool(index)
            _POOLS[model] = weakref.ref(pool)
    except TypeError:  # unhashable, or without weak references
        pool = Pool(index)
    return pool


def record(model: Any, static: StaticInputs, pool: Pool) -> tuple[torch.cuda.CUDAGraph, Recorded]:
    """Run a model a few times, then record a call as a CUDA graph.

    Args:
        model: the callable to record.
        static: the arguments, in memory that the graph reads.
        pool: the memory that the graph uses.

    Raises:
        UnsupportedError: the model writes to its arguments, or the call cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # Skip the Python wrapper around the C++ replay.
    replay = super(torch.cuda.CUDAGraph, graph).replay
    current = torch.cuda.current_stream(pool.index)
    with torch.no_grad():
        pool.stream.wait_stream(current)
        # Restores the stream; torch.cuda.graph does not if recording fails.
        with torch.cuda.stream(pool.stream):
            before = _versions(static)
            # These calls may compile. They allocate outside the pool, so other graphs keep running.
            borrowed = BorrowedArguments(tuple(static))
            args, kwargs = borrowed.arguments
            for _ in range(_WARMUP_CALLS):
                model(*args, **kwargs)
            if _versions(static) != before:
                raise UnsupportedError(_WRITES_INPUTS)
            if borrowed.is_written():
                raise UnsupportedError(_WRITES_CONTAINERS)
            try:
                with pool.lock, collector_paused():  # `link` may record too
                    pool.follow()  # `link` replays the graph in memory that other graphs share
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
    return graph, Recorded(replay, linked, static, outputs, pool, model)


def _versions(static: StaticInputs) -> list[int]:
    return [tensor._version for tensor in tensors_of(tuple(static))]


class Recorded(NamedTuple):
    """A recorded CUDA graph with its inputs, outputs and pool; `model` is the recorded callable."""

    replay: Callable[[], None]
    linked: Linked
    static: StaticInputs
    outputs: Any
    pool: Pool
    model: Callable[..., Any]


def replayer(recorded: Recorded) -> Callable[..., Any]:
    """Make a function that replays a recorded graph on the arguments of each call."""
    # Callers set no grad mode, since replays ignore it; a call during another capture needs it.
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


def _results(recorded: Recorded) -> tuple[Results, Results]:
    """Return two `Results`: one for outputs that survive the next call, one for graph buffers."""
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


def _general_replayer(recorded: Recorded, found: Results) -> Callable[..., Any]:
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


def _exact_replayer(recorded: Recorded, found: Results) -> Callable[[torch.Tensor], Any]:
    """Make the fast path for calls with one tensor of the recorded signature."""
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
    """Pass tensors of the recorded signature to the fast path `exact`, all others to `general`."""
    expected = (static.shape, static.stride(), static.dtype, static.device)

    def call(x: torch.Tensor, /) -> Any:
        is_plain = type(x) is torch.Tensor
        is_exact = is_plain and (x.shape, x.stride(), x.dtype, x.device) == expected
        return exact(x) if is_exact else general(x)

    return call
