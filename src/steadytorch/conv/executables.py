"""Built cuDNN plans that run on PyTorch tensors, and the fallback if a plan cannot run."""

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
"""Alignment in bytes that plans assume: the frontend's default, a power of two."""
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
"""First reason for each problem that fell back to PyTorch in this process, by key."""
MOST_MISSES = 1000
"""Maximum misses kept and logged, to bound memory and logs if every call has new shapes."""
_RIGHT = "results are correct, but the speedup is lost"
TUNE_AGAIN = f"{_RIGHT}: tune again here"

_log = logging.getLogger("steadytorch")
_NOTING = Lock()
_UNALIGNED = f"a tensor's address is not a multiple of {ALIGNMENT} bytes"
_ALIGN = f"pass tensors aligned to {ALIGNMENT} bytes, such as clones"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding, dilation and groups."""
Runner = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Runs a convolution on two operands, a bias and a residual."""


class _Runners(local):
    def __init__(self) -> None:
        self.known: dict[Any, Runner] = {}


RUNNERS = _Runners()
"""Runners by everything that determines the plan; per thread, as cuDNN handles are."""


def note_miss(
    problem: str, engine: str, reason: str, remedy: str = TUNE_AGAIN, of_all: bool = False
) -> None:
    """Record that PyTorch runs a convolution in place of its engine; log the first occurrence.

    Args:
        problem: key of the problem, or a description if it has no key.
        engine: the engine that should have run.
        reason: why it did not run.
        remedy: what the user can do.
        of_all: whether the reason applies to every convolution; then it is logged only once.
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
    """Layout in which a convolution runs: channels last if any of `tensors` is channels last."""
    if any(tensor.dim() in _FORMATS and _channels_innermost(tensor) for tensor in tensors):
        return "last"
    return "first"


def _channels_innermost(tensor: Tensor) -> bool:
    """Whether strides increase in channels-last order: channels, spatial dimensions, batch.

    A 1x1 weight or an image of one channel has the same memory order in both layouts. For a tensor
    that fits both layouts, PyTorch's convolutions decide by strides, and so does this function.
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
    """Describe a call of a convolution as a `ConvProblem`.

    Args:
        x: the input; only shape, dtype and layout are used.
        weight: the weight; only shape, dtype and layout are used.
        bias: whether a bias is added.
        other: whether a residual is added.
        relu: whether a ReLU follows.
        geometry: stride, padding, dilation and groups.

    Raises:
        UnsupportedError: the dtype or the epilogue is not supported.
        UsageError: the sizes do not match.
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
    """Check the operands' shapes, dtypes and devices, since a cuDNN plan gets only addresses.

    Raises:
        UnsupportedError: PyTorch would broadcast or reject an operand.
    """
    wanted = ((weight, problem.weight), (bias, problem.weight[:1]), (other, problem.output))
    for tensor, shape in wanted:
        if tensor is None:
            continue
        found, needed = _described(tensor), (shape, x.dtype, x.device)
        if found != needed:
            raise UnsupportedError(f"an operand is {found}, but engines need {needed}")


def _described(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def number_of(dtype: torch.dtype) -> Number | None:
    """Precision of a dtype's convolutions under PyTorch's settings; None if unsupported."""
    cudnn: Any = torch.backends.cudnn
    if dtype == torch.float32 and cudnn.conv.fp32_precision == "tf32":
        return "tf32"
    return NUMBERS.get(dtype)


class EngineExecutable:
    """A cuDNN plan, built on this thread and ready to run.

    Args:
        problem: the convolution.
        engine: name of the plan; HEURISTIC for the first within the workspace cap.
        device: a CUDA device.

    Attributes:
        name: name of the built plan.
        workspace_bytes: workspace of a call.

    Raises:
        UnsupportedError: the plan does not exist here, is on the denylist, or does not build.
    """

    def __init__(self, problem: ConvProblem, engine: str, device: torch.device) -> None:
        self.problem, self._device = problem, device
        self._handle = handle(device)
        with torch.cuda.device(device):
            if engine == HEURISTIC:
                engine = _first(problem, device)
            where = target(device)
            # The name may come from a stored or imported plan, or from another version of cuDNN.
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
        """Run the plan into a new tensor; call `fallback` if cuDNN fails on these tensors."""
        form = self._format
        first = first.contiguous(memory_format=form)
        second = second.contiguous(memory_format=form)
        bias = None if bias is None else bias.contiguous()
        other = None if other is None else other.contiguous(memory_format=form)
        # With explicit strides, this takes two thirds of the time that a memory format takes.
        y = torch.empty_strided(self._output, self._strides, dtype=self._dtype, device=self._device)
        refused = self._refused(first, second, bias, other, y)
        if refused is None:
            return y
        note_miss(self.problem.key, self.name, *refused)
        del y  # the fallback allocates its own, and memory may be short
        return fallback(first, second, bias, other)

    def _refused(
        self, first: Tensor, second: Tensor, bias: Tensor | None, other: Tensor | None, y: Tensor
    ) -> tuple[str, str] | None:
        """Run the plan; on failure return the reason and a remedy."""
        # The dict is reused between calls; a nested call, as from a finalizer, makes its own.
        pointers = self._spare.pop() if self._spare else {}
        try:
            if _place(pointers, first, second, bias, other, y) % ALIGNMENT:
                return _UNALIGNED, _ALIGN
            scratch = self._scratch()
            self._execute(pointers, 0 if scratch is None else scratch.data_ptr())
        except Exception as error:  # any cuDNN error: the model must still run
            return one_line(error), TUNE_AGAIN
        finally:
            self._spare.append(pointers)
        return None

    def enqueue(self, pointers: dict[int, int], workspace: int) -> bool:
        """Run the plan on the current stream; return False if cuDNN fails.

        Args:
            pointers: addresses by tensor ID of the graph.
            workspace: address of the workspace.
        """
        try:
            self._execute(pointers, workspace)
        except Exception:
            return False
        return True

    def _execute(self, pointers: dict[int, int], workspace: int) -> None:
        own = self._device.index
        if own is not None and own != torch.cuda.current_device():
            with torch.cuda.device(own):  # cuDNN launches on the current device
                self._execute(pointers, workspace)
            return
        number = self._handle.on_current_stream()
        self._graph.execute(self._index, pointers, workspace, number)

    def _scratch(self) -> Tensor | None:
        """Allocate the workspace for one call of the plan.

        PyTorch's allocator orders reuse of memory by stream, shares memory among plans, and uses a
        CUDA graph's own pool during capture. A workspace owned by the plan would be shared by all
        CUDA graphs that captured the plan. CUDA graphs with a shared workspace would race if they
        were replayed on two streams.
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
    """Store the tensors' addresses in `pointers`; return their bitwise OR, to check alignment."""
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
    """Make a runner that uses an engine, or return `fallback` if the engine is unavailable."""
    try:
        version()
    except Exception as error:  # the frontend or cuDNN is missing, for every convolution
        note_miss(problem.key, "its engine", one_line(error), _RIGHT, of_all=True)
        return fallback
    try:
        return partial(EngineExecutable(problem, engine, device).run, fallback)
    except Exception as error:  # any cuDNN error: the model must still run
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
    """Allocate an uninitialised tensor in a memory layout."""
    form = _memory_format(layout, len(shape))
    return torch.empty(shape, dtype=dtype, device=device, memory_format=form)


def as_laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the tensor, copied if it is not dense in `layout`."""
    return tensor.contiguous(memory_format=_memory_format(layout, tensor.dim()))


def _memory_format(layout: Layout, dimensions: int) -> torch.memory_format:
    if layout == "last" and dimensions in _FORMATS:
        return _FORMATS[dimensions]
    return torch.contiguous_format
