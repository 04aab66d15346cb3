"""The precision class of a candidate, and the classes that each `--precision` allows."""

from __future__ import annotations

from steadytorch import transforms
from steadytorch.results.candidate import Candidate
from steadytorch.transforms.base import PRECISIONS

__all__ = ["ALLOWED", "PRECISIONS", "precision_of"]

ALLOWED = {
    "same": frozenset({"same"}),
    "tf32": frozenset({"same", "tf32"}),
    "bf16": frozenset({"same", "tf32", "bf16"}),
    "fp16": frozenset({"same", "tf32", "fp16"}),
}
"""Precision classes allowed by a user's `--precision`. bf16 and fp16 exclude each other: bf16 has
the range of float32, fp16 the longer mantissa."""


def precision_of(candidate: Candidate) -> str:
    """Return the precision class of a candidate: the lowest among its transforms.

    Raises:
        UsageError: the registry does not know one of the transforms.
    """
    classes = {transforms.create(spec).precision for spec in candidate}
    return max(classes | {"same"}, key=PRECISIONS.index)
