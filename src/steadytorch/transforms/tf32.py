"""Lets float32 products run on tensor cores in TF32."""

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
    # `allow_tf32` is not used: PyTorch refuses to read it once a precision has been set in this,
    # newer way, and so it cannot be restored.
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


class Tf32(Transform):
    """TF32 for matrix products, convolutions and recurrent layers.

    float32 is rounded to 10 bits of mantissa before products; sums stay in float32. In a training
    step it covers the forward pass.
    """

    name = "tf32"
    risk = Risk.TF32

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The float32 precision."""
        return (Claim.FLOAT32_PRECISION,)

    @property
    def precision(self) -> str:
        """Always tf32."""
        return "tf32"

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a float32 workload on a GPU with TF32, and an operator that does not use it yet."""
        on = all(operator.fp32_precision == "tf32" for operator in _operators())
        return decide(
            no_cuda(facts),
            capability_below(facts, (8, 0), "TF32"),
            not_float32(workload),
            (on, "already on"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields a workload that sets the precisions at each call and puts back what it found."""
        settings = [(operator, "fp32_precision", "tf32") for operator in _operators()]

        def scope() -> AbstractContextManager[Any]:
            return flags(*settings)

        yield workload.with_model(Scoped(workload.model, scope))
