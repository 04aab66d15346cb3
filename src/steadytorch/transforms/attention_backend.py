"""Selects the implementation of scaled dot product attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import capability_below, decide, may_attend, no_cuda
from steadytorch.workload.workload import Workload

_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
_HALF_ONLY = frozenset({"flash", "cudnn"})


class AttentionBackend(Transform):
    """Replaces PyTorch's automatic choice of attention implementation with a fixed choice.

    If the chosen implementation does not support the inputs, the call raises. The implementations
    `flash` and `cudnn` need 16-bit inputs. The registry's `conflict` checks for 16-bit inputs, not
    `applies_to`, because another transform of the candidate may provide 16-bit inputs.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The implementation."""

        backend: Literal["flash", "efficient", "cudnn", "math"] = "flash"

    name = "attention_backend"
    risk = Risk.EXACT

    @property
    def takes_half_only(self) -> bool:
        """True for flash and cudnn."""
        return self.parameters.backend in _HALF_ONLY

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """All four."""
        return tuple(cls.Parameters(backend) for backend in ("flash", "cudnn", "efficient", "math"))

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Requires CUDA and a model that uses scaled dot product attention."""
        backend = self.parameters.backend
        return decide(
            no_cuda(facts),
            (not may_attend(workload), "the model does not use scaled dot product attention"),
            (backend == "cudnn" and facts.cudnn is None, "cuDNN is not available"),
            capability_below(
                facts, (8, 0) if backend in _HALF_ONLY else (5, 0), f"{backend} attention"
            ),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload whose calls run with the chosen attention implementation."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, _BACKENDS[self.parameters.backend])

        def scope() -> AbstractContextManager[Any]:
            return sdpa_kernel(backend)

        yield workload.with_model(Scoped(workload.model, scope))
