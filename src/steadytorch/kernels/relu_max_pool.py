"""Fused ReLU and 2D max-pooling.

As separate operators, ReLU reads and writes the input, and pooling reads it again and writes
indices that inference does not need. The fused kernel reads the input once and writes the result.
For a 2x2 window in float32, fusion cuts the memory traffic from 3.75 to 1.25 times the input's
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.launch import (
    Launch,
    is_channels_last,
    is_launchable,
)
from steadytorch.kernels.operators import FusedOperator, pairs

_BLOCKS = {"last": (1024, 256, 8), "pairs": (1024, 128, 8), "single": (256, 256, 4)}
"""Per access pattern: outputs of a program, maximum contiguous outputs, warps.

Chosen from a dozen settings timed on an H200. With contiguous loads, four outputs per thread are
fastest. With strided loads, two are fastest: with more, the addresses of a warp spread so far that
caches thrash. Times with strided loads, for a 3x3 window with stride 2:

    outputs a thread    2     4     8
    time (us)          79   133   245
"""
MOST_UNROLLED = 25
"""Maximum taps of an unrolled window; larger windows use a loop, to limit compile time."""
MOST_COLUMNS = 65535
"""Maximum pixels of a line (channels for channels_last): CUDA's limit for the grid's second axis.
It assumes blocks of width 1."""

Pair = tuple[int, int]


class Window(NamedTuple):
    """Pooling window; each size is (vertical, horizontal), in pixels."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool


def relu_max_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Compute `max_pool2d(relu(x), ...)`, on CUDA in one kernel, bitwise equal to PyTorch's.

    Args:
        x: shape (N, C, H, W) or (C, H, W).
        kernel_size: window size, as in `torch.nn.functional.max_pool2d`.
        stride: window stride; None for `kernel_size`.
        padding: padding on each side.
        dilation: distance between taps of the window.
        ceil_mode: whether windows may extend beyond the input.

    Raises:
        RuntimeError: PyTorch's pooling rejects the arguments.
    """
    sizes = pairs(kernel_size, kernel_size if stride is None else stride, padding, dilation)
    return OPERATOR(relu_max_pool2d, x, *sizes, ceil_mode)


def _eager(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    window: Any = (list(kernel_size), list(stride), list(padding), list(dilation), ceil_mode)
    return F.max_pool2d(x.relu(), *window)


def program_for(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> PreparedReluMaxPool | None:
    """Return the launcher for this call, or None to use PyTorch's operators.

    Takes the arguments of `relu_max_pool2d`, with sizes as (vertical, horizontal) pairs.
    """
    sizes: Any = (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation))
    return prepared(x.shape, is_channels_last(x), x.dtype, x.device, *sizes, ceil_mode)


class PreparedReluMaxPool:
    """Prepared launch for inputs of one shape, type and layout.

    Args:
        shape: shape of the input, (N, C, H, W).
        is_last: whether the input is channels_last.
        device: device of the input.
        window: pooling window.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        is_last: bool,
        device: torch.device,
        window: Window,
    ) -> None:
        from steadytorch.kernels import programs

        batch, channels, height, width = shape
        out_height, out_width = _outputs(shape, window)
        self._shape = (batch, channels, out_height, out_width)
        self._strides = _strides(self._shape, is_last)
        columns = channels if is_last else out_width
        rows = batch * out_height * (out_width if is_last else channels)
        unrolled = window.kernel[0] * window.kernel[1] <= MOST_UNROLLED
        read = "last" if is_last else "pairs" if unrolled and _stands_in_pairs(window) else "single"
        outputs, widest, warps = _BLOCKS[read]
        wide = min(widest, _power_of_two(columns))
        high = outputs // wide
        clipped = any(
            (out - 1) * step + gap * (k - 1) >= size + pad or pad > 0
            for size, out, k, step, pad, gap in _axes(shape, (out_height, out_width), window)
        )
        arguments = (
            *(rows, columns, height, width, out_height, out_width),
            *(*window.kernel, *window.stride, *window.padding, *window.dilation),
            *(read, clipped, unrolled, high, wide),
        )
        grid = (-(-rows // high), -(-columns // wide), 1)
        self._launch = Launch(programs.relu_max_pool, grid, arguments, device, warps)

    def __call__(self, x: Tensor) -> Tensor:
        """Launch the kernel and return its result in the layout of `x`."""
        y = x.new_empty_strided(self._shape, self._strides)
        self._launch(x, y)
        return y


def _stands_in_pairs(window: Window) -> bool:
    # Wider windows and padding would work too, but are slower: loads of the next pair of taps
    # would not be aligned.
    across = [size[1] for size in (window.kernel, window.stride, window.padding, window.dilation)]
    return across == [2, 2, 0, 1]


@lru_cache(maxsize=1024)
def prepared(
    shape: torch.Size,
    is_last: bool | None,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil_mode: bool,
) -> PreparedReluMaxPool | None:
    """Return the launcher for these inputs, or None to use PyTorch's operators."""
    if len(shape) != 4 or is_last is None:
        return None
    if not len(kernel) == len(stride) == len(padding) == len(dilation) == 2:
        return None
    window = Window(kernel, stride, padding, dilation, ceil_mode)
    outputs = checked_outputs(shape, dtype, window)
    if outputs is None or not _every_window_sees(shape, outputs, window):
        return None
    if (shape[1] if is_last else outputs[1]) > MOST_COLUMNS:
        return None
    return PreparedReluMaxPool(tuple(shape), is_last, device, window)


def checked_outputs(shape: torch.Size, dtype: torch.dtype, window: Window) -> Pair | None:
    """Output height and width; None if PyTorch rejects the sizes or the output is too large."""
    try:
        outputs = _outputs(shape, window)
    except RuntimeError:  # the eager call raises PyTorch's own error
        return None
    y = torch.empty((*shape[:2], *outputs), dtype=dtype, device="meta")
    return outputs if is_launchable(y, dtype) else None


def _outputs(shape: tuple[int, ...], window: Window) -> Pair:
    """Height and width of the output, computed by PyTorch.

    Raises:
        RuntimeError: PyTorch rejects these sizes.
    """
    sizes: Any = window
    y = F.max_pool2d(torch.empty((1, 1, *shape[2:]), device="meta"), *sizes)
    return y.shape[2], y.shape[3]


def _axes(shape: Sequence[int], outputs: Pair, window: Window) -> list[tuple[int, ...]]:
    """Per axis: input size, output size, kernel, stride, padding, dilation."""
    columns = (window.kernel, window.stride, window.padding, window.dilation)
    return list(zip(shape[2:], outputs, *columns, strict=True))


def _every_window_sees(shape: Sequence[int], outputs: Pair, window: Window) -> bool:
    """Whether every window covers an input pixel; a dilated window may cover only padding.

    For a window without input pixels, PyTorch returns minus infinity; the kernel would return zero.
    """
    return all(
        gap == 1
        or all(any(0 <= o * step - pad + k * gap < size for k in range(taps)) for o in range(out))
        for size, out, taps, step, pad, gap in _axes(shape, outputs, window)
    )


def _strides(shape: tuple[int, ...], is_last: bool) -> tuple[int, ...]:
    _, channels, height, width = shape
    if is_last:
        return (channels * height * width, 1, channels * width, channels)
    return (channels * height * width, height * width, width, 1)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.window = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # Indices of the maxima are recomputed, so that inference need not store them.
    (x,) = ctx.saved_tensors
    y = x.relu()
    _, winners = torch.ops.aten.max_pool2d_with_indices(y, *ctx.window)
    grad = torch.ops.aten.max_pool2d_with_indices_backward(grad, y, *ctx.window, winners)
    return torch.ops.aten.threshold_backward(grad, y, 0), *([None] * len(ctx.window))


OPERATOR = FusedOperator(
    "relu_max_pool2d(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode) -> Tensor",
    program_for,
    _eager,
    (_setup_context, _backward),
    is_cast=False,
)
