"""Runs the model without any record for gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import INFERENCE_ONLY, decide
from steadytorch.workload.workload import Workload


class InferenceMode(Transform):
    """`torch.inference_mode` around each call: less work for the host per operation.

    Outputs are inference tensors: they can be read and computed with, but not be part of a later
    computation of gradients.
    """

    name = "inference_mode"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Inference only."""
        return decide((workload.is_training, INFERENCE_ONLY))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields a workload that enters inference mode at each call and leaves it after."""
        yield workload.with_model(Scoped(workload.model, torch.inference_mode))
