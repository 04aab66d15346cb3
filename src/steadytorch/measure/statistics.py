"""Statistics that hold for correlated, skewed timings.

Everything here is a function of arrays. Nothing assumes normality or independence: intervals of
quantiles use exact binomial ranks at the *effective* sample size, and comparisons use paired blocks
with the exact signed-rank distribution.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MIN_EFFECTIVE = 50
"""Fewer effective samples than this support no interval."""
MIN_TAIL = 10
"""A quantile needs this many effective samples beyond it."""


def autocorrelation_time(indicator: np.ndarray) -> float:
    """Integrated autocorrelation time tau = 1 + 2 sum rho_k of a series, in samples.

    The sum is cut at the first window W >= 5 tau(W) (A. Sokal, "Monte Carlo methods in statistical
    mechanics", 1997, section 3). A constant series has tau 1.

    Args:
        indicator: shape (N,), typically 1{x <= q}.
    """
    count = len(indicator)
    centred = indicator - indicator.mean()
    variance = float(centred @ centred)
    if count < 4 or variance == 0.0:
        return 1.0
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[: count // 2]
    tau = 2.0 * np.cumsum(covariance / covariance[0]) - 1.0
    windows = np.arange(len(tau))
    enough = np.flatnonzero(windows >= 5.0 * tau)
    return float(max(1.0, tau[enough[0] if len(enough) else -1]))


def effective_size(samples: np.ndarray, quantile: float = 0.5) -> float:
    """How many independent samples the series is worth for a quantile: N / tau of 1{x <= q}."""
    threshold = np.quantile(samples, quantile)
    return len(samples) / autocorrelation_time((samples <= threshold).astype(np.float64))


def quantile_interval(
    samples: np.ndarray, quantile: float, confidence: float = 0.95
) -> tuple[tuple[float, float] | None, str | None]:
    """A distribution-free interval of a quantile, or the reason why there is none.

    Clopper-Pearson bounds of the rank at the effective sample size, mapped to order statistics.

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
        confidence: nominal coverage.

    Returns:
        ((low, high), None) or (None, reason).
    """
    from scipy.stats import beta

    if len(samples) == 0:
        return None, "no samples"
    effective = effective_size(samples, quantile)
    if effective < MIN_EFFECTIVE:
        return None, (
            f"{len(samples)} samples are worth {effective:.0f} independent ones, "
            f"{MIN_EFFECTIVE} are needed"
        )
    if effective * min(quantile, 1 - quantile) < MIN_TAIL:
        need = MIN_TAIL / min(quantile, 1 - quantile)
        return None, f"{effective:.0f} effective samples, {need:.0f} are needed for this quantile"
    tail = (1 - confidence) / 2
    hits = quantile * effective
    low = float(beta.ppf(tail, hits, effective - hits + 1))
    high = float(beta.ppf(1 - tail, hits + 1, effective - hits))
    ordered = np.sort(samples)
    last = len(ordered) - 1
    lower = ordered[max(0, int(np.floor(low * last)))]
    upper = ordered[min(last, int(np.ceil(high * last)))]
    return (float(lower), float(upper)), None


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
    count = len(differences)
    if count == 0:
        return None
    cut = int(np.searchsorted(_signed_rank_cdf(count), alpha / 2, side="right")) - 1
    if cut < 0:
        return None
    averages = walsh_averages(differences)
    return float(averages[cut]), float(averages[len(averages) - 1 - cut])


def minimal_pairs(alpha: float) -> int:
    """The fewest pairs for which an interval at `alpha` exists."""
    return int(np.ceil(1 + np.log2(1.0 / alpha)))
