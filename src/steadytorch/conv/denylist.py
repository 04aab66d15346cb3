"""Engines known to compute wrong or unrepeatable results, each with where that was found."""

from __future__ import annotations

import re

import msgspec

from steadytorch.conv.problem import ConvProblem, Operation

_ERRATA = "errata of PyTorch's cuDNN convolutions (aten/src/ATen/native/cudnn/Conv_v8.cpp)"


class Denied(msgspec.Struct, frozen=True):
    """An engine and where it is not to be used.

    Attributes:
        engine: its number.
        operation: of the convolution.
        source: who found it.
        since: first cuDNN version concerned, as cuDNN counts: 90800 is 9.8.0.
        until: last one, any patch of it included; None where no version is known to be good.
        capability: compute capability concerned, as `8.6`; None for all.
        dimensions: spatial dimensions concerned; None for all.
    """

    engine: int
    operation: Operation
    source: str
    since: int = 0
    until: int | None = None
    capability: str | None = None
    dimensions: int | None = None

    def concerns(self, problem: ConvProblem, name: str, version: int, capability: str) -> bool:
        """Whether a plan of this name falls under the entry."""
        return (
            engine_number(name) == self.engine
            and problem.operation == self.operation
            and self.since <= version
            and (self.until is None or version // 100 <= self.until // 100)
            and self.capability in (None, capability)
            and self.dimensions in (None, len(problem.input) - 2)
        )


DENYLIST = (
    Denied(23, "fprop", "pytorch/pytorch pull request 171747", since=90800, until=91500),
    Denied(23, "dgrad", _ERRATA),
    Denied(23, "fprop", _ERRATA, dimensions=3),
    Denied(
        5,
        "fprop",
        "pytorch/pytorch pull requests 188318 and 189207",
        since=92301,
        until=92400,
        capability="8.6",
    ),
    Denied(58, "fprop", _ERRATA, capability="12.0"),
    Denied(63, "fprop", _ERRATA, capability="12.0"),
)


def engine_number(name: str) -> int | None:
    """The engine of a plan's name such as `eng41_k2=4_k13=0`; None where it has no such form."""
    found = re.match(r"eng(\d+)(?:_|$)", name)
    return None if found is None else int(found[1])


def denied(problem: ConvProblem, name: str, version: int, capability: str) -> str | None:
    """Why a plan is not to be used, or None.

    Args:
        problem: what it would compute.
        name: of the plan.
        version: of cuDNN, as it counts itself.
        capability: of the device, as `9.0`.
    """
    for entry in DENYLIST:
        if entry.concerns(problem, name, version, capability):
            return f"known to be faulty: {entry.source}"
    return None
