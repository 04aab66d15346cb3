"""Decides from measured errors whether a candidate may be used, without reading tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from steadytorch.runtime.agreement import MAX_ERROR_FACTOR, ROUNDING, TOLERANCES
from steadytorch.runtime.slices import ROUNDINGS

SAME_FACTOR = 4.0
"""Class `same`: largest error allowed, as a multiple of the untouched workload's own error.

Another order of summation is equally correct but changes the error: a float32 convolution in
channels last on a CPU had 1.6 to 1.9 times the error, a lower precision hundreds of times."""
SLICE_FACTOR = 4.0
"""Lower classes: largest error allowed in a slice, as a multiple of what rounding explains. Of 54
networks, the worst slice in bf16 or fp16 had 1.9 times as much."""
INT8_ROUNDING = 10 / 255 / 12**0.5
"""Relative error of one rounding to int8; see `TOLERANCES`."""
STEP_FACTOR = 2.0
"""Training: largest error allowed per part, as a multiple of the error that rounding explains."""
VOID = 1.0
"""Relative error of all-zero outputs; a bound this large verifies nothing."""
UNREPEATABLE = "cannot be verified: the untouched workload's own output changes between calls"
LEVEL = 0.001
"""Probability of refusing a sound step that draws random numbers, for each of two tests."""
_ROUNDING = {"same": 0.0, "int8": INT8_ROUNDING, **ROUNDING}
GRADIENTS = "gradients"
"""Part of a training step whose norm is bounded too; see `training.verify`."""


class OutputError(msgspec.Struct, frozen=True):
    """Worst error against the reference, over all outputs and input sets.

    Attributes:
        relative_l2: norm of the difference over norm of the reference.
        relative_max: largest difference over largest reference magnitude. For gradients and
            buffers: the largest relative L2 error of a single tensor.
        relative_slice: largest relative L2 error of a slice per rounding; see
            `runtime.slices`. 0 if no slice was compared.
        slice: the slice with this error, as text.
    """

    relative_l2: float
    relative_max: float
    relative_slice: float = 0.0
    slice: str = ""


class Verification(msgspec.Struct, frozen=True):
    """Errors and faults that a worker found, before the decision to accept or reject.

    Attributes:
        error: error against the reference; None if `fault` makes it meaningless.
        fault: wrong shape or dtype, NaN, aliasing or mutation, as text; None if there is none.
        parts: errors of a training step by part; `error` is the worst of them.
        p_value: probability that equal distributions differ this much, for a step that draws other
            random numbers than the untouched one from the same seed; None if it draws the same.
        differs: what differs most, as text.
    """

    error: OutputError | None
    fault: str | None = None
    parts: dict[str, OutputError] = {}
    p_value: float | None = None
    differs: str = ""


class Reference(msgspec.Struct, frozen=True):
    """The untouched workload's behaviour on the verification inputs.

    Attributes:
        error: the untouched workload's error against the reference of higher precision.
        precision: float64, or float32 if float64 cannot run.
        repeatable: whether two calls with the same input agree.
        fresh: whether random inputs were used; otherwise the workload's own inputs.
        note: why float64 or random inputs were not used, else empty.
        explained: errors of a training step that rounding explains, by precision class and part;
            empty for inference.
        draws: whether a training step draws random numbers.
        roundoff: unit roundoff of the untouched workload's arithmetic; 0 for training.
    """

    error: OutputError
    precision: str
    repeatable: bool
    fresh: bool
    note: str = ""
    explained: dict[str, dict[str, OutputError]] = {}
    draws: bool = False
    roundoff: float = 0.0


def worst(errors: Iterable[OutputError]) -> OutputError:
    """The largest error of each kind over several errors."""
    listed = list(errors)
    part = max(listed, key=lambda error: error.relative_slice)
    return OutputError(
        max(e.relative_l2 for e in listed),
        max(e.relative_max for e in listed),
        part.relative_slice,
        part.slice,
    )


def decide(
    found: Verification,
    reference: Reference,
    precision: str,
    tolerance: float | None,
    resolution: float = float(torch.finfo(torch.float32).eps),
) -> str | None:
    """Decides whether a candidate may be used; returns None, or the reason to reject it.

    Args:
        found: the worker's result.
        reference: the untouched workload's own error and repeatability.
        precision: the candidate's precision class: same, tf32, bf16, fp16 or int8.
        tolerance: relative L2 error that the user allows; None for the class's default.
        resolution: relative error of rounding the output once.
    """
    if found.fault is not None or found.error is None:
        return found.fault or "returned no outputs to compare"
    if not reference.repeatable:
        return UNREPEATABLE
    if found.p_value is not None:
        if found.p_value > LEVEL:
            return None
        return f"random numbers: {found.differs} differs (p = {found.p_value:.2g})"
    if reference.explained:
        explained = reference.explained[precision]
        return decide_parts(found.parts, explained, precision, tolerance, resolution)
    if precision == "same":
        l2_bound = SAME_FACTOR * max(reference.error.relative_l2, resolution)
        # The largest of many rounding errors varies more than their norm. It may exceed the norm's
        # bound several times if the untouched workload's own happens to be small.
        max_bound = SAME_FACTOR * max(reference.error.relative_max, l2_bound)
    else:
        l2_bound = tolerance if tolerance is not None else TOLERANCES[precision]
        max_bound = MAX_ERROR_FACTOR * l2_bound
    return _excess(found.error, l2_bound, max_bound) or _slice_excess(
        found.error, reference, precision, tolerance
    )


def _slice_excess(
    error: OutputError, reference: Reference, precision: str, tolerance: float | None
) -> str | None:
    unit = max(reference.roundoff, _ROUNDING[precision])
    bound = SLICE_FACTOR * unit
    if precision == "same":  # compares two programs with as many roundings: see `SAME_FACTOR`
        bound *= SAME_FACTOR
    elif tolerance is not None:
        bound = max(bound, tolerance / ROUNDINGS)
    if error.relative_slice <= bound:
        return None
    times, allowed = error.relative_slice / unit, bound / unit
    return f"{error.slice} is off by {times:.2g} times what rounding explains, not {allowed:.2g}"


def decide_parts(
    parts: Mapping[str, OutputError],
    explained: Mapping[str, OutputError],
    precision: str,
    tolerance: float | None = None,
    resolution: float = float(torch.finfo(torch.float32).eps),
) -> str | None:
    """Checks the error of each part of a training step against the error that rounding explains."""
    given = tolerance if precision != "same" else None
    least = resolution if precision == "same" else TOLERANCES[precision]
    for name, error in parts.items():
        own = explained[name]
        l2_bound = given or max(least, STEP_FACTOR * max(own.relative_l2, resolution))
        max_bound = MAX_ERROR_FACTOR * (given or max(least, own.relative_l2, own.relative_max))
        # Coarse rounding may destroy the direction of gradients, but not their norm.
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
