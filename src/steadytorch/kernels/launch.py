"""Launching Triton programs with little host time, and saying when there is nothing to launch."""

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
"""Bytes: Triton compiles one program for addresses that are multiples of it, another for others."""
MOST_ELEMENTS = 2**31 - 2**16
"""Offsets are computed in 32 bits; a block may reach past the end by less than the difference."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What programs take: each is exact in the float32 that they compute in."""


@cache
def is_installed() -> bool:
    """Whether Triton can be imported; it is not, to find out."""
    return find_spec("triton") is not None


def is_covered(*tensors: Tensor) -> bool:
    """Whether a program may run on these: on CUDA, of one type, neither empty nor too large."""
    first = tensors[0]
    return first.is_cuda and is_installed() and all(is_launchable(t, first.dtype) for t in tensors)


def is_launchable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a program can address this tensor, wherever it is, as one of type `dtype`."""
    return tensor.dtype is dtype and dtype in TYPES and 0 < tensor.numel() <= MOST_ELEMENTS


def is_channels_last(tensor: Tensor) -> bool | None:
    """Whether channels lie innermost; None where elements are neither so nor in order.

    A tensor whose sizes make it both, as with one channel, counts as in order. One image of which
    the stride of the batch is another, as of (H, W, C) permuted, is neither: PyTorch takes it for
    one in order where it decides how results lie.
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
    """Which of three functions with equal results a call with these tensors goes to.

    Args:
        bare: only computes. For calls that nothing watches: they save the dispatcher's way, 10 us
            of host time where the launch takes 5.
        operator: for autograd, compilers, tracers, modes and subclasses, which look on, and for
            views of which the dispatcher negates the elements.
        eager: for transformations such as `torch.func.grad` and dual numbers, for which operators
            from outside of PyTorch have no rules.
        tensors: of the call.
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
"""Of tensors without contents, for which a launch is being made; None for any others."""
_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)
"""Whether what is traced stands for another operator's program: of its own, none will run."""


def traced(find: Callable[..., Any], eager: Function) -> Function:
    """What tracers are to call for an operator: `eager`, while threads compile its program.

    Args:
        find: makes the launch for the operator's arguments, as the operator will for real ones.
        eager: for tensors without contents as well.
    """

    def fake(*given: Any, **named: Any) -> Tensor:
        found = None
        tensors = [t for t in (*given, *named.values()) if isinstance(t, Tensor)]
        is_asked = torch.cuda.is_initialized() and not _is_within.get()
        if is_asked and all(map(_is_concrete, tensors)) and is_covered(*tensors):
            token = _traced.set(tensors[0].dtype)
            try:
                with suppress(Exception), unset_fake_temporarily():  # the call will say it, if any
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
    """Whether all sizes are numbers, none a symbol: to ask about those would be to decide them."""
    return all(type(size) is int for size in (*tensor.shape, *tensor.stride()))


class Launch:
    """A program with its grid and all arguments that are no tensors, for one kind of tensors.

    The first call goes through Triton's compiler and its cache. Later ones hand addresses to what
    was compiled, which saves the look at each argument. One that is made while an operator is
    traced has its program compiled in a thread, see `ahead`.

    Args:
        program: what `triton.jit` made.
        grid: programs along each of three axes.
        arguments: what follows the tensors: sizes, then constants, in the program's order.
        device: where the tensors are.
        warps: of 32 threads, per program.
        options: further ones of Triton's, by name.
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
        """Enqueues the program on the current stream of the tensors' device."""
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
            if is_aligned:  # None from the interpreter, which compiles nothing
                self._compiled = compiled
            return
        # torch.cuda.current_stream would make an object around this number.
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        started_with = (stream, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*self._grid, *started_with, *addresses, *self._arguments)
