"""Training steps that draw random numbers: whether two ways to take them draw alike.

Dropout on other memory layouts, in another precision or in compiled code draws other numbers from
one seed, and is as right. So the steps are compared as distributions: many passes with one batch
and different seeds, each summarised by its loss and by norms and projections of its gradients.
A mask that is shared, baked in, of another rate, or another one in the backward pass changes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadytorch.runtime.agreement import TOLERANCES
from steadytorch.tune.training_step import Passes, begin, passes
from steadytorch.tune.verify import Arguments
from steadytorch.workload.start import Start
from steadytorch.workload.workload import Workload

SEEDS = 48
FEWEST_SEEDS = 16
SECONDS = 15.0
"""Longest time for the passes of one sample, from `FEWEST_SEEDS` on."""
FIRST_SEED = 1000
PERMUTATIONS = 3999
"""The least p-value is one over this many and one: well below `verdict.LEVEL`."""
PROJECTIONS = 4
SAME_NUMBERS = "draws the same random numbers at each call"
NOT_ADVANCED = "leaves the random number generator of its caller as it was"


def summaries(
    workload: Workload, model: Any, arguments: Arguments, start: Start, first_seed: int = FIRST_SEED
) -> Tensor:
    """Passes with one batch from one state, a seed each.

    Returns:
        One row a pass, float64 on the CPU: the loss, then for each gradient its norm and
        `PROJECTIONS` projections on fixed random directions.
    """
    begin(workload, start, 0)
    rows: list[Tensor] = []
    began = time.perf_counter()
    for seed in range(first_seed, first_seed + SEEDS):
        torch.manual_seed(seed)
        rows.append(_summary(passes(workload, model, arguments)))
        if len(rows) >= FEWEST_SEEDS and time.perf_counter() - began > SECONDS:
            break
    start.restore()
    return torch.stack(rows).double().cpu()


def _summary(found: Passes) -> Tensor:
    values = [found.loss.reshape(1).float()]
    for number, gradient in enumerate(found.gradients.values()):
        if gradient is None:
            continue
        flat = gradient.detach().reshape(-1).float()
        generator = torch.Generator(flat.device).manual_seed(number)
        norm = flat.norm()
        values.append(norm.reshape(1))
        for _ in range(PROJECTIONS):
            signs = torch.randint(2, flat.shape, generator=generator, device=flat.device)
            values.append((flat @ (signs.float() * 2 - 1)).reshape(1))
    return torch.cat(values)


def difference(found: Tensor, right: Tensor, precision: str) -> tuple[float, str]:
    """How likely two samples of `summaries` are to come from one distribution.

    A permutation test of their energy distance (Szekely and Rizzo, "Testing for equal distributions
    in high dimension", 2004), and one of the ratio of their spreads.

    Args:
        found: of a candidate.
        right: of the untouched workload.
        precision: the candidate's class; what it rounds is no difference.

    Returns:
        The smaller p-value, and in words what differs.
    """
    if not bool(found.isfinite().all()):
        return 0.0, "loss or gradients are not finite"
    both = torch.cat([found, right]).numpy()
    rounding = TOLERANCES.get(precision, 1e-4) * np.abs(both).mean(axis=0)
    spread = np.sqrt(np.maximum(found.numpy().var(axis=0), right.numpy().var(axis=0)) + rounding**2)
    scaled = both[:, spread > 0] / spread[spread > 0]
    # Rows apart: |a|^2 + |b|^2 - 2ab, the mean taken off first, for its digits.
    scaled = scaled - scaled.mean(axis=0)
    squares = (scaled**2).sum(axis=1)
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * scaled @ scaled.T, 0.0))
    generator = np.random.default_rng(0)
    size = len(found)
    order = np.arange(len(both))
    energy, ratio = _statistics(apart, order, size)
    drawn = np.array(
        [_statistics(apart, generator.permutation(order), size) for _ in range(PERMUTATIONS)]
    )
    p_energy = (1 + int((drawn[:, 0] >= energy).sum())) / (1 + PERMUTATIONS)
    p_ratio = (1 + int((drawn[:, 1] >= ratio).sum())) / (1 + PERMUTATIONS)
    if p_energy <= p_ratio:
        return p_energy, "the distribution of loss and gradients"
    return p_ratio, "how much loss and gradients vary"


def _statistics(apart: np.ndarray, order: np.ndarray, size: int) -> tuple[float, float]:
    one, other = order[:size], order[size:]
    within = apart[np.ix_(one, one)].sum() / (len(one) * (len(one) - 1))
    beside = apart[np.ix_(other, other)].sum() / (len(other) * (len(other) - 1))
    between = apart[np.ix_(one, other)].mean()
    ratio = abs(float(np.log((within + 1e-12) / (beside + 1e-12))))
    return float(2 * between - within - beside), ratio


def drawing_fault(workload: Workload, model: Any, arguments: Arguments, start: Start) -> str | None:
    """Whether calls draw new numbers from the caller's generator; why not, None if they do."""
    begin(workload, start, 0)
    torch.manual_seed(FIRST_SEED)
    first = _summary(passes(workload, model, arguments))
    after = _states(workload.device)
    again = _summary(passes(workload, model, arguments))
    further = _states(workload.device)
    torch.manual_seed(FIRST_SEED)
    begun = _states(workload.device)
    start.restore()
    if torch.equal(first, again):
        return SAME_NUMBERS
    advances = [not all(map(torch.equal, a, b)) for a, b in ((begun, after), (after, further))]
    return None if all(advances) else NOT_ADVANCED


def _states(device: torch.device) -> Sequence[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
