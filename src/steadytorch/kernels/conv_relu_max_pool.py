"""Fused stem of a network: convolution, ReLU and max-pooling.

With few input channels, the convolution is bound by writing its output: 103 MB for a 16-bit ResNet
at batch 64. Max-pooling reads the convolution's output once and shrinks it to a quarter. The fused
kernel keeps the convolution's output on the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.launch import Launch
from steadytorch.kernels.operators import FusedOperator, pairs
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.kernels.stem import (
    MOST_CHANNELS,
    STEP,
    WINDOW,
    Config,
    Pair,
    StemGeometry,
    busy_cores,
    config_for,
    geometry_of,
)


def conv_relu_max_pool2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    kernel_size: int | Sequence[int] = WINDOW,
    pool_stride: int | Sequence[int] | None = None,
    pool_padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    config: str = "",
) -> Tensor:
    """Compute `max_pool2d(relu(conv2d(x, weight, bias, stride, padding)), ...)`.

    On CUDA, a single fused kernel handles up to 4 input channels and a 3x3 pooling window with
    stride 2 and padding 0 or 1. The kernel rounds once; PyTorch rounds after the convolution and
    after adding the bias.

    Args:
        x: shape (N, C, H, W).
        weight: shape (K, C, kernel height, kernel width).
        bias: shape (K,), or None.
        stride: stride of the convolution.
        padding: zero padding of the convolution on each side.
        kernel_size: pooling window, as in `torch.nn.functional.max_pool2d`.
        pool_stride: stride of the pooling; None for `kernel_size`.
        pool_padding: padding of the pooling on each side.
        ceil_mode: whether windows may extend beyond the convolution's result.
        config: a key of `CONFIGS`; "" chooses one from the sizes.

    Raises:
        RuntimeError: PyTorch's operators reject the arguments.
    """
    pool_stride = kernel_size if pool_stride is None else pool_stride
    sizes = pairs(stride, padding, kernel_size, pool_stride, pool_padding)
    return OPERATOR(conv_relu_max_pool2d, x, weight, bias, *sizes, ceil_mode, config)


def _eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    kernel_size: Sequence[int],
    pool_stride: Sequence[int],
    pool_padding: Sequence[int],
    ceil_mode: bool,
    config: str,
) -> Tensor:
    y = F.conv2d(x, weight, bias, list(stride), list(padding))
    return relu_max_pool2d(y, kernel_size, pool_stride, pool_padding, 1, ceil_mode)


def program_for(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    kernel_size: Sequence[int],
    pool_stride: Sequence[int],
    pool_padding: Sequence[int],
    ceil_mode: bool,
    config: str,
) -> PreparedConvReluMaxPool | None:
    """Return the launcher for this call, or None to use PyTorch's operators.

    Takes the arguments of `conv_relu_max_pool2d`, with sizes as (vertical, horizontal) pairs.
    """
    others = (weight,) if bias is None else (weight, bias)
    if any(t.device != x.device for t in others):
        return None
    if bias is not None and not (bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return None
    like = (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device)
    given = (stride, padding, kernel_size, pool_stride, pool_padding)
    sizes: Any = [tuple(size) for size in given]
    return prepared(*like, bias is not None, input_precision(x.dtype), *sizes, ceil_mode, config)


def input_precision(dtype: torch.dtype) -> str | None:
    """Triton's input precision for a dtype; None if TF32 would be needed but is not allowed."""
    if dtype is not torch.float32:
        return "ieee"
    cudnn: Any = torch.backends.cudnn
    return "tf32" if cudnn.enabled and cudnn.conv.fp32_precision == "tf32" else None


class PreparedConvReluMaxPool:
    """Prepared launch for inputs of one shape, type and layout.

    Args:
        batch: number of images.
        geometry: all other sizes.
        config: tile sizes and launch options.
        device: device of the tensors.

    Attributes:
        config: as given.
        busy_cores: number of SMs this launch occupies.
    """

    def __init__(
        self, batch: int, geometry: StemGeometry, config: Config, device: torch.device
    ) -> None:
        from steadytorch.kernels import programs

        g = geometry.cut_up(config)
        self.config, self.busy_cores = config, busy_cores(g, batch, device)
        self._shape = (batch, g.outputs, g.out_height, g.out_width)
        self._layout = torch.contiguous_format if g.out_inner == 1 else torch.channels_last
        self._launch = Launch(
            programs.conv_relu_max_pool,
            g.grid(batch),
            (g.columns(batch), g),
            device,
            config.warps,
            {"num_stages": config.stages, "maxnreg": config.registers},
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Launch the kernel and return its result; tensors must have the prepared shapes."""
        y = torch.empty(self._shape, dtype=x.dtype, device=x.device, memory_format=self._layout)
        self._launch(x, weight, weight if bias is None else bias, y)
        return y


@lru_cache(maxsize=1024)
def prepared(
    shape: torch.Size,
    strides: tuple[int, ...],
    kernel: torch.Size,
    kernel_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    biased: bool,
    precision: str | None,
    stride: Pair,
    padding: Pair,
    window: Pair,
    step: Pair,
    pool_padding: Pair,
    ceil_mode: bool,
    config: str,
) -> PreparedConvReluMaxPool | None:
    """Return the launcher for these inputs, or None to use PyTorch's operators."""
    if precision is None or not is_stem(shape, kernel, window, step, pool_padding):
        return None
    if not len(stride) == len(padding) == 2:
        return None
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    weight = torch.empty_strided(kernel, kernel_strides, dtype=dtype, device="meta")
    pooling = (pool_padding[0], ceil_mode)
    geometry = geometry_of(x, weight, stride, padding, *pooling, precision, biased)
    if geometry is None:
        return None
    found = config_for(config, geometry, shape[0], dtype, device)
    return None if found is None else PreparedConvReluMaxPool(shape[0], geometry, found, device)


def is_stem(
    shape: Sequence[int],
    kernel: Sequence[int],
    window: Sequence[int],
    step: Sequence[int],
    pool_padding: Sequence[int],
) -> bool:
    """Whether the kernel supports this convolution and pooling, apart from limits on sizes.

    Args:
        shape: shape of the convolution's input, (N, C, H, W).
        kernel: shape of its weight.
        window: pooling window.
        step: stride of the pooling.
        pool_padding: padding of the pooling on each side.
    """
    if len(shape) != 4 or len(kernel) != 4 or shape[1] != kernel[1]:
        return False
    pooling = (*window, *step) == (WINDOW, WINDOW, STEP, STEP)
    padded = tuple(pool_padding) in ((0, 0), (1, 1))
    return pooling and padded and shape[1] <= MOST_CHANNELS and min(kernel[0], *kernel[2:]) > 1


OPERATOR = FusedOperator(
    "conv_relu_max_pool2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] kernel_size, int[] pool_stride, int[] pool_padding, bool ceil_mode, str config) "
    "-> Tensor",
    program_for,
    _eager,
)
