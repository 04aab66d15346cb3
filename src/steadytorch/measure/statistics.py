"""Statistics for correlated, skewed timings, as functions of arrays.

Quantile intervals assume neither normality nor independence: they use exact binomial ranks at the
*effective* sample size. Comparisons use paired blocks with the exact signed-rank distribution.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from steadytorch.measure.correlation import claimable_size, corrected_size

MIN_EFFECTIVE = 50
"""Minimum effective samples for an interval."""
MIN_TAIL = 10
"""Minimum effective samples beyond a quantile for its interval."""


def _lower_rank(size: float, quantile: float, tail: float) -> float:
    """Return the real number g with P(Binomial(size, quantile) <= g - 1) = tail.

    The incomplete beta function extends the binomial distribution to real g, as in Clopper and
    Pearson (1934): P(X <= g - 1) = I_{1-q}(n - g + 1, g).
    """
    from scipy.special import betainc

    low, high = 0.0, size * quantile + 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        if betainc(size - middle + 1.0, middle, 1.0 - quantile) > tail:
            high = middle
        else:
            low = middle
    # Snap to an integer within rounding error.
    nearest = float(round(low))
    return nearest if abs(low - nearest) < 1e-9 else low


def interval_ranks(
    count: int, size: float, quantile: float, confidence: float = 0.95
) -> tuple[int, int] | None:
    """Return the 1-based ranks of the order statistics that enclose a quantile.

    For independent samples (size = count), the ranks are the narrowest exact binomial ranks with at
    most (1 - confidence) / 2 in each tail. For correlated samples, the exact ranks at `size` are
    mapped to `count` samples at the same level g / (n + 1).

    Args:
        count: number of samples N.
        size: effective number of samples n.
        quantile: between 0 and 1.
        confidence: nominal coverage.

    Returns:
        (lower, upper) with 1 <= lower <= upper <= N, or None if `size` is too small.
    """
    tail = (1 - confidence) / 2
    exact = [_lower_rank(size, level, tail) for level in (quantile, 1 - quantile)]
    if min(exact) < 1:
        return None
    below, above = (int(np.floor(rank * (count + 1) / (size + 1) + 1e-9)) for rank in exact)
    return below, count + 1 - above


def quantile_interval(
    samples: np.ndarray, quantile: float, confidence: float = 0.95
) -> tuple[tuple[float, float] | None, str | None]:
    """Return a distribution-free interval of a quantile, or the reason why there is none.

    The exact binomial ranks use an effective sample size that accounts for its own uncertainty
    (`corrected_size`). An interval needs enough effective samples (`claimable_size`).

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
        confidence: nominal coverage.

    Returns:
        ((low, high), None) or (None, reason).
    """
    if len(samples) == 0:
        return None, "no samples"
    rare = min(quantile, 1 - quantile)
    worth = claimable_size(samples, quantile)
    if worth < MIN_EFFECTIVE:
        return None, (
            f"too few samples ({worth:.0f} effective of {MIN_EFFECTIVE} needed): take more"
        )
    if worth * rare < MIN_TAIL:
        need = MIN_TAIL / rare
        return None, (
            f"too few samples for this quantile ({worth:.0f} effective of {need:.0f} needed): "
            "take more"
        )
    size = corrected_size(samples, quantile, confidence)
    ranks = interval_ranks(len(samples), size, quantile, confidence)
    if ranks is None:
        return None, f"too few samples for this quantile ({size:.0f} effective): take more"
    ordered = np.sort(samples)
    return (float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])), None


def order_interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float] | None:
    """Return an exact confidence interval for the median of independent values.

    Intended for medians of interleaved blocks, which are far less dependent than the samples within
    a block. A 95 % interval needs at least six values.

    Args:
        values: shape (n,).
        confidence: minimum coverage.

    Returns:
        (low, high), or None if n is too small.
    """
    from scipy.stats import binom

    count = len(values)
    cut = int(binom.ppf((1 - confidence) / 2, count, 0.5)) if count else 0
    while cut > 0 and binom.cdf(cut - 1, count, 0.5) > (1 - confidence) / 2:
        cut -= 1
    if cut == 0:
        return None
    ordered = np.sort(values)
    return float(ordered[cut - 1]), float(ordered[count - cut])


@lru_cache(maxsize=256)
def signed_rank_cdf(pairs: int) -> np.ndarray:
    """Return P(W <= w) of the signed-rank statistic without ties, for w = 0 .. n(n+1)/2."""
    counts = np.zeros(pairs * (pairs + 1) // 2 + 1)
    counts[0] = 1.0
    for rank in range(1, pairs + 1):
        counts[rank:] = counts[rank:] + counts[:-rank]
    return np.cumsum(counts) / 2.0**pairs


def walsh_averages(differences: np.ndarray) -> np.ndarray:
    """Return the means of all pairs of differences, self-pairs included, ascending."""
    rows, columns = np.triu_indices(len(differences))
    return np.sort((differences[rows] + differences[columns]) / 2.0)


def hodges_lehmann(differences: np.ndarray) -> float:
    """Return the median of the Walsh averages, a robust centre (Hodges and Lehmann, 1963)."""
    return float(np.median(walsh_averages(differences)))


def signed_rank_interval(differences: np.ndarray, alpha: float) -> tuple[float, float] | None:
    """Return the exact two-sided interval of the centre, by inverting the signed-rank test.

    Args:
        differences: shape (n,), paired log ratios.
        alpha: probability that the interval misses the centre.

    Returns:
        (low, high), or None if n is too small for alpha (2^-n > alpha / 2).
    """
    cut = signed_rank_cut(len(differences), alpha)
    if cut is None:
        return None
    averages = walsh_averages(differences)
    return float(averages[cut]), float(averages[len(averages) - 1 - cut])


def signed_rank_cut(pairs: int, alpha: float) -> int | None:
    """Return how many Walsh averages the interval cuts at each end; None with too few pairs."""
    if pairs == 0:
        return None
    cut = int(np.searchsorted(signed_rank_cdf(pairs), alpha / 2, side="right")) - 1
    return cut if cut >= 0 else None


def minimal_pairs(alpha: float) -> int:
    """Return the minimum number of pairs for a signed-rank interval at level `alpha`."""
    return int(np.ceil(1 + np.log2(1.0 / alpha)))


def detectable(freedom: float, alpha: float, power: float) -> float:
    """Return the effect, in standard errors, that a two-sided t-test finds with given power.

    Uses the noncentral t distribution and neglects rejections in the wrong direction (Cohen,
    "Statistical Power Analysis for the Behavioral Sciences", 1988, chapter 2).

    Args:
        freedom: degrees of freedom of the standard error.
        alpha: probability of a false positive.
        power: probability of finding the effect.
    """
    from scipy.special import nctdtrinc, stdtrit

    return float(nctdtrinc(freedom, 1 - power, stdtrit(freedom, 1 - alpha / 2)))
