"""Compares training steps that draw random numbers, such as dropout masks.

With another memory layout, precision or compiler, dropout draws other numbers from the same seed
and is equally correct. Random steps are therefore compared as distributions: many passes on one
batch with different seeds, each summarised by a few figures. A dropout mask that is wrongly shared
by channels makes neighbouring gradient elements correlate. A wrong dropout rate changes how much
gradients vary between seeds. A backward pass with a different mask than the forward pass changes
the slope of the loss along its gradient.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from steadytorch.runtime.agreement import TOLERANCES, together
from steadytorch.training.passes import SMALL, Passes, begin, loss_alone, passes
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
"""Range of the step along the gradient, as the predicted relative change of the loss; drawn per
seed. At 0.01, weights move by less than bf16 resolves: the slope of a ConvNeXt was off by 2 % and
more, equally for all seeds, as its masks have little effect. At 0.1 it is within 0.2 % in float32.
"""
LEAST_MARGIN = 0.02
"""Smaller relative differences of medians are ignored in every precision class."""
ACCURATE = 0.1
"""Gradients whose relative error from rounding to bf16 is at most this give a second slope. In a
network with kinks and batch norms, gradients far from the loss are noise in bf16, and the loss
curves along them. The second slope leaves them out: another mask in the backward pass changed it by
3 to 12 %, and rounding to bf16 by 0.3 %."""
VARIES = 0.1
"""A change from pass to pass below this share of the gradient's norm may be bf16 rounding alone."""
REACHED = 0.3
"""The difference of two gradients carries their rounding errors. Its tolerance is therefore
relative to at least this share of the gradient's norm."""
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
    """Runs passes on one batch from one start state with different seeds, and summarises each.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`.
        model: the model to call instead of the workload's.
        arguments: arguments of the call.
        start: state from which each pass starts; restored at the end.
        rounding: relative L2 error of each gradient that rounding to bf16 explains.
        first_seed: seed of the first pass; the others follow.

    Returns:
        One row per pass, float64 on the CPU; NaN where a pass lacks a figure. The columns:

        - the loss;
        - the measured slope of the loss along its gradients, relative to the predicted slope;
        - the same along the `ACCURATE` gradients alone, if only some are accurate;
        - per gradient: its norm; then, for its difference from the previous pass (in every second
          row), the norm and the correlation of neighbours along the first and last dimension.
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
        row += itertools.chain(
            *zip(_norms(gradients), *_neighbours(gradients, before), strict=True)
        )
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
    """Returns the ratio of measured to predicted change of the loss along the chosen gradients.

    Both loss evaluations use the same random masks as the forward pass that gave the gradients. The
    ratio differs from 1 if the backward pass used another mask or rate. The changed weights are
    rounded to bf16, so that a candidate with bf16 weights moves them equally far. Rounding reduces
    scatter: along a U-Net's last layer, the slope in bf16 scatters by 0.6 % with rounded weights
    and 1.3 % without.
    """
    held = parameters_of(workload)
    least, most = STEPS
    step = least * (most / least) ** random.Random(seed).random()
    given = [(held[name], g) for name, g in found.gradients.items() if g is not None]
    pairs = list(compress(given, chosen))
    moving, gradients = [p for p, _ in pairs], [g for _, g in pairs]
    square = get_total_norm([g.float() for g in gradients]) ** 2
    if not bool(square > 0):
        return _NAN
    length = float(step * found.loss.abs() / square)
    kept = [parameter.detach().clone() for parameter in moving]
    more, less = (
        [weight.bfloat16().float() for weight in torch._foreach_add(moving, gradients, alpha=along)]
        for along in (length, -length)
    )
    products = torch._foreach_mul(torch._foreach_sub(more, less), gradients)
    said = torch.stack([product.sum().to(square.device) for product in products]).sum()
    losses = []
    try:
        for weights in (more, less):
            torch._foreach_copy_(moving, weights)
            torch.manual_seed(seed)
            with torch.enable_grad():
                losses.append(loss_alone(workload, model, arguments))
    finally:
        torch._foreach_copy_(moving, kept)
    return (losses[0] - losses[1]).float().cpu() / said.cpu() if said else _NAN


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm([tensor.float() for tensor in tensors])) if tensors else []


def _neighbours(gradients: list[Tensor], before: list[Tensor]) -> list[Sequence[Tensor]]:
    """Describes the differences of gradients from those of the previous pass.

    Returns:
        For all gradients the norms of these differences, and the correlations of neighbours along
        the first and along the last dimension. NaN where nothing moved, or without previous pass.
    """
    if not before:
        # On the device: each copy there would take as long as an operator.
        return [[_NAN.to(gradients[0].device)] * len(gradients)] * 3 if gradients else [[]] * 3
    moves = [move.float() for move in torch._foreach_sub(gradients, before)]
    norms = _norms(moves)
    along = [[_products_of_neighbours(move, dim) for move in moves] for dim in (0, -1)]
    squares = torch._foreach_mul(norms, norms)
    return [norms, *(torch._foreach_div(products, squares) for products in along)]


def _products_of_neighbours(tensor: Tensor, dim: int) -> Tensor:
    """Returns the sum of the products of neighbouring elements; NaN if there are none."""
    if not tensor.dim() or tensor.shape[dim] < 2:
        return torch.full_like(tensor.sum(), math.nan)
    one, other = (tensor.narrow(dim, i, tensor.shape[dim] - 1) for i in (0, 1))
    return (one * other).sum()


def difference(
    found: Tensor, right: Tensor, precision: str, rounding: Sequence[float]
) -> tuple[float, str]:
    """Tests whether two samples of `summaries` come from the same distribution.

    Each column of the samples is compared by the rank-sum test of Mann and Whitney (1947). The
    smallest p-value is multiplied by the number of columns with data (Bonferroni correction). A
    column is not tested if rounding explains the difference of its medians: in a network with
    kinks, rounding changes some gradients by a third.

    Args:
        found: the sample of a candidate.
        right: the sample of the untouched workload.
        precision: the candidate's class.
        rounding: relative L2 error of each gradient that the class's rounding explains.

    Returns:
        The p-value, and the figure that differs most, in words.
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
    """Returns the largest allowed difference of medians per column; infinity skips the column.

    A gradient error of norm e changes the gradient's norm by at most e. Errors of norm e in two
    gradients change the norm of their difference by at most sqrt(2) * e. A gradient error lowers
    the correlation of neighbours by its share of the squared norm, and the slope by the squared
    relative error. Gradient errors may be up to `STEP_FACTOR` times the errors that rounding
    explains.

    Correlations are skipped if they may be pure rounding: gradients of a bias before a batch norm,
    or differences of gradients that no mask affects.
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
    """Describes in words the figure in one column of `summaries`."""
    if column <= SLOPES:
        return "the slope of the loss along its gradient" if column else "the loss"
    correlation = "how neighbouring gradients correlate"
    words = ("the size of gradients", "how far gradients vary", correlation, correlation)
    return words[(column - SLOPES - 1) % 4]


MOST_ALIKE = 32
"""Number of further calls to compare with the first. If all are equal, the step counts as drawing
the same numbers each time. Dropping a path for one sample in ten changes only every second call of
a small batch. If all calls of the untouched workload are equal too, its draws have no effect."""


def drawing_fault(workload: Workload, model: Any, arguments: Arguments, start: Start) -> str | None:
    """Returns why calls do not draw new random numbers from the caller's generator, or None."""
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
    """Whether any of the next `MOST_ALIKE` calls gives a different result than the first."""
    return any(
        not torch.equal(first, _flat(passes(workload, model, arguments))) for _ in range(MOST_ALIKE)
    )


def _flat(found: Passes) -> Tensor:
    gradients = [g.detach().reshape(-1).float() for g in found.gradients.values() if g is not None]
    return torch.cat([found.loss.reshape(1).float(), *gradients])


def _states(device: torch.device) -> Sequence[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
