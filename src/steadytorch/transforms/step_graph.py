"""Records a whole training step as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import msgspec
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.graphs.step import CapturedStep
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.optimizer import FOR_TRAINING
from steadytorch.transforms.traits import decide, hooked, no_cuda, off_device
from steadytorch.workload.start import modules_of
from steadytorch.workload.workload import Workload


class StepGraph(Transform):
    """Records a training step as CUDA graphs: one launch per graph instead of one per kernel.

    - Scope `backward`: forward, loss and backward; gradient clipping and optimizer run eagerly.
    - Scope `update`: the same, and a second graph for gradient clipping and optimizer.
    - Scope `step`: the whole training step as one graph.

    Random numbers come from the caller's generator, as in eager mode. `graphs.step` lists the
    checks before each replay.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The part of the training step to record."""

        scope: Literal["backward", "update", "step"] = "step"

    name = "step_graph"
    of_step = True
    risk = Risk.EXACT

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Graph capture."""
        return (Claim.CAPTURE,)

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """The whole step first."""
        return cls.Parameters("step"), cls.Parameters("update"), cls.Parameters("backward")

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, training, a model without hooks, and all inputs on the device."""
        return decide(
            no_cuda(facts),
            (not workload.is_training, FOR_TRAINING),
            hooked(workload),
            off_device(workload),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload whose step is recorded after a few eager runs.

        Raises:
            UnsupportedError: the workload is not for training, or its model has hooks.
        """
        step = workload.training_step
        if step is None:
            raise UnsupportedError(FOR_TRAINING)
        hooks, reason = hooked(workload)  # a stored plan's model may have got hooks since
        if hooks:
            raise UnsupportedError(reason)
        made: list[CapturedStep] = []

        def captured(eager: Any) -> CapturedStep:
            modules: list[nn.Module] = list(modules_of(workload).values())
            made.append(CapturedStep(eager, self.parameters.scope, modules))
            return made[-1]

        try:
            yield replace(workload, training_step=replace(step, captured=captured))
        finally:
            for each in made:
                each.close()
