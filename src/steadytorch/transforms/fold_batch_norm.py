"""Folds batch norm into the convolution before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.copying import copy_with
from steadytorch.rewrite.hooks import is_hooked
from steadytorch.rewrite.tracing import traced
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import decide, no_copy, untraceable
from steadytorch.workload.workload import Workload

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NO_PAIR = "the model has no convolution followed by batch norm in evaluation mode"


class Pair(NamedTuple):
    """Names of a convolution and of the batch norm that alone reads its output."""

    convolution: str
    batch_norm: str


class FoldBatchNorm(Transform):
    """Works on a copy in which convolutions carry the scale and shift of their batch norm.

    The copy keeps the model's own `forward`; each folded batch norm is an `nn.Identity` in it. By
    itself this can be slower than before: the bias may become a kernel of its own.
    """

    name = "fold_batch_norm"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a convolution whose output goes to a batch norm in evaluation mode, and only there.

        The model's `forward` is traced with symbols to find out; no arithmetic is done.
        """
        refused = decide(*no_copy(workload), (not _holds_both(workload.module), _NO_PAIR))
        if isinstance(refused, NotApplicable):
            return refused
        try:
            pairs = foldable_pairs(workload)
        except Exception as error:  # forward is the user's code: anything may come out of tracing
            return untraceable(error)
        return decide((not pairs, _NO_PAIR))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on the folded copy; there is nothing to undo."""
        folded = copy_with(workload.model, lambda tensor: tensor, apart=True)
        for pair in foldable_pairs(workload):
            fold(folded, pair)
        yield workload.with_model(folded)


def foldable_pairs(workload: Workload) -> list[Pair]:
    """Finds the pairs that can be folded without a change of results.

    Args:
        workload: one with an `nn.Module`; its inputs decide which optional arguments are given.

    Raises:
        Exception: whatever the model's `forward` raises when traced with symbols.
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
    """Whether it normalises by stored statistics, and so is the same affine map at each call."""
    return not batch_norm.training and getattr(batch_norm, "running_var", None) is not None


def fold(model: nn.Module, pair: Pair) -> None:
    """Puts a batch norm into the convolution before it, and an identity in its place.

    Args:
        model: a copy of the one that the pair was found in, to be changed.
        pair: one of `foldable_pairs`.
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
