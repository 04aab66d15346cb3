"""cuDNN engines known to compute wrong or unrepeatable results, with sources."""

from __future__ import annotations

import re

import msgspec

from steadytorch.conv.problem import ConvProblem, Operation

_ERRATA = "errata of PyTorch's cuDNN convolutions (aten/src/ATen/native/cudnn/Conv_v8.cpp)"


class Denied(msgspec.Struct, frozen=True):
    """A denied cuDNN engine, and the conditions under which it is denied.

    Attributes:
        engine: number of the engine.
        operation: operation of the convolution.
        source: report of the fault.
        since: first affected cuDNN version, as cuDNN counts: 90800 is 9.8.0.
        until: last affected version, including all its patches; None if no fix is known.
        capability: affected compute capability, e.g. `8.6`; None for all.
        dimensions: affected number of spatial dimensions; None for all.
    """

    engine: int
    operation: Operation
    source: str
    since: int = 0
    until: int | None = None
    capability: str | None = None
    dimensions: int | None = None

    def concerns(self, problem: ConvProblem, name: str, version: int, capability: str) -> bool:
        """Whether the denylist entry applies to a plan of this name."""
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
    """Engine number in a plan's name such as `eng41_k2=4_k13=0`; None for other names."""
    found = re.match(r"eng(\d+)(?:_|$)", name)
    return None if found is None else int(found[1])


def denied(problem: ConvProblem, name: str, version: int, capability: str) -> str | None:
    """Reason why a cuDNN plan must not be used; None if the plan is not on the denylist.

    Args:
        problem: the convolution.
        name: name of the plan.
        version: cuDNN version as a number, e.g. 91900.
        capability: compute capability, e.g. `9.0`.
    """
    for entry in DENYLIST:
        if entry.concerns(problem, name, version, capability):
            return f"known to be faulty: {entry.source}"
    return None
