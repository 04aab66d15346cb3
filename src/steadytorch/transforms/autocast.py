"""Runs the model under automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.conversion import HALF_TYPES, HalfName, cast, own_device, own_dtype
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import (
    decide,
    half_unsupported,
    hooks_see,
    not_float32,
    refuse_if,
)
from steadytorch.workload.containers import BorrowedArguments, holds_containers
from steadytorch.workload.narrow_output import is_asked, left_narrow, narrow_output
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

_SEEN = "16-bit tensors"


class Autocast(Transform):
    """Runs the model under `torch.autocast`; the weights keep their dtype.

    Autocast converts the weights at each call, which launches extra kernels. Outputs in the 16-bit
    dtype are converted back to the workload's dtype.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The 16-bit dtype."""

        dtype: HalfName = "bf16"

    name = "autocast"
    risk = Risk.HALF
    process_wide = False

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The resources that autocast controls: the dtype, and the biases of convolutions."""
        # Under autocast, results of convolutions have another type than their biases.
        return Claim.ELEMENT_TYPE, Claim.BIASES

    @property
    def precision(self) -> str:
        """The dtype: bf16 or fp16."""
        return self.parameters.dtype

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Return both 16-bit dtypes; bf16 comes first, because it has the range of float32."""
        return cls.Parameters("bf16"), cls.Parameters("fp16")

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Requires float32 and no hooks; fp16 cannot train, because training needs loss scaling."""
        fp16 = self.parameters.dtype == "fp16"
        return decide(
            not_float32(workload),
            half_unsupported(facts, self.parameters.dtype),
            (fp16 and workload.is_training, "training in fp16 needs a gradient scaler"),
            hooks_see(workload, _SEEN),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that runs each call under autocast.

        Raises:
            UnsupportedError: the model has hooks.
        """
        refuse_if(hooks_see(workload, _SEEN))
        dtype = HALF_TYPES[self.parameters.dtype]
        device, outer = own_device(workload).type, own_dtype(workload)
        workload = workload.with_model(AutocastModel(workload.model, device, dtype, outer))
        if (step := workload.training_step) is not None:
            workload = replace(workload, training_step=replace(step, autocast=True))
        yield workload


class AutocastModel(Scoped):
    """Runs a model under autocast and converts its 16-bit outputs to the dtype `outer`.

    Weights converted by autocast are cached within one call only, so that each call sees the
    current weights.

    Args:
        model: the callable to run.
        device: the device type, "cpu" or "cuda".
        dtype: the 16-bit dtype.
        outer: the dtype that outputs in `dtype` are converted to.
    """

    def __init__(self, model: Any, device: str, dtype: torch.dtype, outer: torch.dtype) -> None:
        super().__init__(model, partial(torch.autocast, device, dtype=dtype))
        self.dtype = dtype
        self.outer = outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model under autocast, then convert the outputs outside of autocast.

        An output that only a compiled loss takes is left to it, see `narrow_output`.
        """
        if not holds_containers((*args, *kwargs.values())):
            output = self._run(*args, **kwargs)
            if left_narrow(output, self.dtype, self.outer):
                return output
            return map_tensors(self._out, output)
        borrowed = BorrowedArguments((args, kwargs))
        args, kwargs = borrowed.arguments
        return borrowed.give_back(self._run(*args, **kwargs), self._out)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; models inside it, which other plans may serve, convert their outputs."""
        if not is_asked():
            return super().__call__(*args, **kwargs)
        with narrow_output(allowed=False):
            return super().__call__(*args, **kwargs)

    def _out(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(tensor, self.outer) if tensor.dtype == self.dtype else tensor
