"""Module that runs a convolution with fused epilogue by a chosen cuDNN engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from steadytorch.conv.aten_fallback import aten_conv
from steadytorch.conv.call_cache import CallCache
from steadytorch.conv.choices import ATEN, Choice
from steadytorch.conv.executables import DTYPES, Geometry
from steadytorch.conv.operator import conv_engine_eagerly, observed
from steadytorch.conv.problem import ConvProblem

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class EngineConv(nn.Module):
    """Computes `relu(conv(x) + other + bias)`; residual, bias and ReLU are optional.

    Args:
        weight: shape (K, C / groups, *kernel).
        bias: shape (K,), or None.
        geometry: stride, padding, dilation and groups.
        relu: whether to apply ReLU.
        label: name of the convolution in the original model.
        problem: the problem for the traced inputs; None if cuDNN has no engines for it.
        reason: why cuDNN has no engines for the problem, or None.

    Attributes:
        choice: how the convolution is run; set by `choose`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        relu: bool,
        label: str,
        problem: ConvProblem | None,
        reason: str | None = None,
    ) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.stride, self.padding, self.dilation, self.groups = geometry
        self.relu, self.label, self.problem, self.reason = relu, label, problem, reason
        self.choice = Choice(ATEN)
        self._added_channels = 0
        self.eval()

    def choose(self, choice: Choice) -> None:
        """Set how the convolution runs; pads or converts the weights if `choice` requires it."""
        self.choice = choice
        self._call = CallCache(self.geometry, self.relu, choice.engine)
        weight, bias = self.weight.detach(), self.bias
        if choice.channels is not None and self.groups == 1:
            self._added_channels = max(0, choice.channels - weight.shape[1])
            weight = pad_channels(weight, self._added_channels)
        if choice.number is not None:
            dtype = DTYPES[choice.number]
            weight = weight.to(dtype)
            self.bias = None if bias is None else _parameter(bias.detach().to(dtype))
        if weight is not self.weight:
            self.weight = _parameter(weight)

    @property
    def geometry(self) -> Geometry:
        """Stride, padding, dilation and groups of the convolution."""
        return self.stride, self.padding, self.dilation, self.groups

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Map (N, C, *spatial) to (N, K, *spatial), in the dtype of `x`."""
        weight, bias = self.weight, self.bias
        if self.choice.engine == ATEN:
            # PyTorch's own operators, so that a surrounding compiler can fuse them with others.
            return aten_conv(x, weight, bias, other, self.relu, self.geometry)
        outer, dtype = x.dtype, weight.dtype
        if outer != dtype:
            x, other = x.to(dtype), None if other is None else other.to(dtype)
        if self._added_channels:
            x = pad_channels(x, self._added_channels)
        if observed(x, weight) or torch.is_grad_enabled():
            geometry: Any = self.geometry
            engines = (self.choice.engine, ATEN, ATEN)
            y = conv_engine_eagerly(x, weight, bias, other, *geometry, self.relu, *engines)
        else:
            y = self._call(x, weight, bias, other)
        return y if outer == dtype else y.to(outer)


def layer_geometry(layer: Any) -> Geometry | None:
    """Stride, padding, dilation and groups of a convolution layer.

    The result is None for any module that engines cannot run; see `objection`.
    """
    if objection(layer) is not None:
        return None
    padding = _padding(layer)
    assert padding is not None
    return tuple(layer.stride), padding, tuple(layer.dilation), layer.groups


def objection(layer: Any) -> str | None:
    """Reason why engines cannot run a layer, whatever its input; None if they can."""
    # Exact types only: a subclass or parametrised layer may compute something else.
    if type(layer) not in _LAYERS:
        return f"a {type(layer).__name__}: engines are for Conv1d, Conv2d and Conv3d"
    if layer.padding_mode != "zeros":
        return f"padding_mode {layer.padding_mode!r}: engines pad with zeros"
    if _padding(layer) is None:
        return "different padding on the two sides of a dimension"
    return None


def convolves(layer: Any) -> bool:
    """Whether a module is a convolution layer of any kind, including transposed ones."""
    return isinstance(layer, _ConvNd)


def misfit(x: Tensor, weight: Tensor) -> str | None:
    """Reason why engines cannot run this input with this weight; None if they can."""
    if x.dim() != weight.dim():
        return f"an input of {x.dim()} dimensions: engines need {weight.dim()}"
    if x.numel() == 0:
        return "an empty input"
    if x.dtype != weight.dtype:
        return f"an input of {x.dtype} with a weight of {weight.dtype}"
    return None


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Padding per side of each dimension; None if the two sides differ."""
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    if layer.padding == "same":
        sizes = zip(layer.dilation, layer.kernel_size, strict=True)
        total = [gap * (size - 1) for gap, size in sizes]
        return None if any(t % 2 for t in total) else tuple(t // 2 for t in total)
    return tuple(layer.padding)


def pad_channels(tensor: Tensor, added: int) -> Tensor:
    """Append `added` channels of zeros in the second dimension, keeping the memory layout."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, added]) if added else tensor


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=False)


def engine_convolutions(module: nn.Module) -> list[EngineConv]:
    """List the convolutions of a rewritten module, in the order in which its graph calls them."""
    return [m for m in module.modules() if isinstance(m, EngineConv)]


def use(module: nn.Module, choices: dict[str, Choice]) -> None:
    """Set the engine of every convolution of a rewritten module.

    Args:
        module: from `rewrite`.
        choices: choices by problem key. If empty, every convolution runs the first plan of cuDNN's
            heuristics. Otherwise, a problem without a choice runs PyTorch's own convolution.
    """
    default = Choice(ATEN) if choices else Choice()
    for convolution in engine_convolutions(module):
        problem = convolution.problem
        found = default if problem is None else choices.get(problem.key, default)
        with torch.inference_mode(False), torch.no_grad():
            convolution.choose(found if problem is not None else Choice(ATEN))
