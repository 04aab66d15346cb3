"""Runs each convolution, and the operations fused into it, on a chosen cuDNN engine."""

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

_UNKNOWN_KIND = "no convolution is supported: engines need standard layers with zero padding"


class CudnnEngines(Transform):
    """Runs convolutions on chosen cuDNN engines; inference also fuses the operations after them.

    For inference, a traced copy replaces the model and shares all weights that are not folded.
    Batch norm, bias, residual add and ReLU are fused into the convolutions.

    Training keeps the model's layers and weights, and runs the forward pass, input gradient and
    weight gradient of convolutions on engines.

    A convolution whose engine is missing or cannot be built falls back to PyTorch.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Chosen engines as JSON, by convolution problem; "" for cuDNN's first choice."""

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
        """Claims residual sums, which engines add to the result of a convolution."""
        return (Claim.SUMS,)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, the cuDNN frontend and a convolution; inference also needs a traceable model.

        For inference, traces the model's `forward` symbolically, without computing anything.
        """
        module = workload.module
        refused = decide(
            (module is None, PLAIN_CALLABLE),
            no_cuda(facts),
            (find_spec("cudnn") is None, "needs the cuDNN frontend: install steadytorch[cudnn]"),
            (not convolutions(module), NO_CONVOLUTION),
        )
        if isinstance(refused, NotApplicable):
            return refused
        return _trainable(workload) if workload.is_training else _fusible(workload)

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a rewritten copy of the model; there is nothing to undo."""
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
    except Exception as error:  # forward is user code and may raise anything
        return untraceable(error)
    return Applicable()


def engined_model(model: nn.Module, engines: Engines) -> nn.Module:
    """Return a copy that shares parameters and buffers and runs convolutions on cuDNN engines.

    Args:
        model: the model to train; it stays unchanged.
        engines: the engine of each convolution.
    """
    from steadytorch.conv.training import equip

    return equip(twin(model), engines)


def rewritten_model(workload: Workload) -> Any:
    """Return a copy of the model with fused convolutions, which still run in PyTorch.

    Runs the model once on the workload's inputs to find the shapes of intermediate values.

    Raises:
        Exception: any exception that `forward` raises during tracing.
    """
    from torch.fx import GraphModule

    from steadytorch.conv.rewrite import rewrite

    inner = _innermost(workload)
    model, graph = traced_to_run(inner)
    with torch.inference_mode(False):
        fused = rewrite(GraphModule(model, graph), inner.inputs, inner.kwargs)
    return _around(workload.model, fused.eval())


def _innermost(workload: Workload) -> Workload:
    """Unwrap `Converting` models, which torch.fx cannot trace, and convert the inputs."""
    model, arguments = workload.model, (workload.inputs, dict(workload.kwargs))
    while isinstance(model, Converting):
        model, arguments = model.inner, map_tensors(model.convert, arguments)
    inputs, kwargs = arguments
    return replace(workload, model=model, inputs=inputs, kwargs=kwargs)


def _around(model: Any, inner: nn.Module) -> Any:
    """Wrap `inner` in copies of the `Converting` wrappers around `model`."""
    if not isinstance(model, Converting):
        return inner
    wrapper = copy.copy(model)
    wrapper._modules = {**model._modules, "inner": _around(model.inner, inner)}
    return wrapper
