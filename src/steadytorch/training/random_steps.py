"""Training steps that draw random numbers: whether two ways to take them draw alike.

Dropout on other memory layouts, in another precision or in compiled code draws other numbers from
one seed, and is as right. So the steps are compared as distributions: many passes with one batch
and different seeds, each summarised by a few figures. A mask that channels share makes gradients of
neighbours correlate. Another rate changes how far gradients vary. Another mask in the backward pass
changes the slope of the loss along its gradient.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadytorch.runtime.agreement import TOLERANCES, together
from steadytorch.training.passes import SMALL, Passes, begin, passes
from steadytorch.verification.verdict import STEP_FACTOR
from steadytorch.verification.verify import Arguments
from steadytorch.workload.start import Start, parameters_of
from steadytorch.workload.workload import Workload

SEEDS = 64
FEWEST_SEEDS = 24
SECONDS = 15.0
"""Longest time for the passes of one sample, from `FEWEST_SEEDS` on."""
FIRST_SEED = 1000
STEPS = 0.02, 0.1
"""Least and largest change of the loss, relative, along the gradient; each seed has its own. At
0.01, weights move by less than bf16 resolves: the slope of a ConvNeXt was off by 2 % and more, and
by the same for every seed, as its masks have little effect. At 0.1 it is within 0.2 % in float32.
"""
LEAST_MARGIN = 0.02
"""Medians no further apart than this, relative, are no difference in any class."""
ACCURATE = 0.1
"""Gradients that rounding to bf16 moves by no more also give a slope by themselves. Those further
up a network with kinks and batch norms are noise in bf16, and the loss bends along them: that slope
changed by 3 to 12 % where a backward pass drew another mask, and by 0.3 % in bf16."""
VARIES = 0.1
"""Below this share of a gradient its change from pass to pass may be rounding to bf16 alone."""
REACHED = 0.3
"""Differences of gradients are rounded as the gradients are: share of these that is compared."""
SLOPES = 2
"""Columns of slopes, behind the loss."""
_NAN = torch.tensor(float("nan"))
SAME_NUMBERS = "draws the same random numbers at each call"
NOT_ADVANCED = "does not advance the caller's random number generator"


def summaries(
    workload: Workload,
    model: Any,
    arguments: Arguments,
    start: Start,
    rounding: Sequence[float],
    first_seed: int = FIRST_SEED,
) -> Tensor:
    """Passes with one batch from one state, a seed each.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`.
        model: the model to call instead of the workload's.
        arguments: arguments of the call.
        start: state from which each pass starts; restored at the end.
        rounding: relative L2 error of each gradient that rounding to bf16 explains.
        first_seed: seed of the first pass; the others follow.

    Returns:
        One row a pass, float64 on the CPU, NaN where a pass has no such figure. The columns: the
        loss; the slope of the loss along the gradient, by differences with the same seed, over what
        the gradient says; the same along the gradients that are `ACCURATE`, if some are not; then
        for each gradient its norm, and of its difference from the pass before the norm and the
        correlation of neighbours along the first and the last dimension.
    """
    accurate = [error <= ACCURATE for error in rounding]
    every = [True] * len(accurate)
    begin(workload, start, 0)
    rows: list[Tensor] = []
    before: list[Tensor] = []
    began = time.perf_counter()
    for seed in range(first_seed, first_seed + SEEDS):
        torch.manual_seed(seed)
        found = passes(workload, model, arguments)
        gradients = [g.detach() for g in found.gradients.values() if g is not None]
        row = [found.loss.float()]
        for chosen in (every, accurate if any(accurate) and not all(accurate) else ()):
            row.append(_slope(workload, model, arguments, found, chosen, seed) if chosen else _NAN)
        for number, gradient in enumerate(gradients):
            row.append(gradient.float().norm())
            missing = [torch.full_like(row[0], math.nan)] * 3
            row += _neighbours(gradient - before[number]) if before else missing
        # One copy for all figures: each would wait for the GPU.
        rows.append(torch.stack([value.to(row[0].device).reshape(()) for value in row]).cpu())
        before = [] if before else [gradient.clone() for gradient in gradients]
        if len(rows) >= FEWEST_SEEDS and time.perf_counter() - began > SECONDS:
            break
    start.restore()
    return torch.stack(rows).double()


@torch.no_grad()
def _slope(
    workload: Workload,
    model: Any,
    arguments: Arguments,
    found: Passes,
    chosen: Sequence[bool],
    seed: int,
) -> Tensor:
    """The loss's change along its own chosen gradients over what these say it is.

    Both losses are of the same masks as the gradient: one where the backward pass uses another
    mask, or another rate, is not 1. They are taken at weights that bf16 represents, so that
    candidates that round their weights move them as far. Where only the last layer of a U-Net
    moves, the slope in bf16 scatters by 0.6 % then, and by 1.3 % otherwise.
    """
    held = parameters_of(workload)
    least, most = STEPS
    step = least * (most / least) ** random.Random(seed).random()
    given = [(held[name], g) for name, g in found.gradients.items() if g is not None]
    pairs = list(compress(given, chosen))
    square = sum((g.float().norm() ** 2 for _, g in pairs), torch.zeros(()))
    if not bool(square > 0):
        return _NAN
    length = float(step * found.loss.abs() / square)
    kept = [parameter.detach().clone() for parameter, _ in pairs]
    more, less = ([(p + s * length * g).bfloat16() for p, g in pairs] for s in (1, -1))
    moved = zip(more, less, pairs, strict=True)
    said = sum(((a.float() - b.float()) * g.float()).sum() for a, b, (_, g) in moved)
    losses = []
    try:
        for weights in (more, less):
            for (parameter, _), weight in zip(pairs, weights, strict=True):
                parameter.copy_(weight)
            torch.manual_seed(seed)
            with torch.enable_grad():
                losses.append(passes(workload, model, arguments, backward=False).loss)
    finally:
        for (parameter, _), original in zip(pairs, kept, strict=True):
            parameter.copy_(original)
    return (losses[0] - losses[1]).float().cpu() / said.cpu() if said else _NAN


def _neighbours(moved: Tensor) -> list[Tensor]:
    """The norm of a tensor, and how its neighbours along first and last dimension correlate."""
    wide = moved.float()
    square = (wide**2).sum()
    found = dict.fromkeys((0, wide.dim() - 1), torch.full_like(square, math.nan))
    for dim in found:
        if wide.dim() and wide.shape[dim] > 1:
            one, other = (wide.narrow(dim, i, wide.shape[dim] - 1) for i in (0, 1))
            found[dim] = (one * other).sum() / square  # NaN where nothing moved
    return [square.sqrt(), found[0], found[wide.dim() - 1]]


def difference(
    found: Tensor, right: Tensor, precision: str, rounding: Sequence[float]
) -> tuple[float, str]:
    """How likely two samples of `summaries` are to come from one distribution.

    Each figure is compared by the rank-sum test of Mann and Whitney (1947), and the least p-value
    is multiplied by the number of figures (Bonferroni). A difference of medians that the class's
    rounding explains is none: in a network with kinks it explains a third of some gradients.

    Args:
        found: of a candidate.
        right: of the untouched workload.
        precision: the candidate's class.
        rounding: relative L2 error of each gradient that the class's rounding explains.

    Returns:
        The p-value, and in words what differs.
    """
    from scipy.stats import mannwhitneyu

    least, differs, count = 1.0, "", 0
    margin = max(LEAST_MARGIN, TOLERANCES.get(precision, 0.0))
    for column, allowed in enumerate(_allowed(right, margin, rounding)):
        one, other = (sample[:, column] for sample in (found, right))
        one, other = one[~one.isnan()].numpy(), other[~other.isnan()].numpy()
        if not (len(one) and len(other)):
            continue
        if not np.isfinite(one).all():
            return 0.0, "whether loss and gradients are finite"
        count += 1
        if abs(float(np.median(one) - np.median(other))) <= allowed:
            continue
        p_value = float(mannwhitneyu(one, other).pvalue)
        if p_value < least:
            least, differs = p_value, _kind(column)
    return min(1.0, least * max(count, 1)), differs


def _allowed(right: Tensor, margin: float, rounding: Sequence[float]) -> list[float]:
    """By column, how far medians may be apart; infinite where all may be rounding.

    An error of size e changes a norm by at most e, and the norm of a difference of two gradients by
    at most e times the root of 2. It makes the correlation of neighbours smaller by the share that
    its square has in the gradients', and the slope along them by its square. Errors may be
    `STEP_FACTOR` times those that rounding explains.

    The gradient of a bias before a batch norm is zero but for rounding, and so is the difference of
    two gradients that no mask reaches.
    """
    medians = right.nanmedian(dim=0).values.tolist()
    loss, norms, moves = medians[0], medians[SLOPES + 1 :: 4], medians[SLOPES + 2 :: 4]
    least = SMALL * together(norms)
    sizes = [max(norm, least) for norm in norms]
    errors = [STEP_FACTOR * size * share for size, share in zip(sizes, rounding, strict=True)]
    whole = together(errors) / (together(sizes) or math.inf)
    allowed = [margin * abs(loss), max(margin, whole**2), ACCURATE**2]
    for norm, size, moved, error in zip(norms, sizes, moves, errors, strict=True):
        # NaN, where there is no difference, compares as small.
        correlates = norm > least and moved > VARIES * norm
        diluted = 2 * error**2 / (moved**2 + 2 * error**2) if correlates else math.inf
        allowed += [
            max(margin * size, error),
            max(margin * max(moved, REACHED * norm, least), 2**0.5 * error),
        ]
        allowed += [max(margin, diluted)] * 2
    return allowed


def _kind(column: int) -> str:
    """What a column of `summaries` holds, in words."""
    if column <= SLOPES:
        return "the slope of the loss along its gradient" if column else "the loss"
    correlation = "how neighbouring gradients correlate"
    words = ("the size of gradients", "how far gradients vary", correlation, correlation)
    return words[(column - SLOPES - 1) % 4]


MOST_ALIKE = 32
"""Calls that may all give the same result by chance: a path that is dropped for one sample in ten
changes every second call of a small batch. If the untouched workload's do so too, its draws have no
effect."""


def drawing_fault(workload: Workload, model: Any, arguments: Arguments, start: Start) -> str | None:
    """Whether calls draw new numbers from the caller's generator; why not, None if they do."""
    begin(workload, start, 0)
    torch.manual_seed(FIRST_SEED)
    begun = _states(workload.device)
    first = _flat(passes(workload, model, arguments))
    after = _states(workload.device)
    differs = _differs(first, workload, model, arguments)
    further = _states(workload.device)
    if not differs:
        torch.manual_seed(FIRST_SEED)
        first = _flat(passes(workload, workload.model, arguments))
        differs = not _differs(first, workload, workload.model, arguments)
    torch.manual_seed(FIRST_SEED)
    start.restore()
    if not differs:
        return SAME_NUMBERS
    advances = [not all(map(torch.equal, a, b)) for a, b in ((begun, after), (after, further))]
    return None if all(advances) else NOT_ADVANCED


def _differs(first: Tensor, workload: Workload, model: Any, arguments: Arguments) -> bool:
    """Whether one of the next calls gives another result than the first."""
    return any(
        not torch.equal(first, _flat(passes(workload, model, arguments))) for _ in range(MOST_ALIKE)
    )


def _flat(found: Passes) -> Tensor:
    gradients = [g.detach().reshape(-1).float() for g in found.gradients.values() if g is not None]
    return torch.cat([found.loss.reshape(1).float(), *gradients])


def _states(device: torch.device) -> Sequence[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
