"""Runs float32 matrix products, convolutions and recurrent layers on tensor cores in TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from steadytorch.ambient import flags
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import capability_below, decide, no_cuda, not_float32
from steadytorch.workload.workload import Workload


def _operators() -> tuple[Any, ...]:
    # Not `allow_tf32`: once `fp32_precision` was set, PyTorch refuses to read it, so it could not
    # be restored.
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


class Tf32(Transform):
    """Uses TF32 for matrix products, convolutions and recurrent layers.

    Factors are rounded to a 10-bit mantissa; sums stay in float32. In a training step, TF32 covers
    the forward pass only.
    """

    name = "tf32"
    risk = Risk.TF32
    idle_beside = ("cast_weights", "autocast")  # no float32 product is left

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The float32 precision."""
        return (Claim.FLOAT32_PRECISION,)

    @property
    def precision(self) -> str:
        """Always tf32."""
        return "tf32"

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a float32 workload, a GPU with TF32, and an operator that does not use TF32 yet."""
        on = all(operator.fp32_precision == "tf32" for operator in _operators())
        return decide(
            no_cuda(facts),
            capability_below(facts, (8, 0), "TF32"),
            not_float32(workload),
            (on, "already on"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that allows TF32 in each call and restores the settings afterwards."""
        settings = [(operator, "fp32_precision", "tf32") for operator in _operators()]

        def scope() -> AbstractContextManager[Any]:
            return flags(*settings)

        yield workload.with_model(Scoped(workload.model, scope))
