"""The precision class of a candidate, and the classes that each `--precision` allows."""

from __future__ import annotations

from steadytorch import transforms
from steadytorch.results.candidate import Candidate
from steadytorch.transforms.base import PRECISIONS

__all__ = ["ALLOWED", "PRECISIONS", "half_of", "precision_of"]

ALLOWED = {
    "same": frozenset({"same"}),
    "tf32": frozenset({"same", "tf32"}),
    "bf16": frozenset({"same", "tf32", "bf16"}),
    "fp16": frozenset({"same", "tf32", "fp16"}),
    "int8": frozenset({"same", "tf32", "bf16", "int8"}),
}
"""Precision classes allowed by a user's `--precision`. bf16 and fp16 exclude each other: bf16 has
the range of float32, fp16 the longer mantissa. int8 includes bf16."""


def half_of(precision: str) -> str:
    """Precision used within PyTorch for a given `--precision`: bf16 for int8, else unchanged."""
    return "bf16" if precision == "int8" else precision


def precision_of(candidate: Candidate) -> str:
    """Return the precision class of a candidate: the lowest among its transforms.

    Raises:
        UsageError: the registry does not know one of the transforms.
    """
    classes = {transforms.create(spec).precision for spec in candidate}
    return max(classes | {"same"}, key=PRECISIONS.index)
