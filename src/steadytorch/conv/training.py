"""cuDNN engines for training: the forward pass and both gradients of each convolution.

Convolution layers keep their parameters, hooks and names; only their computation changes. Only the
bias is fused. See `Engines` for convolutions without a chosen engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from steadytorch.conv.choices import ATEN, HEURISTIC, Choice
from steadytorch.conv.executables import Geometry, memory_layout, number_of
from steadytorch.conv.module import convolves, layer_geometry, misfit, objection
from steadytorch.conv.operator import conv_engine_eagerly
from steadytorch.conv.problem import ConvProblem, Layout, Number, Operation, parse

ModuleT = TypeVar("ModuleT", bound=nn.Module)

OPERATIONS: tuple[Operation, ...] = ("fprop", "dgrad", "wgrad")
"""Passes of a convolution: forward, and the gradients of its input and its weight."""
Passes = tuple[str, str, str]
"""Engines of one convolution, in the order of `OPERATIONS`."""
_OWN: Passes = (ATEN, ATEN, ATEN)


class SharedProblem(NamedTuple):
    """Fields shared by the forward, dgrad and wgrad problems of one convolution."""

    number: Number
    layout: Layout
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    biased: bool

    def problem(self, operation: Operation) -> ConvProblem:
        """Convolution problem of one pass; only the forward pass includes the bias."""
        epilogue = "bias" if self.biased and operation == "fprop" else "none"
        return ConvProblem(operation, epilogue, *self[:-1])


class Engines:
    """Engines chosen for the convolutions of a model.

    Args: choices: choices by problem key. If empty, every pass runs the first plan of cuDNN's
    heuristics. Otherwise, a problem without a choice runs PyTorch's implementation. Choices that
    change weights or fuse more than the bias are ignored; they are for inference.
    """

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._default: Passes = _OWN if choices else (HEURISTIC, HEURISTIC, HEURISTIC)
        self._chosen: dict[SharedProblem, Passes] = {}
        for key, choice in choices.items():
            problem = parse(key)
            if choice == Choice(choice.engine) and problem.epilogue in ("none", "bias"):
                self._keep(problem, choice.engine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engines:
        return self  # copies of a model share it

    def _keep(self, problem: ConvProblem, engine: str) -> None:
        forward = problem.operation == "fprop"
        for biased in (problem.biased,) if forward else (False, True):
            shared = SharedProblem(
                *(problem.number, problem.layout, problem.input, problem.weight),
                *(problem.stride, problem.padding, problem.dilation, problem.groups, biased),
            )
            passes = dict(zip(OPERATIONS, self._chosen.get(shared, _OWN), strict=True))
            passes[problem.operation] = engine
            self._chosen[shared] = (passes["fprop"], passes["dgrad"], passes["wgrad"])

    def of(self, label: str, shared: SharedProblem, x: Tensor, weight: Tensor) -> Passes:
        """Engines for the three passes of a convolution that is about to run.

        Args:
            label: name of its layer.
            shared: the problem.
            x: the input.
            weight: the weight.
        """
        return self._chosen.get(shared, self._default)

    def of_unsupported(self, label: str, x: Tensor, weight: Tensor) -> Passes:
        """Use PyTorch's implementation for all passes of a call that engines do not support."""
        return _OWN

    def leave(self, label: str, reason: str) -> None:
        """Hook that receives each convolution layer that engines cannot run, with the reason."""


class ProblemRecorder(Engines):
    """Runs every convolution in PyTorch and records the convolution problems of a training step.

    Attributes:
        found: distinct problems in order, with the names of their layers.
        left_out: names of layers that engines cannot run, by reason.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.found: dict[ConvProblem, list[str]] = {}
        self.left_out: dict[str, list[str]] = {}

    def of(self, label: str, shared: SharedProblem, x: Tensor, weight: Tensor) -> Passes:
        """Record the problems of a call: the forward pass, and each gradient that is required."""
        recorded = torch.is_grad_enabled()
        needs = (True, recorded and x.requires_grad, recorded and weight.requires_grad)
        for operation, needed in zip(OPERATIONS, needs, strict=True):
            if needed:
                self.found.setdefault(shared.problem(operation), []).append(label)
        return _OWN

    def of_unsupported(self, label: str, x: Tensor, weight: Tensor) -> Passes:
        """Record the layer of an unsupported call, with the reason."""
        self.leave(label, misfit(x, weight) or f"no engines for {x.dtype}")
        return _OWN

    def leave(self, label: str, reason: str) -> None:
        """Record that engines cannot run a layer, and why."""
        self.left_out.setdefault(reason, []).append(label)


class _Way(NamedTuple):
    """How a layer is called."""

    engines: Engines
    label: str
    geometry: Geometry


class _EngineLayer:
    """Mixin that runs a convolution layer on engines; precedes PyTorch's class in the MRO.

    With 16-bit tensors, `torch.compile` captures the layer without a graph break. In float32, the
    layer breaks the graph, because the TF32 setting must be read at each call.
    """

    steady_way: _Way

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        engines, label, geometry = self.steady_way
        x, w, b = _as_autocast(input, weight, bias)
        shared = _shared_problem(x, w, b, geometry)
        passes = (
            engines.of_unsupported(label, x, w)
            if shared is None
            else engines.of(label, shared, x, w)
        )
        if passes == _OWN:
            own: Any = super()
            return own._conv_forward(x, w, b)
        return conv_engine_eagerly(x, w, b, None, *geometry, False, *passes)


class EngineConv1d(_EngineLayer, nn.Conv1d):
    """`nn.Conv1d` that runs on engines."""


class EngineConv2d(_EngineLayer, nn.Conv2d):
    """`nn.Conv2d` that runs on engines."""


class EngineConv3d(_EngineLayer, nn.Conv3d):
    """`nn.Conv3d` that runs on engines."""


_KINDS: dict[type, Any] = {
    nn.Conv1d: EngineConv1d,
    nn.Conv2d: EngineConv2d,
    nn.Conv3d: EngineConv3d,
}


def equip(model: ModuleT, engines: Engines) -> ModuleT:
    """Make the convolutions of a model run on cuDNN engines.

    Args:
        model: changed in place; parameters, buffers and names stay the same.
        engines: the engines.

    Returns:
        `model`.
    """
    for label, layer in model.named_modules():
        geometry = layer_geometry(layer)
        if geometry is not None:
            layer.__class__ = _KINDS[type(layer)]
            vars(layer)["steady_way"] = _Way(engines, label, geometry)
        elif convolves(layer) and (reason := objection(layer)) is not None:
            engines.leave(label, reason)
    return model


def _shared_problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> SharedProblem | None:
    """The `SharedProblem` of a convolution call; None if the call must be left to PyTorch."""
    number = number_of(x.dtype)
    fitting = _alike(x, weight) and (bias is None or _alike(x, bias))
    if number is None or not fitting or misfit(x, weight) is not None:
        return None
    sizes: Any = (tuple(x.shape), tuple(weight.shape), *geometry)
    return SharedProblem._make((number, memory_layout(x, weight), *sizes, bias is not None))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _as_autocast(*tensors: Tensor | None) -> Any:
    """If autocast is enabled, cast tensors as autocast does for a convolution."""
    given = tensors[0]
    if given is None or not torch.is_autocast_enabled(given.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(given.device.type)
    return tuple(t if t is None or _kept_by_autocast(t) else t.to(dtype) for t in tensors)


def _kept_by_autocast(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64 or not tensor.is_floating_point()
