"""Errors of the slices of a tensor, which the relative error of the whole tensor may hide.

One tensor can hold values of very different sizes, such as box coordinates beside scores. A slice
holds the values at one index of one dimension: a channel, a column, or a position. It is judged by
its own norm. Rounding explains more where values cancel, so the untouched workload's error in the
slice is counted in roundings, and a candidate may make as many, each of its own precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 32
"""Least effective number of elements in a slice, `sum(x**2)**2 / sum(x**4)`. The error of a few
elements, such as those that a ReLU leaves in a channel, may be small by chance: without this bound,
sound programs made over 100 times the errors of the untouched networks."""
ROUNDINGS = 4.0
"""Least roundings that are expected in a slice."""
SMALLEST = 2.0**-14
"""Least root mean square of a slice: the smallest number that fp16 stores with full precision."""
COMPARED = 1 << 22
"""Elements compared at a time, as float64 copies of whole outputs may exceed a device's memory."""


def norms(out: Tensor, ref: Tensor | None = None, power: int = 1) -> dict[int, Tensor]:
    """L2 norms of the slices of a tensor, or of its difference from another one.

    Elements that are not finite in either count as zero.

    Args:
        out: a real tensor of any shape.
        ref: a real tensor of the same shape; None for the norms of `out` itself.
        power: to which each element is raised first.

    Returns:
        The norms along each dimension whose slices have `LEAST` elements, by dimension: float64, on
        the CPU.
    """
    dims = [d for d, size in enumerate(out.shape) if size > 1 and out.numel() >= LEAST * size]
    if not dims or not out.is_floating_point():
        return {}
    given = [out] if ref is None else [out, ref]
    rows = max(1, COMPARED * len(out) // out.numel())
    sums: dict[int, list[Tensor]] = {dim: [] for dim in dims}
    for chunk in zip(*(each.split(rows) for each in given), strict=True):
        first, *rest = (part.double() for part in chunk)
        delta = first - rest[0] if rest else first
        squares = torch.where(delta.isfinite(), delta, 0.0).pow(2 * power)
        for dim, parts in sums.items():
            parts.append(squares.sum([d for d in range(out.dim()) if d != dim]).cpu())
    return {
        dim: (torch.stack(parts).sum(0) if dim else torch.cat(parts)).sqrt()
        for dim, parts in sums.items()
    }


def explained(own: Tensor, ref: Tensor, unit: float) -> dict[int, Tensor]:
    """The error per unit of roundoff that rounding explains in each slice, as an L2 norm.

    Args:
        own: an output of the untouched workload; real.
        ref: the same output in higher precision.
        unit: unit roundoff of the untouched workload's arithmetic.

    Returns:
        For each dimension of `norms`, one value per slice; infinity for slices that are not judged.
    """
    errors = norms(own, ref)
    return {
        dim: torch.maximum(errors[dim] / unit, ROUNDINGS * size)
        for dim, size in judged(ref).items()
    }


def judged(ref: Tensor) -> dict[int, Tensor]:
    """The norms of slices that are large and spread enough to be judged; infinity for others.

    Args:
        ref: a real tensor.
    """
    found, squares = norms(ref), norms(ref, power=2)
    for dim, size in found.items():
        spread = size.square() >= LEAST**0.5 * squares[dim]
        large = size >= SMALLEST * (ref.numel() // len(size)) ** 0.5
        found[dim] = torch.where(spread & large, size, torch.inf)
    return found


def largest(out: Tensor, ref: Tensor, due: dict[int, Tensor]) -> tuple[float, str]:
    """Finds the slice with the largest error relative to what is due.

    Args:
        out: an output of a candidate; real.
        ref: the same output of the untouched workload in higher precision.
        due: what `explained` or `judged` returned for this output.

    Returns:
        The error as a multiple of what is due, and the slice as text, such as `[:, 4]`; 0 and empty
        text if no slice is judged.
    """
    worst, where = 0.0, ""
    for dim, found in norms(out, ref).items() if due else ():
        ratios = found / due[dim]
        index = int(ratios.argmax())
        if float(ratios[index]) > worst:
            worst, where = float(ratios[index]), f"[{':, ' * dim}{index}]"
    return worst, where
