"""Compiles the loss of a training step with Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.compile import missing_compiler
from steadytorch.transforms.optimizer import FOR_TRAINING
from steadytorch.transforms.traits import decide
from steadytorch.workload.compiled_loss import CompiledLoss
from steadytorch.workload.workload import Workload


class CompileLoss(Transform):
    """Runs the loss as compiled code, forward and backward.

    A cross-entropy over a vocabulary of 50,000 tokens reads and writes the model's output several
    times, in float32 even where the model computes in 16 bits.
    """

    name = "compile_loss"
    of_step = True
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs training and Inductor's compilers."""
        return decide((not workload.is_training, FOR_TRAINING), *missing_compiler(facts))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a compiled loss; it is compiled at the first step.

        Raises:
            UnsupportedError: the workload is not for training.
        """
        step = workload.training_step
        if step is None:
            raise UnsupportedError(FOR_TRAINING)
        made = dict[int, CompiledLoss]()  # each holds its loss, so no id is used twice

        def compiled(loss: Callable[..., Tensor]) -> Any:
            if id(loss) not in made:
                made[id(loss)] = CompiledLoss(loss)
            return made[id(loss)]

        yield replace(workload, training_step=replace(step, compiled_loss=compiled))
