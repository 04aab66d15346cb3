"""torchao's quantised linear layers as candidates of steadytorch, for GPUs.

Run with torchao 0.18 on an H100.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from torch import nn

from steadytorch.plugins import (
    Applicable,
    DeviceFacts,
    NotApplicable,
    Risk,
    Transform,
    UnsupportedError,
    Workload,
)

CONFIGS = {
    "int8-weight": "Int8WeightOnlyConfig",
    "int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
    "fp8-weight": "Float8WeightOnlyConfig",
    "fp8-dynamic": "Float8DynamicActivationFloat8WeightConfig",
}
FP8_CAPABILITY = (8, 9)


class TorchAo(Transform):
    """Quantises the weights of linear layers, and with `dynamic` also their inputs.

    Works on a copy, after `cast_weights` and before `compile`, which fuses the conversions. Its
    errors must stay within the tolerance of class bf16, the lowest.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The scheme."""

        scheme: Literal["int8-weight", "int8-dynamic", "fp8-weight", "fp8-dynamic"] = "int8-weight"

    name = "torchao"
    risk = Risk.HALF
    process_wide = False

    @property
    def precision(self) -> str:
        """The lowest class."""
        return "bf16"

    def libraries(self) -> dict[str, str]:
        """The version of torchao."""
        return {"torchao": version("torchao")}

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """All schemes; fp8 only where tensor cores have it."""
        capability = tuple(map(int, (facts.compute_capability or "0.0").split(".")))
        return [
            cls.Parameters(scheme)
            for scheme in CONFIGS
            if not scheme.startswith("fp8") or capability >= FP8_CAPABILITY
        ]

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, and inference by a module with linear layers."""
        if facts.device != "cuda":
            return NotApplicable("for GPUs only: on CPUs torchao's int8 is slower than eager")
        if workload.is_training or workload.module is None:
            return NotApplicable("for inference by an nn.Module only")
        if not any(isinstance(module, nn.Linear) for module in workload.module.modules()):
            return NotApplicable("the model has no linear layer")
        return Applicable()

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on a quantised copy.

        Raises:
            UnsupportedError: no layer was quantised.
        """
        from torchao import quantization

        model = copy.deepcopy(workload.model)
        before = _types(model)
        config = getattr(quantization, CONFIGS[self.parameters.scheme])()
        quantization.quantize_(model, config)
        if _types(model) == before:
            raise UnsupportedError(f"torchao quantised no layer with {self.parameters.scheme}")
        yield workload.with_model(model)


def _types(model: nn.Module) -> list[type]:
    return [
        type(module.weight.data if type(module.weight) is nn.Parameter else module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
