"""Restricts cuDNN to deterministic engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from steadytorch.ambient import flags
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import NO_CONVOLUTION, decide, may_convolve, no_cuda
from steadytorch.workload.workload import Workload

_FORWARD_ONLY = "inference only: it covers the forward pass, and nondeterminism is in the backward"


class CudnnDeterministic(Transform):
    """Uses deterministic cuDNN engines only, for inference."""

    name = "cudnn_deterministic"
    risk = Risk.EXACT
    idle_beside = ("cudnn_engines",)  # which has an engine for each convolution

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA with cuDNN and a convolution; inference only."""
        return decide(
            no_cuda(facts),
            (facts.cudnn is None, "cuDNN is not available"),
            (not may_convolve(workload), NO_CONVOLUTION),
            (workload.is_training, _FORWARD_ONLY),
            (bool(torch.backends.cudnn.deterministic), "already on"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that sets the deterministic flag for each call and then restores it."""

        def scope() -> AbstractContextManager[Any]:
            return flags((torch.backends.cudnn, "deterministic", True))

        yield workload.with_model(Scoped(workload.model, scope))
