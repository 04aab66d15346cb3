"""Takes the optimizer's step by another implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch.optim import Optimizer

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import Objection, decide
from steadytorch.workload.update import Update, merged
from steadytorch.workload.workload import Workload

FOR_TRAINING = "for training: inference has no optimizer"
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_FUSED_ON_CPU = (*_FUSED, torch.optim.Adagrad)


class OptimizerStep(Transform):
    """The optimizer's step as few kernels: fused or for lists of tensors, groups merged.

    `fused` and `foreach` are PyTorch's own implementations of the same update. `merge` updates
    groups with equal hyper-parameters together: one group per layer is common, and costs a launch
    or more each. The optimizer stays the caller's, its switches as they were after each step.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Which implementation, and whether groups with equal hyper-parameters are merged."""

        implementation: Literal["own", "fused", "foreach", "compiled"] = "fused"
        merge: bool = False

    name = "optimizer"
    of_step = True
    risk = Risk.EXACT

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Fused first; merged where there are groups to merge."""
        return tuple(
            cls.Parameters(implementation, merge)
            for merge in (False, True)
            for implementation in ("fused", "foreach", "compiled")
        )

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs training, and an optimizer that has the implementation and does not use it yet."""
        if workload.training_step is None:
            return NotApplicable(FOR_TRAINING)
        optimizer = optimizer_of(workload)
        return decide(*self._objections(optimizer, facts.device), *self._merging(optimizer))

    def _objections(self, optimizer: Optimizer, device: str) -> Iterator[Objection]:
        kind, wanted = type(optimizer).__name__, self.parameters.implementation
        groups = optimizer.param_groups
        has = {key for group in groups for key in group}
        if wanted in ("fused", "foreach"):
            yield wanted not in has, f"{kind} has no {wanted} implementation"
            yield all(group.get(wanted) for group in groups), f"{kind} is {wanted} already"
            yield any(group.get("differentiable") for group in groups), f"{kind} is differentiable"
        if wanted == "fused":
            known = _FUSED if device == "cuda" else _FUSED_ON_CPU
            yield type(optimizer) not in known, f"{kind} has no fused implementation on {device}"
            floating = all(p.is_floating_point() for group in groups for p in group["params"])
            yield not floating, "parameters are not floating-point numbers"
        if wanted == "compiled":
            odd = isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam))
            yield odd, f"{kind} cannot be compiled"
            # Already one kernel per list of tensors; compiling replaces these by as many.
            yield "capturable" not in has, f"{kind} cannot take its learning rate from the device"

    def _merging(self, optimizer: Optimizer) -> Iterator[Objection]:
        if self.parameters.merge:
            count = len(optimizer.param_groups)
            yield count == len(merged(optimizer.param_groups)), "no groups are equal"

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload with its updates taken so; the optimizer itself is not changed.

        Raises:
            UnsupportedError: it does not train.
        """
        step = workload.training_step
        if step is None:
            raise UnsupportedError(FOR_TRAINING)
        implementation, merge = self.parameters.implementation, self.parameters.merge
        update = partial(Update, implementation=implementation, merge=merge)
        yield replace(workload, training_step=replace(step, update=update))


def optimizer_of(workload: Workload) -> Optimizer:
    """The optimizer of a training workload, made for a look where there is a factory only."""
    assert workload.training_step is not None
    optimizer = workload.training_step.optimizer
    if isinstance(optimizer, Optimizer):
        return optimizer
    return optimizer(workload.untouched.parameters())
