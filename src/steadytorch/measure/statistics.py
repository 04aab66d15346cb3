"""Statistics that hold for correlated, skewed timings.

Everything here is a function of arrays. Nothing assumes normality or independence: intervals of
quantiles use exact binomial ranks at the *effective* sample size, and comparisons use paired blocks
with the exact signed-rank distribution.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from steadytorch.measure.correlation import claimable_size, corrected_size
from steadytorch.quantities import counted

MIN_EFFECTIVE = 50
"""Fewer effective samples than this support no interval."""
MIN_TAIL = 10
"""A quantile needs this many effective samples beyond it."""


def _lower_rank(size: float, quantile: float, tail: float) -> float:
    """The real number g with P(Binomial(size, quantile) <= g - 1) = tail.

    The binomial distribution is continued between the integers by the incomplete beta function,
    as in the bounds of Clopper and Pearson (1934): P(X <= g - 1) = I_{1-q}(n - g + 1, g).
    """
    from scipy.special import betainc

    low, high = 0.0, size * quantile + 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        if betainc(size - middle + 1.0, middle, 1.0 - quantile) > tail:
            high = middle
        else:
            low = middle
    # A solution that is an integer up to rounding is that integer.
    nearest = float(round(low))
    return nearest if abs(low - nearest) < 1e-9 else low


def interval_ranks(
    count: int, size: float, quantile: float, confidence: float = 0.95
) -> tuple[int, int] | None:
    """Ranks, from 1, of the order statistics that enclose a quantile.

    For independent samples (size = count) these are the narrowest exact binomial ranks with at most
    (1 - confidence) / 2 in each tail. For correlated ones the exact ranks at `size` are carried to
    `count` samples at the same level g / (n + 1).

    Args:
        count: number of samples N.
        size: effective number n.
        quantile: between 0 and 1.
        confidence: nominal coverage.

    Returns:
        (lower, upper) with 1 <= lower <= upper <= N, or None where `size` is too small for one.
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
    """A distribution-free interval of a quantile, or the reason why there is none.

    Exact binomial ranks at the effective sample size, with what is unknown about that size counted
    in (`corrected_size`); claimed only where the samples are worth enough (`claimable_size`).

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
            f"{counted(len(samples), 'sample')} worth {worth:.0f} independent, "
            f"{MIN_EFFECTIVE} are needed"
        )
    if worth * rare < MIN_TAIL:
        need = MIN_TAIL / rare
        return None, f"{worth:.0f} effective samples, {need:.0f} are needed for this quantile"
    size = corrected_size(samples, quantile, confidence)
    ranks = interval_ranks(len(samples), size, quantile, confidence)
    if ranks is None:
        return None, f"worth {size:.0f} independent samples only, too few for this quantile"
    ordered = np.sort(samples)
    return (float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])), None


def order_interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float] | None:
    """An exact interval of the median of independent values from their order statistics.

    For block medians: blocks of different arms lie between them, which makes them far less
    dependent than the samples within one. Six values are the fewest for 95 %.

    Args:
        values: shape (n,).
        confidence: least coverage.

    Returns:
        (low, high), or None where n is too small.
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
def _signed_rank_cdf(pairs: int) -> np.ndarray:
    """P(W <= w) of the signed-rank statistic without ties, w = 0 .. n(n+1)/2, by convolution."""
    counts = np.zeros(pairs * (pairs + 1) // 2 + 1)
    counts[0] = 1.0
    for rank in range(1, pairs + 1):
        counts[rank:] = counts[rank:] + counts[:-rank]
    return np.cumsum(counts) / 2.0**pairs


def walsh_averages(differences: np.ndarray) -> np.ndarray:
    """All means of two differences, each with itself included, in rising order."""
    rows, columns = np.triu_indices(len(differences))
    return np.sort((differences[rows] + differences[columns]) / 2.0)


def hodges_lehmann(differences: np.ndarray) -> float:
    """The median of the Walsh averages (Hodges and Lehmann, 1963): a robust centre."""
    return float(np.median(walsh_averages(differences)))


def signed_rank_interval(differences: np.ndarray, alpha: float) -> tuple[float, float] | None:
    """The exact two-sided interval of the centre that inverts the signed-rank test.

    Args:
        differences: shape (n,), paired log ratios.
        alpha: probability of missing.

    Returns:
        (low, high), or None where n is too small for alpha (2^-n > alpha / 2).
    """
    cut = signed_rank_cut(len(differences), alpha)
    if cut is None:
        return None
    averages = walsh_averages(differences)
    return float(averages[cut]), float(averages[len(averages) - 1 - cut])


def signed_rank_cut(pairs: int, alpha: float) -> int | None:
    """How many Walsh averages to leave out at either end, None where there are too few pairs."""
    if pairs == 0:
        return None
    cut = int(np.searchsorted(_signed_rank_cdf(pairs), alpha / 2, side="right")) - 1
    return cut if cut >= 0 else None


def minimal_pairs(alpha: float) -> int:
    """The fewest pairs for which an interval at `alpha` exists."""
    return int(np.ceil(1 + np.log2(1.0 / alpha)))


def detectable(freedom: float, alpha: float, power: float) -> float:
    """The effect, in standard errors, that a two-sided t-test finds with probability `power`.

    By the noncentral t distribution; that the wrong side is found is left out (J. Cohen,
    "Statistical Power Analysis for the Behavioral Sciences", 1988, chapter 2).

    Args:
        freedom: degrees of freedom of the standard error.
        alpha: probability of finding an effect where there is none.
        power: the probability asked for.
    """
    from scipy.special import nctdtrinc, stdtrit

    return float(nctdtrinc(freedom, 1 - power, stdtrit(freedom, 1 - alpha / 2)))
