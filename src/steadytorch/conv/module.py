"""A convolution as a module: with its epilogue fused, run by a chosen engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from steadytorch.conv.choices import ATEN, Choice
from steadytorch.conv.operator import conv_engine_eagerly, observed
from steadytorch.conv.plain import plain
from steadytorch.conv.plans import DTYPES, Geometry
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.repeated import Repeated

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class EngineConv(nn.Module):
    """`relu(conv(x) + other + bias)`, each of the three only where asked for.

    Args:
        weight: of shape (K, C / groups, kernel).
        bias: of shape (K,), or None.
        geometry: stride, padding, dilation and groups.
        relu: whether negative results become zero.
        label: where the convolution stood in the model.
        problem: what it poses to cuDNN on the inputs it was traced with; None where that has no
            engines.
        reason: why it has none.

    Attributes:
        choice: how it is run; set by `choose`.
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
        """Runs it this way from now on.

        Padding of channels and another element type are done to the weights here, once.
        """
        self.choice = choice
        self._call = Repeated(self.geometry, self.relu, choice.engine)
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
        """Stride, padding, dilation and groups."""
        return self.stride, self.padding, self.dilation, self.groups

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Maps (N, C, spatial) to (N, K, spatial), in the element type of `x`."""
        weight, bias = self.weight, self.bias
        if self.choice.engine == ATEN:
            # As PyTorch's own operators, which a compiler around this can fuse with others.
            return plain(x, weight, bias, other, self.relu, self.geometry)
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

    None for another module, and for a layer that pads other than with the same zeros on both sides
    of a dimension.
    """
    if objection(layer) is not None:
        return None
    padding = _padding(layer)
    assert padding is not None
    return tuple(layer.stride), padding, tuple(layer.dilation), layer.groups


def objection(layer: Any) -> str | None:
    """Why a layer has no engines whatever it is given; None where it may have."""
    # A subclass or a parametrised layer has a type of its own, and may compute something else.
    if type(layer) not in _LAYERS:
        return f"a {type(layer).__name__}: engines are for Conv1d, Conv2d and Conv3d"
    if layer.padding_mode != "zeros":
        return f"padding_mode {layer.padding_mode!r}: engines pad with zeros"
    if _padding(layer) is None:
        return "another padding on either side of a dimension"
    return None


def convolves(layer: Any) -> bool:
    """Whether a module is a convolution layer of any kind, transposed ones included."""
    return isinstance(layer, _ConvNd)


def misfit(x: Tensor, weight: Tensor) -> str | None:
    """Why no engine takes this input and weight together; None where one may."""
    if x.dim() != weight.dim():
        return f"an input of {x.dim()} dimensions: engines need {weight.dim()}"
    if x.numel() == 0:
        return "an empty input"
    if x.dtype != weight.dtype:
        return f"an input of {x.dtype} with a weight of {weight.dtype}"
    return None


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Zeros on either side of each dimension; None where the two sides differ."""
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    if layer.padding == "same":
        sizes = zip(layer.dilation, layer.kernel_size, strict=True)
        total = [gap * (size - 1) for gap, size in sizes]
        return None if any(t % 2 for t in total) else tuple(t // 2 for t in total)
    return tuple(layer.padding)


def pad_channels(tensor: Tensor, added: int) -> Tensor:
    """The tensor with zeros for `added` more channels (its second dimension), in its layout."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, added]) if added else tensor


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=False)


def engine_convolutions(module: nn.Module) -> list[EngineConv]:
    """The convolutions of a rewritten module, in the order of the graph's calls."""
    return [m for m in module.modules() if isinstance(m, EngineConv)]


def use(module: nn.Module, choices: dict[str, Choice]) -> None:
    """Sets the engine of every convolution of a rewritten module.

    Args:
        module: from `rewrite`.
        choices: by problem key. Where there are none at all, each runs with the first plan of
            cuDNN's heuristics; one that is missing among others runs as PyTorch would.
    """
    default = Choice(ATEN) if choices else Choice()
    for convolution in engine_convolutions(module):
        problem = convolution.problem
        found = default if problem is None else choices.get(problem.key, default)
        with torch.inference_mode(False), torch.no_grad():
            convolution.choose(found if problem is not None else Choice(ATEN))
