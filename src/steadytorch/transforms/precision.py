"""How far a candidate moves the numbers: its precision class, and which classes admit which."""

from __future__ import annotations

from steadytorch import transforms
from steadytorch.results.candidate import Candidate

PRECISIONS = ("same", "tf32", "fp16", "bf16")
ALLOWED = {
    "same": frozenset({"same"}),
    "tf32": frozenset({"same", "tf32"}),
    "bf16": frozenset({"same", "tf32", "bf16"}),
    "fp16": frozenset({"same", "tf32", "fp16"}),
}
"""Which classes a user's `--precision` admits. bf16 and fp16 do not admit one another: one has the
range of float32, the other more mantissa."""


def precision_of(candidate: Candidate) -> str:
    """The class a candidate belongs to: the lowest precision among its transforms.

    Raises:
        UsageError: it names what is no transform.
    """
    classes = {transforms.create(spec).precision for spec in candidate}
    return max(classes | {"same"}, key=PRECISIONS.index)
