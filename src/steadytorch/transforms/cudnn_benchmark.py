"""Turns on cuDNN's benchmark mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import msgspec
import torch

from steadytorch.ambient import flags
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import NO_CONVOLUTION, decide, may_convolve, no_cuda
from steadytorch.workload.workload import Workload


class CudnnBenchmark(Transform):
    """Lets cuDNN time its engines at the first call with a shape, and keep the fastest.

    Shapes that already ran in this process are unaffected, because PyTorch keeps the engine it
    chose first. The chosen engines are lost when the process ends. In a training step, benchmark
    mode covers the forward pass only.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """How many engines to time per convolution; 0 times all of them."""

        limit: Literal[10, 0] = 10

    name = "cudnn_benchmark"
    risk = Risk.EXACT
    idle_beside = ("cudnn_engines",)  # which has an engine for each convolution

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """PyTorch's default limit of 10 engines, then all engines."""
        return cls.Parameters(10), cls.Parameters(0)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA with cuDNN and a convolution."""
        cudnn: Any = torch.backends.cudnn
        on = cudnn.benchmark and cudnn.benchmark_limit == self.parameters.limit
        return decide(
            no_cuda(facts),
            (facts.cudnn is None, "cuDNN is not available"),
            (not cudnn.enabled, "cuDNN is disabled (torch.backends.cudnn.enabled is False)"),
            (not may_convolve(workload), NO_CONVOLUTION),
            (on, "already on"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that sets benchmark mode for each call and restores it afterwards."""
        cudnn = torch.backends.cudnn
        settings = [
            (cudnn, "benchmark", True),
            (cudnn, "benchmark_limit", self.parameters.limit),
        ]

        def scope() -> AbstractContextManager[Any]:
            return flags(*settings)

        yield workload.with_model(Scoped(workload.model, scope))
