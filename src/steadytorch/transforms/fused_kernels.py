"""Fuses adjacent layers into one operator that makes a single pass over memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.kernels.bias_add_relu import bias_add_relu
from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.kernels.stem import CONFIGS
from steadytorch.rewrite.fusible import Layers, Pooled, Residual, Stem
from steadytorch.rewrite.separable import put, separables
from steadytorch.rewrite.tracing import traced_to_run
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.fold_batch_norm import fold, foldable_pairs
from steadytorch.transforms.traits import capability_below, decide, no_copy, no_cuda, untraceable
from steadytorch.workload.workload import Workload

_NO_PAIR = "the model has no ReLU whose only consumer is a 2-d max pooling"
_NO_STEM = "the model has no few-channel convolution followed only by ReLU and 2-d max pooling"
_NO_RESIDUAL = "the model has no sum of two layer outputs whose only consumer is a ReLU"
_NO_SEPARABLE = (
    "the model has no pointwise, depthwise or few-channel convolution, and no memory-bound Linear, "
    "with an operation to fuse"
)


class FusedKernels(Transform):
    """Runs adjacent layers as one kernel: ReLU and max pooling, and optionally more.

    A traced copy replaces the model and keeps its modules, weights and names, except:

    - The batch norm of a fused stem is folded; with `separable`, all batch norms are folded.
    - Weights of depthwise convolutions get a new memory layout.
    - The bias of a convolution before a residual sum moves into the sum.

    Python side effects of `forward` happen during tracing only, not at each call.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Patterns to fuse in addition to ReLU with max pooling.

        Attributes:
            stem: a few-channel convolution with the ReLU and max pooling after it.
            residual: a sum with the ReLU after it and the bias of a convolution before it.
            config: launch configuration of the stem, a name from `kernels.stem.CONFIGS`; "" derives
                it from the sizes.
            separable: pointwise, depthwise and few-channel convolutions and memory-bound Linears,
                each with its activation; pointwise ones also with a gate before and a sum after.
        """

        stem: bool = False
        residual: bool = False
        config: str = ""
        separable: bool = False

        def __post_init__(self) -> None:
            if self.config and (self.config not in CONFIGS or not self.stem):
                raise ValueError(
                    f"config is {self.config!r}: it needs stem=True and one of {', '.join(CONFIGS)}"
                )
            if self.separable and self.residual:
                raise ValueError("separable and residual cannot be combined: both fuse sums")

    name = "fused_kernels"
    risk = Risk.EXACT

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Claims biases with `separable`, and biases and residual sums with `residual`."""
        # Pointwise convolutions take their sums before engines look for theirs.
        if self.parameters.residual:
            return Claim.SUMS, Claim.BIASES
        return (Claim.BIASES,) if self.parameters.separable else ()

    @property
    def takes_half_only(self) -> bool:
        """True with `separable`: its operators fall back to PyTorch unless values have 16 bits."""
        return self.parameters.separable

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """All combinations of `stem` and `residual`, then `separable` alone."""
        ways = ((False, False), (True, False), (True, True), (False, True))
        stems_and_sums = tuple(cls.Parameters(stem, residual) for stem, residual in ways)
        return (*stems_and_sums, cls.Parameters(separable=True))

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, Triton, and at least one match for each requested pattern.

        Traces the model's `forward` symbolically; with `separable`, also runs it on meta tensors.
        Nothing is computed.
        """
        refused = decide(
            *no_copy(workload),
            no_cuda(facts),
            (facts.triton is None, "needs Triton, which is not installed"),
            capability_below(facts, (8, 0), "the fused kernels"),
        )
        if isinstance(refused, NotApplicable):
            return refused
        try:
            return self._fusible(workload)
        except Exception as error:  # forward is user code and may raise anything
            return untraceable(error)

    def _fusible(self, workload: Workload) -> Applicable | NotApplicable:
        layers, asked = Layers(*traced_to_run(workload)), self.parameters
        folded = _foldable(workload) if asked.stem or asked.separable else frozenset()
        stems, sums, pairs, convolutions = True, True, True, True
        if asked.stem:
            stems = any(layers.stems(folded))
        if asked.residual:
            sums = any(layers.residuals())
        if asked.separable:
            taken = {pair.relu for pair in layers.pooled()}
            convolutions = any(separables(layers, workload, folded, taken))
        elif not (asked.stem or asked.residual):
            pairs = any(layers.pooled())
        return decide(
            (not stems, _NO_STEM),
            (not sums, _NO_RESIDUAL),
            (not convolutions, _NO_SEPARABLE),
            (not pairs, _NO_PAIR),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a copy that runs fused operators; there is nothing to undo."""
        model, graph = traced_to_run(workload)
        layers, asked = Layers(model, graph), self.parameters
        stems, residuals = [], list(layers.residuals()) if asked.residual else []
        pooled, convolutions = list(layers.pooled()), []
        if asked.stem or asked.separable:
            pairs = {pair.batch_norm: pair for pair in foldable_pairs(workload)}
            stems = list(layers.stems(frozenset(pairs))) if asked.stem else []
            folded = {str(node.target) for stem in stems for node in stem.between}
            if asked.separable:
                taken = {pair.relu for pair in pooled} | {stem.conv for stem in stems}
                convolutions = list(separables(layers, workload, frozenset(pairs), taken))
                folded = set(pairs)
            for name in folded.intersection(pairs):
                fold(model, pairs[name])
        of_stems = [stem.pooled for stem in stems]
        for pair in [pair for pair in pooled if pair not in of_stems]:
            _fuse_pooled(graph, pair)
        for stem in stems:
            _fuse_stem(model, graph, stem, asked.config)
        for residual in residuals:
            _fuse_residual(model, graph, residual)
        for convolution in convolutions:
            put(model, graph, convolution)
        yield workload.with_model(torch.fx.GraphModule(model, graph))


def _foldable(workload: Workload) -> frozenset[str]:
    return frozenset(pair.batch_norm for pair in foldable_pairs(workload))


def _fuse_pooled(graph: torch.fx.Graph, pooled: Pooled) -> None:
    relu, pool, window = pooled
    with graph.inserting_before(pool):
        fused = graph.call_function(relu_max_pool2d, (relu.all_input_nodes[0], *window))
    _replace(graph, fused, pool, relu)


def _fuse_stem(model: nn.Module, graph: torch.fx.Graph, stem: Stem, config: str) -> None:
    relu, pool, (size, step, padding, _, ceil_mode) = stem.pooled
    name, source = str(stem.conv.target), stem.conv.args[0]
    conv: Any = model.get_submodule(name)
    # At the convolution's own position, its input is still unmodified.
    with graph.inserting_before(stem.conv):
        weight = graph.get_attr(f"{name}.weight")
        bias = None if conv.bias is None else graph.get_attr(f"{name}.bias")
        window = (size, step, padding, ceil_mode)
        given = (source, weight, bias, conv.stride, conv.padding, *window, config)
        fused = graph.call_function(conv_relu_max_pool2d, given)
    _replace(graph, fused, pool, relu, *stem.between, stem.conv)


def _fuse_residual(model: nn.Module, graph: torch.fx.Graph, residual: Residual) -> None:
    first, second = residual.add.args
    bias = None
    with graph.inserting_before(residual.add):
        if residual.biased is not None:
            conv: Any = model.get_submodule(str(residual.biased.target))
            name = f"added_{residual.add.name}"
            model.register_parameter(name, conv.bias)
            conv.bias = None
            bias = graph.get_attr(name)
        fused = graph.call_function(bias_add_relu, (first, second, bias))
    _replace(graph, fused, residual.relu, residual.add)


def _replace(
    graph: torch.fx.Graph, fused: torch.fx.Node, last: torch.fx.Node, *others: torch.fx.Node
) -> None:
    """Replace several graph nodes, given from last to first, by one fused node."""
    last.replace_all_uses_with(fused)
    for node in (last, *others):
        graph.erase_node(node)
