"""Runs the model on a copy of its weights in a 16-bit element type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.conversion import HALF_TYPES, Converting, HalfName, cast, own_dtype
from steadytorch.rewrite.copying import copy_with
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import (
    decide,
    half_unsupported,
    hooks_see,
    no_copy,
    not_float32,
    refuse_if,
)
from steadytorch.workload.workload import Workload

_SEEN = "16-bit tensors"


class CastWeights(Transform):
    """Weights, buffers and arithmetic in 16 bits; inputs and outputs keep their element types.

    Floating-point inputs are converted on the way in, outputs of the 16-bit type on the way out.
    Integer and complex tensors stay as they are.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The element type of weights and arithmetic."""

        dtype: HalfName = "bf16"

    name = "cast_weights"
    risk = Risk.HALF

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The element type."""
        return (Claim.ELEMENT_TYPE,)

    @property
    def precision(self) -> str:
        """The element type: bf16 or fp16."""
        return self.parameters.dtype

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Both types, fp16 first on a GPU: its convolutions have more engines to choose from."""
        order = ("fp16", "bf16") if facts.device == "cuda" else ("bf16", "fp16")
        return tuple(cls.Parameters(dtype) for dtype in order)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a float32 module without hooks, for inference, and hardware for the type."""
        return decide(
            *no_copy(workload),
            not_float32(workload),
            half_unsupported(facts, self.parameters.dtype),
            hooks_see(workload, _SEEN),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on the converted copy; nothing to undo.

        Raises:
            UnsupportedError: the model has hooks.
        """
        refuse_if(hooks_see(workload, _SEEN))
        dtype = HALF_TYPES[self.parameters.dtype]
        copied = copy_with(workload.model, partial(to_type, dtype=dtype), apart=True)
        yield workload.with_model(CastModel(copied, dtype, own_dtype(workload)))


def to_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives a floating-point tensor another type; returns others as is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class CastModel(Converting):
    """A model in one floating-point type that takes and returns another.

    Args:
        inner: the model, its weights in `dtype`.
        dtype: the type that floating-point inputs are converted to.
        outer: the type that outputs of type `dtype` are converted to.
    """

    def __init__(self, inner: nn.Module, dtype: torch.dtype, outer: torch.dtype) -> None:
        super().__init__(inner, partial(to_type, dtype=dtype), self._out)
        self.dtype, self.outer = dtype, outer

    def _out(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(tensor, self.outer) if tensor.dtype == self.dtype else tensor
