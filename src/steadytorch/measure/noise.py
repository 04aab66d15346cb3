"""The A/A noise floor: the spread between measurements of the same step on this machine."""

from __future__ import annotations

from random import Random

import numpy as np

from steadytorch.measure.race import log_ratios
from steadytorch.measure.sampler import grouped, sampler_for, warm_up
from steadytorch.results.machine import NoiseFloor

PAIRS = 27
_BLOCK = 7
_DISCARD = 2


def noise_floor(device: str, side: int = 512, seed: int = 0) -> NoiseFloor:
    """Measure a matrix product against itself, in pairs of blocks in random order.

    Args:
        device: torch device string.
        side: rows and columns of the square float32 matrices.
        seed: seed for the matrices and the order.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(side, side, generator=generator).to(device) for _ in range(2))
    sampler = sampler_for(torch.device(device).type)
    group = warm_up(lambda: left @ right, sampler).group
    step = grouped(lambda: left @ right, group)

    def block() -> float:
        return float(np.median(sampler.latencies(step, _BLOCK + _DISCARD)[_DISCARD:]))

    rng, pairs = Random(seed), []
    for _ in range(PAIRS):
        first, second = block(), block()
        pairs.append((first, second) if rng.random() < 0.5 else (second, first))
    differences = log_ratios(pairs)
    spread = 1.4826 * float(np.median(np.abs(differences - np.median(differences))))
    return NoiseFloor(spread, PAIRS, f"{side}x{side} float32 matrix product, latency")
