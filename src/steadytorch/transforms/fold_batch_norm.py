"""Folds batch norm into the preceding convolution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.copying import copy_with
from steadytorch.rewrite.tracing import traced
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import decide, no_copy, untraceable
from steadytorch.workload.hooks import is_hooked
from steadytorch.workload.workload import Workload

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NO_PAIR = "the model has no convolution followed by batch norm in evaluation mode"


class Pair(NamedTuple):
    """Names of a convolution and of the batch norm that is the only consumer of its output."""

    convolution: str
    batch_norm: str


class FoldBatchNorm(Transform):
    """Folds the scale and shift of batch norms into convolutions, on a copy of the model.

    The copy keeps the model's `forward`; an `nn.Identity` replaces each folded batch norm. Folding
    alone can be slower, because the convolution's bias may become a separate kernel.
    """

    name = "fold_batch_norm"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a convolution whose only consumer is a batch norm in evaluation mode.

        Traces the model's `forward` symbolically, without computing anything.
        """
        refused = decide(*no_copy(workload), (not _holds_both(workload.module), _NO_PAIR))
        if isinstance(refused, NotApplicable):
            return refused
        try:
            pairs = foldable_pairs(workload)
        except Exception as error:  # forward is user code and may raise anything
            return untraceable(error)
        return decide((not pairs, _NO_PAIR))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a folded copy of the model; there is nothing to undo."""
        folded = copy_with(workload.model, lambda tensor: tensor, apart=True)
        for pair in foldable_pairs(workload):
            fold(folded, pair)
        yield workload.with_model(folded)


def foldable_pairs(workload: Workload) -> list[Pair]:
    """Find pairs of convolution and batch norm that can be folded without changing results.

    Args:
        workload: must have an `nn.Module`; its inputs determine which optional arguments are set.

    Raises:
        Exception: any exception that `forward` raises during tracing.
    """
    model, graph = traced(workload)
    modules = dict(model.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}

    def alone(node: torch.fx.Node, kinds: tuple[type, ...]) -> bool:
        if node.op != "call_module" or calls[node.target] != 1 or node.target in read:
            return False
        return type(modules[str(node.target)]) in kinds and not is_hooked(modules[str(node.target)])

    pairs = []
    for node in graph.nodes:
        if not alone(node, _BATCH_NORMS) or not _is_fixed(modules[str(node.target)]):
            continue
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        if source is not None and alone(source, _CONVOLUTIONS) and len(source.users) == 1:
            pairs.append(Pair(str(source.target), str(node.target)))
    return pairs


def _holds_both(module: nn.Module | None) -> bool:
    kinds = [] if module is None else [type(m) for m in module.modules()]
    return any(k in _CONVOLUTIONS for k in kinds) and any(k in _BATCH_NORMS for k in kinds)


def _is_fixed(batch_norm: nn.Module) -> bool:
    """Whether a batch norm uses stored statistics, which makes it a constant affine map."""
    return not batch_norm.training and getattr(batch_norm, "running_var", None) is not None


def fold(model: nn.Module, pair: Pair) -> None:
    """Fold a batch norm into its convolution and replace it by an identity, in place.

    Args:
        model: a copy of the model in which `foldable_pairs` found the pair.
        pair: the names of the two layers.
    """
    from torch.nn.utils.fusion import fuse_conv_bn_weights

    convolution: Any = model.get_submodule(pair.convolution)
    norm: Any = model.get_submodule(pair.batch_norm)
    with torch.inference_mode(False), torch.no_grad():
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
    model.set_submodule(pair.batch_norm, nn.Identity().eval())
