"""Call cache of one convolution: repeated calls find their runner without building a key."""

from __future__ import annotations

from threading import local
from typing import Any

import torch
from torch import Tensor

from steadytorch.conv.executables import Geometry, Runner, number_of
from steadytorch.conv.operator import runner_of


class _Call:
    """A cached runner, and the properties of the tensors that it was made for."""

    __slots__ = ("device", "dtype", "number", "runner", "shapes", "strides")

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, runner: Runner
    ) -> None:
        self.dtype, self.number, self.device = x.dtype, number_of(x.dtype), x.get_device()
        self.shapes = (x.shape, weight.shape, _shape(bias), _shape(other))
        self.strides, self.runner = (x.stride(), weight.stride()), runner

    def is_like(self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None) -> bool:
        """Whether the cached runner fits a call's tensors, by shape, strides, dtype and device."""
        dtype, device = self.dtype, self.device
        x_shape, weight_shape, bias_shape, other_shape = self.shapes
        x_stride, weight_stride = self.strides
        return (
            _fits(x, x_shape, dtype, device)
            and x.stride() == x_stride
            and _fits(weight, weight_shape, dtype, device)
            and weight.stride() == weight_stride
            and _fits(bias, bias_shape, dtype, device)
            and _fits(other, other_shape, dtype, device)
            and number_of(dtype) == self.number
        )


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _fits(tensor: Tensor | None, shape: torch.Size | None, dtype: torch.dtype, device: int) -> bool:
    if tensor is None:
        return shape is None
    return tensor.shape == shape and tensor.dtype is dtype and tensor.get_device() == device


class CallCache(local):
    """Calls one convolution and caches the last runner; each thread has its own cache.

    Args:
        geometry: stride, padding and dilation as tuples, and groups.
        relu: whether to apply ReLU.
        engine: the plan's name, or HEURISTIC.
    """

    def __init__(self, geometry: Geometry, relu: bool, engine: str) -> None:
        self._settings = (geometry, relu, engine)
        self._last: _Call | None = None

    def __reduce__(self) -> Any:
        return CallCache, self._settings

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None
    ) -> Tensor:
        """Compute the convolution, with the runner of the last call if that runner fits."""
        last = self._last
        if last is None or not last.is_like(x, weight, bias, other):
            runner = runner_of(x, weight, bias, other, *self._settings)
            last = self._last = _Call(x, weight, bias, other, runner)
        return last.runner(x, weight, bias, other)
