"""A plan of cuDNN built on this thread for tensors as PyTorch has them, and how it is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor

from steadytorch.conv.choices import HEURISTIC
from steadytorch.conv.denylist import denied
from steadytorch.conv.engines import BIAS, INPUT, OTHER, OUTPUT, WEIGHT, Graph, list_engines
from steadytorch.conv.frontend import version
from steadytorch.conv.handles import handle, target
from steadytorch.conv.problem import EPILOGUES, ConvProblem, Layout, Number
from steadytorch.errors import UnsupportedError, one_line

ALIGNMENT = 16
"""Bytes to which plans take addresses to be aligned, a power of two: the frontend's default."""
NUMBERS: dict[torch.dtype, Number] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
MISSES: dict[str, str] = {}
"""Problems that fell back to PyTorch in this process, by key, each with the first reason."""
MOST_MISSES = 1000
"""That are kept and logged: where every call has other shapes, the rest says nothing new."""
_RIGHT = "results are right, the gain is lost"
TUNE_AGAIN = f"{_RIGHT}: tune again here"

_log = logging.getLogger("steadytorch")
_NOTING = Lock()
_UNALIGNED = f"a tensor's address is no multiple of {ALIGNMENT} bytes"
_ALIGN = "give it tensors that start where their memory does"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding, dilation and groups."""
Runner = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Runs a convolution on its two operands, the bias and the residual."""


class _Runners(local):
    def __init__(self) -> None:
        self.known: dict[Any, Runner] = {}


RUNNERS = _Runners()
"""What runs a call, by all that decides it; of each thread its own, as handles of cuDNN are."""


def note_miss(
    problem: str, engine: str, reason: str, remedy: str = TUNE_AGAIN, of_all: bool = False
) -> None:
    """Notes that PyTorch runs a convolution in place of its engine, and logs it the first time.

    Args:
        problem: its key, or other words for one that has none.
        engine: that was to run it.
        reason: why it did not.
        remedy: what to do.
        of_all: whether the reason holds for every convolution; it is then logged once for all.
    """
    with _NOTING:
        if problem in MISSES or len(MISSES) >= MOST_MISSES:
            return
        told = of_all and reason in MISSES.values()
        MISSES[problem] = reason
    if told:
        return
    named = ("every convolution" if of_all else problem, engine or "cuDNN's first suggestion")
    _log.warning("PyTorch runs %s in place of %s: %s; %s", *named, reason, remedy)


def memory_layout(*tensors: Tensor) -> Layout:
    """The layout in which a convolution of these runs: channels last if any of them is."""
    if any(tensor.dim() in _FORMATS and _channels_innermost(tensor) for tensor in tensors):
        return "last"
    return "first"


def _channels_innermost(tensor: Tensor) -> bool:
    """Whether strides rise from the channels over the spatial dimensions to the batch.

    Strides decide, not addresses: a weight of one row and column, or an image of one channel, can
    be read either way, and PyTorch's convolutions go by the strides it was given.
    """
    step = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride = tensor.stride(axis)
        if stride < max(step, 1) or (axis == 0 and step == tensor.stride(1)):
            return False
        step = stride * max(tensor.shape[axis], 1)
    return True


def problem_of(
    x: Tensor,
    weight: Tensor,
    bias: bool,
    other: bool,
    relu: bool,
    geometry: Geometry,
) -> ConvProblem:
    """The problem that a call poses.

    Args:
        x: the input, of which shape, type and layout count.
        weight: likewise.
        bias: whether one is added.
        other: whether a residual is added.
        relu: whether a ReLU follows.
        geometry: stride, padding, dilation and groups.

    Raises:
        UnsupportedError: an element type or an epilogue that has no name here.
        UsageError: sizes that do not fit.
    """
    number, epilogue = number_of(x.dtype), EPILOGUES.get((bias, other, relu))
    if number is None or epilogue is None or weight.dtype != x.dtype:
        raise UnsupportedError(
            f"no engines for {x.dtype} with a weight of {weight.dtype}, bias {bias}, "
            f"add {other}, ReLU {relu}"
        )
    stride, padding, dilation, groups = geometry
    return ConvProblem(
        operation="fprop",
        epilogue=epilogue,
        number=number,
        layout=memory_layout(x, weight),
        input=tuple(x.shape),
        weight=tuple(weight.shape),
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=groups,
    )


def check_operands(
    problem: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None
) -> None:
    """Sees that operands are what a plan reads, which takes addresses alone.

    Raises:
        UnsupportedError: one that PyTorch would broadcast, or refuse.
    """
    wanted = ((weight, problem.weight), (bias, problem.weight[:1]), (other, problem.output))
    for tensor, shape in wanted:
        if tensor is None:
            continue
        found, needed = _described(tensor), (shape, x.dtype, x.device)
        if found != needed:
            raise UnsupportedError(f"an operand is {found}, engines read {needed}")


def _described(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def number_of(dtype: torch.dtype) -> Number | None:
    """What this process lets convolutions of an element type compute in; None for other types."""
    cudnn: Any = torch.backends.cudnn
    if dtype == torch.float32 and cudnn.conv.fp32_precision == "tf32":
        return "tf32"
    return NUMBERS.get(dtype)


class Plan:
    """A plan of cuDNN, built on this thread and ready to run.

    Args:
        problem: what it computes.
        engine: its name; HEURISTIC for the first that builds within the cap on workspace.
        device: where.

    Attributes:
        name: of the plan that was built.
        workspace_bytes: scratch memory of a call.

    Raises:
        UnsupportedError: there is no such plan here, it is faulty, or it does not build.
    """

    def __init__(self, problem: ConvProblem, engine: str, device: torch.device) -> None:
        self.problem, self._device = problem, device
        self._handle = handle(device)
        with torch.cuda.device(device):
            if engine == HEURISTIC:
                engine = _first(problem, device)
            where = target(device)
            # Names also come from stored and imported plans, and from other versions of cuDNN.
            if (reason := denied(problem, engine, version(), where.capability)) is not None:
                raise UnsupportedError(reason)
            self._graph = Graph(problem, where, engine)
            if engine not in self._graph.names:
                raise UnsupportedError(f"this cuDNN has no plan {engine} for {problem.key}")
            self._index = self._graph.names.index(engine)
            self.workspace_bytes = self._graph.build(self._index)
        self.name = engine
        self._dtype, layout = DTYPES[problem.number], problem.layout
        self._output = problem.result
        self._format = _memory_format(layout, len(self._output))
        self._strides = empty(self._output, self._dtype, torch.device("meta"), layout).stride()
        self._spare: list[dict[int, int]] = []

    def run(
        self,
        fallback: Runner,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        other: Tensor | None,
    ) -> Tensor:
        """The result in a new tensor; by `fallback` where cuDNN refuses these tensors."""
        form = self._format
        first = first.contiguous(memory_format=form)
        second = second.contiguous(memory_format=form)
        bias = None if bias is None else bias.contiguous()
        other = None if other is None else other.contiguous(memory_format=form)
        # By strides: two thirds of the time that it takes by memory format.
        y = torch.empty_strided(self._output, self._strides, dtype=self._dtype, device=self._device)
        refused = self._refused(first, second, bias, other, y)
        if refused is None:
            return y
        note_miss(self.problem.key, self.name, *refused)
        del y  # PyTorch makes its own, perhaps for want of memory
        return fallback(first, second, bias, other)

    def _refused(
        self, first: Tensor, second: Tensor, bias: Tensor | None, other: Tensor | None, y: Tensor
    ) -> tuple[str, str] | None:
        """Runs it; where that cannot be, the reason and what to do."""
        # Kept from call to call; one amid another, as of a finalizer, finds none and makes its own.
        pointers = self._spare.pop() if self._spare else {}
        try:
            if _place(pointers, first, second, bias, other, y) % ALIGNMENT:
                return _UNALIGNED, _ALIGN
            scratch = self._scratch()
            self._execute(pointers, 0 if scratch is None else scratch.data_ptr())
        except Exception as error:  # whatever cuDNN says, the model must run
            return one_line(error), TUNE_AGAIN
        finally:
            self._spare.append(pointers)
        return None

    def enqueue(self, pointers: dict[int, int], workspace: int) -> bool:
        """Runs on the current stream; False where cuDNN refuses.

        Args:
            pointers: addresses by tensor of the graph.
            workspace: address of scratch memory.
        """
        try:
            self._execute(pointers, workspace)
        except Exception:
            return False
        return True

    def _execute(self, pointers: dict[int, int], workspace: int) -> None:
        own = self._device.index
        if own is not None and own != torch.cuda.current_device():
            with torch.cuda.device(own):  # cuDNN launches on the one that is current
                self._execute(pointers, workspace)
            return
        number = self._handle.on_current_stream()
        self._graph.execute(self._index, pointers, workspace, number)

    def _scratch(self) -> Tensor | None:
        """Memory for one call.

        The allocator orders its reuse by stream and shares it among plans, and keeps it in a
        graph's own pool while one is recorded. Memory kept by the plan would be written to by
        every graph that recorded it, at once where they are replayed on two streams.
        """
        if not self.workspace_bytes:
            return None
        return torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self._device)


def _place(
    pointers: dict[int, int],
    first: Tensor,
    second: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    y: Tensor,
) -> int:
    """Writes addresses by tensor of the graph, always of the same; returns all of their bits."""
    pointers[INPUT], pointers[WEIGHT] = first.data_ptr(), second.data_ptr()
    pointers[OUTPUT] = y.data_ptr()
    bits = pointers[INPUT] | pointers[WEIGHT]
    if bias is not None:
        pointers[BIAS] = bias.data_ptr()
        bits |= pointers[BIAS]
    if other is not None:
        pointers[OTHER] = other.data_ptr()
        bits |= pointers[OTHER]
    return bits


def planned(problem: ConvProblem, engine: str, device: torch.device, fallback: Runner) -> Runner:
    """What runs a problem by an engine, and by `fallback` where that cannot be."""
    try:
        version()
    except Exception as error:  # the frontend or cuDNN is missing: so it is for all
        note_miss(problem.key, "its engine", one_line(error), _RIGHT, of_all=True)
        return fallback
    try:
        return partial(Plan(problem, engine, device).run, fallback)
    except Exception as error:  # whatever cuDNN says, the model must run
        note_miss(problem.key, engine, one_line(error))
        return fallback


def _first(problem: ConvProblem, device: torch.device) -> str:
    for engine in list_engines(problem, target(device)):
        if engine.excluded is None:
            return engine.name
    raise UnsupportedError(f"every plan for {problem.key} is excluded")


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: Layout
) -> Tensor:
    """A new tensor of this layout, its values undefined."""
    form = _memory_format(layout, len(shape))
    return torch.empty(shape, dtype=dtype, device=device, memory_format=form)


def as_laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor, or a copy of it that is dense in this layout."""
    return tensor.contiguous(memory_format=_memory_format(layout, tensor.dim()))


def _memory_format(layout: Layout, dimensions: int) -> torch.memory_format:
    if layout == "last" and dimensions in _FORMATS:
        return _FORMATS[dimensions]
    return torch.contiguous_format
