"""From what a worker found to whether a candidate may be used; no tensor is looked at here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from steadytorch.runtime.agreement import MAX_ERROR_FACTOR, TOLERANCES

SAME_FACTOR = 4.0
"""Class `same`: at most this many times the untouched workload's own error.

Another order of sums is as right and brings more or less of it: one convolution in float32 was seen
at 1.6 to 1.9 times with channels last on a CPU. A lower precision brings hundreds of times."""
STEP_FACTOR = 2.0
"""Each part of a training step: at most this many times what rounding explains of it."""
VOID = 1.0
"""A relative error that says nothing any more: outputs that are all zero have it."""
UNREPEATABLE = "cannot be verified: the untouched workload's own output changes between calls"
LEVEL = 0.001
"""Probability of refusing a sound step that draws random numbers, for each of two tests."""
GRADIENTS = "gradients"
"""The part of a training step whose size is bounded as well, see `verify_training`."""


class OutputError(msgspec.Struct, frozen=True):
    """How far outputs are from the reference, the worst over outputs and input sets.

    Attributes:
        relative_l2: norm of the difference over norm of the reference.
        relative_max: largest difference over the largest reference magnitude. Of gradients and of
            buffers, the relative L2 error of the tensor that is furthest off.
    """

    relative_l2: float
    relative_max: float


class Verification(msgspec.Struct, frozen=True):
    """What a worker found, before anything is decided.

    Attributes:
        error: against the reference; None when `fault` makes it meaningless.
        fault: shape, dtype, NaN, aliasing or mutation, in words; None if none.
        parts: of a training step, the errors that `error` is the worst of, by name.
        p_value: of a step that draws other random numbers from one seed than the untouched one: how
            likely equal distributions are to look as different; None where it draws the same.
        differs: in words, what differs most.
    """

    error: OutputError | None
    fault: str | None = None
    parts: dict[str, OutputError] = {}
    p_value: float | None = None
    differs: str = ""


class Reference(msgspec.Struct, frozen=True):
    """What the untouched workload does on the verification inputs.

    Attributes:
        error: its own error against the reference of higher precision.
        precision: float64, or float32 where float64 cannot run.
        repeatable: whether two calls with one input agree.
        fresh: whether random inputs could be used; if not, the workload's own inputs were.
        note: why float64 or fresh inputs were not used, else empty.
        explained: of a training step, the errors that rounding explains, by precision class and
            part; empty for inference.
        draws: whether a training step draws random numbers.
    """

    error: OutputError
    precision: str
    repeatable: bool
    fresh: bool
    note: str = ""
    explained: dict[str, dict[str, OutputError]] = {}
    draws: bool = False


def worst(errors: Iterable[OutputError]) -> OutputError:
    """The largest of each measure."""
    listed = list(errors)
    return OutputError(max(e.relative_l2 for e in listed), max(e.relative_max for e in listed))


def decide(
    found: Verification,
    reference: Reference,
    precision: str,
    tolerance: float | None,
    resolution: float = float(torch.finfo(torch.float32).eps),
) -> str | None:
    """Whether a verified candidate may be used: None, or the reason for rejecting it.

    Args:
        found: what its worker found.
        reference: the untouched workload's own error and repeatability.
        precision: the candidate's own class: same, tf32, bf16 or fp16.
        tolerance: relative L2 error that the user allows; None for the class's default.
        resolution: the error that rounding the output once may bring.
    """
    if found.fault is not None or found.error is None:
        return found.fault or "gave no outputs to compare"
    if not reference.repeatable:
        return UNREPEATABLE
    if found.p_value is not None:
        if found.p_value > LEVEL:
            return None
        return f"random numbers: {found.differs} is another (p = {found.p_value:.2g})"
    if reference.explained:
        explained = reference.explained[precision]
        return decide_parts(found.parts, explained, precision, tolerance, resolution)
    if precision == "same":
        l2_bound = SAME_FACTOR * max(reference.error.relative_l2, resolution)
        # The largest of many rounding errors varies more than their norm does: it may reach several
        # times the bound on the norm where the untouched workload's own happens to be small.
        max_bound = SAME_FACTOR * max(reference.error.relative_max, l2_bound)
    else:
        l2_bound = tolerance if tolerance is not None else TOLERANCES[precision]
        max_bound = MAX_ERROR_FACTOR * l2_bound
    return _excess(found.error, l2_bound, max_bound)


def decide_parts(
    parts: Mapping[str, OutputError],
    explained: Mapping[str, OutputError],
    precision: str,
    tolerance: float | None = None,
    resolution: float = float(torch.finfo(torch.float32).eps),
) -> str | None:
    """Each part of a training step against what rounding explains of it."""
    given = tolerance if precision != "same" else None
    least = resolution if precision == "same" else TOLERANCES[precision]
    for name, error in parts.items():
        own = explained[name]
        l2_bound = given or max(least, STEP_FACTOR * max(own.relative_l2, resolution))
        max_bound = MAX_ERROR_FACTOR * (given or max(least, own.relative_l2, own.relative_max))
        # In a class that rounds coarsely, gradients may be beyond recognition; their size is not.
        if not l2_bound < VOID and (precision == "same" or name != GRADIENTS):
            return (
                f"cannot be verified: rounding alone moves the untouched workload's {name} by "
                f"{own.relative_l2:.0%}"
            )
        if (reason := _excess(error, l2_bound, max_bound)) is not None:
            return f"{name}: {reason}"
    return None


def _excess(error: OutputError, l2_bound: float, max_bound: float) -> str | None:
    if not error.relative_l2 <= l2_bound:
        return f"relative error {error.relative_l2:.1e} exceeds {l2_bound:.1e}"
    if not error.relative_max <= max_bound:
        return f"largest error {error.relative_max:.1e} exceeds {max_bound:.1e}"
    return None
