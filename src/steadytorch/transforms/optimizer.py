"""Runs the optimizer's step with another implementation."""

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
from steadytorch.workload.update import Update, is_float64, merged
from steadytorch.workload.workload import Workload

FOR_TRAINING = "training only: inference has no optimizer"
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_FUSED_ON_CPU = (*_FUSED, torch.optim.Adagrad)


class OptimizerStep(Transform):
    """Runs the optimizer's step in fewer kernels.

    `fused` and `foreach` are PyTorch's own implementations of the same update. `merge` updates
    parameter groups with equal hyper-parameters together, because each group costs at least one
    kernel launch. Settings of the caller's optimizer are restored after each step.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The optimizer implementation, and whether to merge groups with equal hyper-parameters."""

        implementation: Literal["own", "fused", "foreach", "compiled"] = "fused"
        merge: bool = False

    name = "optimizer"
    of_step = True
    risk = Risk.EXACT

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Fused, foreach and compiled; first without, then with merged parameter groups."""
        return tuple(
            cls.Parameters(implementation, merge)
            for merge in (False, True)
            for implementation in ("fused", "foreach", "compiled")
        )

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs training and an optimizer that supports, but does not use, the implementation."""
        if workload.training_step is None:
            return NotApplicable(FOR_TRAINING)
        optimizer = peek_optimizer(workload)
        return decide(*self._objections(optimizer, facts.device), *self._merging(optimizer))

    def _objections(self, optimizer: Optimizer, device: str) -> Iterator[Objection]:
        kind, wanted = type(optimizer).__name__, self.parameters.implementation
        groups = optimizer.param_groups
        has = {key for group in groups for key in group}
        if wanted in ("fused", "foreach"):
            yield wanted not in has, f"{kind} has no {wanted} implementation"
            yield all(group.get(wanted) for group in groups), f"{kind} already uses {wanted}"
            yield any(group.get("differentiable") for group in groups), f"{kind} is differentiable"
        if wanted == "fused":
            known = _FUSED if device == "cuda" else _FUSED_ON_CPU
            yield type(optimizer) not in known, f"{kind} has no fused implementation on {device}"
            floating = all(p.is_floating_point() for group in groups for p in group["params"])
            yield not floating, "the optimizer has parameters that are not floating point"
        if wanted == "compiled":
            odd = isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam))
            yield odd, f"{kind} cannot be compiled"
            wide = any(map(is_float64, groups))
            yield wide, "its parameters are float64, and compiled steps count in float32"
            # The others already run one kernel per tensor list; compiling would not reduce that.
            yield "capturable" not in has, f"{kind} cannot read its learning rate from the device"

    def _merging(self, optimizer: Optimizer) -> Iterator[Objection]:
        if self.parameters.merge:
            count = len(optimizer.param_groups)
            yield count == len(merged(optimizer.param_groups)), "all parameter groups differ"
            own = not type(optimizer).__module__.startswith("torch.optim.")
            yield own, f"{type(optimizer).__name__} may treat parameter groups one by one"

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with this implementation; the optimizer object is not changed.

        Raises:
            UnsupportedError: the workload is not for training.
        """
        step = workload.training_step
        if step is None:
            raise UnsupportedError(FOR_TRAINING)
        implementation, merge = self.parameters.implementation, self.parameters.merge
        update = partial(Update, implementation=implementation, merge=merge)
        yield replace(workload, training_step=replace(step, update=update))


def peek_optimizer(workload: Workload) -> Optimizer:
    """Return the optimizer of a training workload, or a temporary one from its factory."""
    assert workload.training_step is not None
    optimizer = workload.training_step.optimizer
    if isinstance(optimizer, Optimizer):
        return optimizer
    return optimizer(workload.untouched.parameters())
