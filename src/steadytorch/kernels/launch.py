"""Launches Triton kernels with little host overhead, and checks which tensors are supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad

from steadytorch.kernels import ahead

ALIGNMENT = 16
"""Bytes. Triton compiles separate kernels for addresses that are and are not multiples of this."""
MOST_ELEMENTS = 2**31 - 2**16
"""Maximum elements: offsets are 32-bit, and a block may overshoot the end by less than 2**16."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Supported dtypes; all convert exactly to float32, in which the kernels compute."""


@cache
def is_installed() -> bool:
    """Whether Triton is installed; does not import it."""
    return find_spec("triton") is not None


def is_covered(*tensors: Tensor) -> bool:
    """Whether a kernel can run on these tensors: CUDA, one dtype, not empty, not too large."""
    first = tensors[0]
    return first.is_cuda and is_installed() and all(is_launchable(t, first.dtype) for t in tensors)


def is_launchable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether this tensor, on any device, has the supported type `dtype` and a supported size."""
    return tensor.dtype is dtype and dtype in TYPES and 0 < tensor.numel() <= MOST_ELEMENTS


def is_channels_last(tensor: Tensor) -> bool | None:
    """Whether a tensor is channels_last; None if it is neither channels_last nor contiguous.

    A tensor that is both channels_last and contiguous, for example with one channel, counts as
    contiguous. A single image with an unusual batch stride, such as a permuted (H, W, C) image,
    gives None, because PyTorch's results for it are contiguous.
    """
    if tensor.is_contiguous():
        return False
    if tensor.dim() != 4:
        return None
    _, channels, height, width = tensor.shape
    last = (channels * height * width, 1, width * channels, channels)
    return True if tensor.stride() == last else None


Function = Callable[..., Tensor]


def route(bare: Function, operator: Function, eager: Function, *tensors: Tensor) -> Function:
    """Choose one of three equivalent implementations of an operator for a call.

    Args:
        bare: fast path, without the dispatcher: saves 10 us of host time; the launch takes 5 us.
        operator: for autograd, compilers, tracers, modes, tensor subclasses, and views with a lazy
            negation.
        eager: for `torch.func` transforms and dual numbers, which have no rules for custom
            operators.
        tensors: tensor arguments of the call.
    """
    if torch.compiler.is_compiling():
        return operator
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return eager
    return bare if all(map(_is_unwatched, tensors)) else operator


def _is_unwatched(tensor: Tensor) -> bool:
    return not (
        type(tensor) is not Tensor
        or not tensor.is_cuda
        or tensor.is_neg()
        or (torch.is_grad_enabled() and tensor.requires_grad)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )


_traced: ContextVar[torch.dtype | None] = ContextVar("_traced", default=None)
"""Dtype of the fake tensors that are being traced; None outside of tracing."""
_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)
"""Whether tracing is inside the eager form of another fused operator, whose kernel will run."""


def traced(find: Callable[..., Any], eager: Function) -> Function:
    """Make an operator's fake-tensor function: runs `eager` while a thread compiles the kernel.

    Args:
        find: makes the launch for the operator's arguments, as for real tensors.
        eager: reference implementation; also runs on fake tensors.
    """

    def fake(*given: Any, **named: Any) -> Tensor:
        found = None
        tensors = [t for t in (*given, *named.values()) if isinstance(t, Tensor)]
        is_asked = torch.cuda.is_initialized() and not _is_within.get()
        if is_asked and all(map(_is_concrete, tensors)) and is_covered(*tensors):
            token = _traced.set(tensors[0].dtype)
            try:
                with suppress(Exception), unset_fake_temporarily():  # the later call will raise it
                    found = find(*given, **named)
            finally:
                _traced.reset(token)
        if found is None:
            return eager(*given, **named)
        token = _is_within.set(True)
        try:
            return eager(*given, **named)
        finally:
            _is_within.reset(token)

    return fake


def _is_concrete(tensor: Tensor) -> bool:
    """Whether all sizes and strides are plain ints; comparing symbolic sizes would add guards."""
    return all(type(size) is int for size in (*tensor.shape, *tensor.stride()))


class Launch:
    """A kernel with its grid and non-tensor arguments, for tensors of fixed shapes and type.

    The first call goes through Triton's compiler and cache. Later calls pass addresses straight to
    the compiled kernel and skip Triton's check of each argument. During tracing, the constructor
    starts the compilation in a thread; see `ahead`.

    Args:
        program: a function decorated with `triton.jit`.
        grid: number of programs along each of three axes.
        arguments: arguments after the tensors: sizes, then constants, in the kernel's order.
        device: device of the tensors.
        warps: warps of 32 threads per program.
        options: other Triton launch options, by name.
    """

    def __init__(
        self,
        program: Any,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        device: torch.device,
        warps: int = 4,
        options: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._program, self._grid, self._arguments = program, grid, tuple(arguments)
        self._device, self._options = device, {"num_warps": warps, **options}
        self._compiled: Any = None
        dtype = _traced.get()
        if dtype is not None:
            count = len(program.arg_names) - len(self._arguments)
            with torch.cuda.device(device):
                ahead.begin(program, dtype, count, self._arguments, self._options)

    def __call__(self, *tensors: Tensor) -> None:
        """Enqueue the kernel on the current stream of the tensors' device."""
        if self._device.type != "cuda" or self._device.index == torch.cuda.current_device():
            self._launch(tensors)
        else:
            with torch.cuda.device(self._device):
                self._launch(tensors)

    def _launch(self, tensors: Sequence[Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        is_aligned = not any(address % ALIGNMENT for address in addresses)
        compiled = self._compiled
        if compiled is None or not is_aligned:
            given = (*tensors, *self._arguments)
            compiled = ahead.call(self._program, self._grid, given, self._options)
            if is_aligned:  # `compiled` is None in Triton's interpreter
                self._compiled = compiled
            return
        # Faster than torch.cuda.current_stream, which creates a Stream object.
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        started_with = (stream, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*self._grid, *started_with, *addresses, *self._arguments)
