"""Detects changed GPU weights by comparing sampled elements, in parallel with tuned calls."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

BLOCK = 16
"""Number of neighbouring elements compared per tensor."""
INTERVAL_NS = 5_000_000
"""Minimum time between two comparisons. One comparison added 29 us to a call of ResNet-50 on an
H100, which is 0.6 % of this."""
WAIT_NS = 3_000_000
"""Maximum wait for a comparison. The device works on the call meanwhile, so the host loses only its
lead. Enough for a preceding average over all weights to finish."""
_SPIN_NS = 100_000
_PAUSE_S = 20e-6
_FIRST = -1
"""High stream priority, so that comparison blocks do not queue behind those of the model."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class DeviceSamples:
    """Finds writes to CUDA tensors that do not increment the version counter of the tensor.

    A comparison is a CUDA graph of a few small kernels on a separate stream. Each comparison waits
    for all work that the caller enqueued before the call, and sets a flag in pinned host memory.
    Before the result of a call is returned, `changed` waits up to `WAIT_NS` for the comparison. If
    a comparison takes longer than `WAIT_NS`, a later call reads its flag.

    Call `begin` before enqueueing the work of a call and `changed` after it.

    Args:
        tensors: the tensors to watch; tensors that are not on CUDA are ignored.

    Attributes:
        is_late: whether a change was found after the result of its call was returned.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        watched = [t for t in tensors if t.device.type == "cuda" and t.numel() and _is_dense(t)]
        devices = dict.fromkeys(t.device for t in watched)
        self._probes = [_Probe(d, [t for t in watched if t.device == d]) for d in devices]
        self._compared_at = 0
        self._is_due = False
        self.is_late = False

    def __bool__(self) -> bool:
        return bool(self._probes)

    def begin(self) -> None:
        """Orders the next comparison behind all work on the current streams, if one is due."""
        now = time.perf_counter_ns()
        if now - self._compared_at < INTERVAL_NS or torch.cuda.is_current_stream_capturing():
            return
        self._compared_at, self._is_due = now, True
        for probe in self._probes:
            probe.mark()

    def changed(self) -> bool:
        """Whether a comparison found changed values; tensors must be at their former addresses."""
        if any(probe.flag.value for probe in self._probes):
            self.is_late = True
            return True
        if not self._is_due:
            return False
        self._is_due = False
        for probe in self._probes:
            probe.compare()
        return any(probe.flag.value for probe in self._probes)

    def differ_now(self) -> bool:
        """Runs a comparison immediately, waits for it, and returns whether values differ."""
        for probe in self._probes:
            probe.mark()
            probe.compare(wait=True)
        return any(probe.flag.value for probe in self._probes)


class _Probe:
    """Compares sampled elements of the tensors on one device.

    Attributes:
        flag: nonzero once a comparison has found changed values.
    """

    def __init__(self, device: torch.device, tensors: list[Tensor]) -> None:
        self._device = device
        self._marked = torch.cuda.Event()
        self._compared = torch.cuda.Event()
        # Tensors made in the caller's inference mode could not be written to outside of it.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            self._pinned = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self.flag = ctypes.c_int32.from_address(self._pinned.data_ptr())
            self._stream = torch.cuda.Stream(device, _FIRST)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                self._graph = self._recorded(tensors)

    def _recorded(self, tensors: list[Tensor]) -> torch.cuda.CUDAGraph:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            block = _block(tensor)
            by_type.setdefault(block.dtype, []).append(block)
        gathers = [_Gather(blocks) for blocks in by_type.values()]
        found = torch.zeros(1, dtype=torch.int32, device=self._device)

        def compare() -> None:
            # bitwise_or_ keeps a finding until it is read, whatever later comparisons find.
            for gather in gathers:
                found.bitwise_or_(gather.differs())
            self._pinned.copy_(found, non_blocking=True)

        compare()
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            compare()
        finally:
            graph.capture_end()
        # Keeps the graph's own tensors alive, but not the weights.
        self._alive = [found, *(gather.release() for gather in gathers)]
        return graph

    def mark(self) -> None:
        """Orders the next comparison behind all work enqueued so far."""
        self._marked.record(torch.cuda.current_stream(self._device))

    def compare(self, wait: bool = False) -> None:
        """Enqueues a comparison; waits for it up to `WAIT_NS`, or until it ends with `wait`."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._marked)
            self._graph.replay()
            self._compared.record(self._stream)
        if wait:
            self._compared.synchronize()
        else:
            _await(self._compared.query)


class _Gather:
    """Gathers sample blocks of one element type into one tensor, and keeps their former values."""

    def __init__(self, blocks: list[Tensor]) -> None:
        self._blocks = blocks
        sizes = [block.numel() for block in blocks]
        self._now = torch.empty(sum(sizes), dtype=blocks[0].dtype, device=blocks[0].device)
        self._slices = list(self._now.split(sizes))
        self._copy()
        self._then = self._now.clone()

    def _copy(self) -> None:
        torch._foreach_copy_(self._slices, self._blocks)

    def differs(self) -> Tensor:
        self._copy()
        return (self._now != self._then).any().int()

    def release(self) -> tuple[Tensor, Tensor]:
        """Drops the sample blocks; returns the tensors that the recorded CUDA graph still uses."""
        self._blocks = self._slices = []
        return self._now, self._then


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps, in any order of dimensions."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    axes = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    expected = 1
    for stride, size in axes:
        if stride != expected:
            return False
        expected *= size
    return True


def _block(tensor: Tensor) -> Tensor:
    """Neighbouring elements from the middle of a dense tensor's memory, as integers."""
    integer = _INTEGERS[tensor.itemsize]
    count = min(BLOCK, tensor.numel())
    begin = tensor.storage_offset() + (tensor.numel() - count) // 2
    return tensor.detach().as_strided((count,), (1,), begin).view(integer)


def _await(is_done: Callable[[], bool]) -> None:
    begin = time.perf_counter_ns()
    while not is_done() and (waited := time.perf_counter_ns() - begin) < WAIT_NS:
        if waited > _SPIN_NS:
            time.sleep(_PAUSE_S)  # lets other threads run
