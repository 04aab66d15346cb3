"""Runs the model on a 16-bit copy of its weights."""

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
    """Converts weights, buffers and arithmetic to 16 bits; inputs and outputs keep their dtypes.

    Each call converts floating-point inputs to the 16-bit dtype and converts outputs back. Integer
    and complex tensors stay unchanged.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The dtype of weights and arithmetic."""

        dtype: HalfName = "bf16"

    name = "cast_weights"
    risk = Risk.HALF

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The element type."""
        return (Claim.ELEMENT_TYPE,)

    @property
    def precision(self) -> str:
        """The dtype: bf16 or fp16."""
        return self.parameters.dtype

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """fp16 and bf16; fp16 first on a GPU, where cuDNN has more engines for fp16."""
        order = ("fp16", "bf16") if facts.device == "cuda" else ("bf16", "fp16")
        return tuple(cls.Parameters(dtype) for dtype in order)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs inference, a float32 module without hooks, and hardware with 16-bit arithmetic."""
        return decide(
            *no_copy(workload),
            not_float32(workload),
            half_unsupported(facts, self.parameters.dtype),
            hooks_see(workload, _SEEN),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a 16-bit copy of the model; there is nothing to undo.

        Raises:
            UnsupportedError: the model has hooks.
        """
        refuse_if(hooks_see(workload, _SEEN))
        dtype = HALF_TYPES[self.parameters.dtype]
        copied = copy_with(workload.model, partial(to_type, dtype=dtype), apart=True)
        yield workload.with_model(CastModel(copied, dtype, own_dtype(workload)))


def to_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a floating-point tensor to a dtype; return other tensors unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class CastModel(Converting):
    """A model whose weights have one dtype and whose inputs and outputs have another.

    Args:
        inner: the model, its weights in `dtype`.
        dtype: the dtype that floating-point inputs are converted to.
        outer: the dtype that outputs in `dtype` are converted to.
    """

    def __init__(self, inner: nn.Module, dtype: torch.dtype, outer: torch.dtype) -> None:
        super().__init__(inner, partial(to_type, dtype=dtype), self._out)
        self.dtype, self.outer = dtype, outer

    def _out(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(tensor, self.outer) if tensor.dtype == self.dtype else tensor
