"""A plan of cuDNN built on this thread for tensors as PyTorch has them, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steadytorch.conv.choices import HEURISTIC
from steadytorch.conv.engines import BIAS, INPUT, OTHER, OUTPUT, WEIGHT, Graph, list_engines
from steadytorch.conv.handles import handle, target
from steadytorch.conv.problem import EPILOGUES, ConvProblem, Layout, Number
from steadytorch.errors import UnsupportedError

ALIGNMENT = 16
"""Bytes to which plans take addresses to be aligned: the frontend's default."""
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
"""Problems that fell back to PyTorch in this process, by key, each with the reason."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding, dilation and groups."""


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
        UnsupportedError: there is no such plan here, or it does not build.
    """

    def __init__(self, problem: ConvProblem, engine: str, device: torch.device) -> None:
        self.problem, self._device = problem, device
        self._handle = handle(device)
        with torch.cuda.device(device):
            if engine == HEURISTIC:
                engine = _first(problem, device)
            self._graph = Graph(problem, target(device), engine)
            if engine not in self._graph.names:
                raise UnsupportedError(f"this cuDNN has no plan {engine} for {problem.key}")
            self._index = self._graph.names.index(engine)
            self.workspace_bytes = self._graph.build(self._index)
        self.name = engine
        self._output = _output_shape(problem)
        self._dtype = DTYPES[problem.number]

    def run(
        self,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        other: Tensor | None,
        fallback: Callable[..., Tensor],
    ) -> Tensor:
        """The result in a new tensor; by `fallback` where cuDNN refuses these tensors."""
        layout = self.problem.layout
        first, second = as_laid_out(first, layout), as_laid_out(second, layout)
        pointers = {INPUT: first.data_ptr(), WEIGHT: second.data_ptr()}
        if bias is not None:
            bias = bias.contiguous()
            pointers[BIAS] = bias.data_ptr()
        if other is not None:
            other = as_laid_out(other, layout)
            pointers[OTHER] = other.data_ptr()
        if any(pointer % ALIGNMENT for pointer in pointers.values()):
            return fallback(first, second, bias, other)
        y = empty(self._output, self._dtype, self._device, layout)
        pointers[OUTPUT] = y.data_ptr()
        return y if self.enqueue(pointers) else fallback(first, second, bias, other)

    def enqueue(self, pointers: dict[int, int], workspace: int | None = None) -> bool:
        """Runs on the current stream; False where cuDNN refuses.

        Args:
            pointers: addresses by tensor of the graph.
            workspace: address of scratch memory; None to take some for this call.
        """
        scratch = None
        try:
            if workspace is None and self.workspace_bytes:
                # Taken per call: the allocator orders its reuse by stream, and keeps it in a
                # graph's own pool while one is recorded.
                scratch = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self._device)
                workspace = scratch.data_ptr()
            number = self._handle.on_current_stream()
            self._graph.execute(self._index, pointers, workspace or 0, number)
        except Exception as error:
            MISSES[self.problem.key] = f"{self.name}: {error}"
            return False
        return True


def _first(problem: ConvProblem, device: torch.device) -> str:
    for engine in list_engines(problem, target(device)):
        if engine.excluded is None:
            return engine.name
    raise UnsupportedError(f"every plan for {problem.key} is excluded")


def _output_shape(problem: ConvProblem) -> tuple[int, ...]:
    return {"fprop": problem.output, "dgrad": problem.input, "wgrad": problem.weight}[
        problem.operation
    ]


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: Layout
) -> Tensor:
    """A new tensor of this layout, its values undefined."""
    memory_format = torch.contiguous_format
    if layout == "last" and len(shape) in _FORMATS:
        memory_format = _FORMATS[len(shape)]
    return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)


def as_laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor, or a copy of it that is dense in this layout."""
    if layout == "last" and tensor.dim() in _FORMATS:
        return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])
    return tensor.contiguous()
