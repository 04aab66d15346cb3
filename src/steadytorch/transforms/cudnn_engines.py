"""Runs each convolution, with what follows it, by one engine of cuDNN that is known by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from steadytorch.conv.choices import read_choices
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import SteadyError
from steadytorch.rewrite.conversion import Converting
from steadytorch.rewrite.copying import twin
from steadytorch.rewrite.tracing import traced_to_run
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import (
    NO_CONVOLUTION,
    PLAIN_CALLABLE,
    convolutions,
    decide,
    no_cuda,
    untraceable,
)
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

if TYPE_CHECKING:
    from steadytorch.conv.training import Engines

_UNKNOWN_KIND = "none of its convolutions is a plain one padded with zeros"


class CudnnEngines(Transform):
    """Runs convolutions by chosen engines; for inference, with what follows them fused into them.

    For inference the model is replaced by its graph, on a copy that shares whatever is not folded:
    batch norm, bias, residual add and ReLU become part of the convolutions. In a training workload
    its layers stay as they are, on the model's own weights, and engines are chosen for the forward
    pass and for both gradients. A convolution whose engine is gone, or does not build here, runs as
    PyTorch would run it.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The engines, as JSON from problem to plan; "" for cuDNN's first suggestion each."""

        choices: str = ""

        def __post_init__(self) -> None:
            try:
                read_choices(self.choices)
            except SteadyError as error:
                raise ValueError(str(error)) from None

    name = "cudnn_engines"
    risk = Risk.EXACT

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Sums, which engines add to the result of a convolution."""
        return (Claim.SUMS,)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, the cuDNN frontend and a convolution; for inference a model to be traced.

        The model's `forward` is traced with symbols; no arithmetic is done.
        """
        module = workload.module
        refused = decide(
            (module is None, PLAIN_CALLABLE),
            no_cuda(facts),
            (find_spec("cudnn") is None, "needs the extra steadytorch[cudnn]"),
            (not convolutions(module), NO_CONVOLUTION),
        )
        if isinstance(refused, NotApplicable):
            return refused
        return _trainable(workload) if workload.is_training else _fusible(workload)

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on a rewritten copy; there is nothing to undo."""
        choices = read_choices(self.parameters.choices)
        if workload.is_training:
            from steadytorch.conv.training import Engines

            yield workload.with_model(engined_model(workload.model, Engines(choices)))
            return
        from steadytorch.conv.module import use

        rewritten = rewritten_model(workload)
        use(rewritten, choices)
        yield workload.with_model(rewritten)


def _trainable(workload: Workload) -> Applicable | NotApplicable:
    from steadytorch.conv.module import layer_geometry

    layers = convolutions(workload.module)
    return decide((all(layer_geometry(layer) is None for layer in layers), _UNKNOWN_KIND))


def _fusible(workload: Workload) -> Applicable | NotApplicable:
    model = workload.model
    refused = decide((model.training, "the model is in training mode"))
    if isinstance(refused, NotApplicable):
        return refused
    try:
        traced_to_run(_innermost(workload))
    except Exception as error:  # forward is the user's code: anything may come out of tracing
        return untraceable(error)
    return Applicable()


def engined_model(model: nn.Module, engines: Engines) -> nn.Module:
    """The model with its convolutions called by engines, on the parameters and buffers it has.

    Args:
        model: one that trains; it is left as it is.
        engines: which.
    """
    from steadytorch.conv.training import equip

    return equip(twin(model), engines)


def rewritten_model(workload: Workload) -> Any:
    """The model with its convolutions fused, each still run as PyTorch would run it.

    The model is run once, on the workload's inputs, to see the shapes of its values.

    Raises:
        Exception: whatever the model's `forward` raises when traced with symbols.
    """
    from torch.fx import GraphModule

    from steadytorch.conv.rewrite import rewrite

    inner = _innermost(workload)
    model, graph = traced_to_run(inner)
    with torch.inference_mode(False):
        fused = rewrite(GraphModule(model, graph), inner.inputs, inner.kwargs)
    return _around(workload.model, fused.eval())


def _innermost(workload: Workload) -> Workload:
    """The workload of what conversions are around; they look at types, and have no graph."""
    model, arguments = workload.model, (workload.inputs, dict(workload.kwargs))
    while isinstance(model, Converting):
        model, arguments = model.inner, map_tensors(model.convert, arguments)
    inputs, kwargs = arguments
    return replace(workload, model=model, inputs=inputs, kwargs=kwargs)


def _around(model: Any, inner: nn.Module) -> Any:
    """The wrappers of a model, anew, around another one."""
    if not isinstance(model, Converting):
        return inner
    wrapper = copy.copy(model)
    wrapper._modules = {**model._modules, "inner": _around(model.inner, inner)}
    return wrapper
