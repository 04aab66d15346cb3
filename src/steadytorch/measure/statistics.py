"""Statistics that hold for correlated, skewed timings.

Everything here is a function of arrays. Nothing assumes normality or independence: intervals of
quantiles use exact binomial ranks at the *effective* sample size, and comparisons use paired blocks
with the exact signed-rank distribution.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

MIN_EFFECTIVE = 50
"""Fewer effective samples than this support no interval."""
MIN_TAIL = 10
"""A quantile needs this many effective samples beyond it."""
MIDDLE = (0.1, 0.9)
"""Quantiles outside are tails."""
BURST_BEYOND = 6.0
"""Robust standard deviations above the median from which on a sample may belong to a burst."""
BURST_GAP = 10
"""Far samples this close together are one burst."""


def autocorrelation_time(indicator: np.ndarray) -> float:
    """Integrated autocorrelation time tau = 1 + 2 sum rho_k of a series, in samples.

    The sum is cut at the first window W >= 5 tau(W) (A. Sokal, "Monte Carlo methods in statistical
    mechanics", 1997, section 3). A constant series has tau 1, and none has less.

    Args:
        indicator: shape (N,), typically 1{x <= q}.
    """
    return max(1.0, _windowed(indicator)[0])


def _windowed(indicator: np.ndarray, least: float = 0.0) -> tuple[float, int]:
    """The sum tau and its window W >= `least`; tau 1 and W 0 for constant series."""
    count = len(indicator)
    centred = indicator - indicator.mean()
    variance = float(centred @ centred)
    if count < 4 or variance == 0.0:
        return 1.0, 0
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[: count // 2]
    tau = 2.0 * np.cumsum(covariance / covariance[0]) - 1.0
    enough = np.arange(len(tau)) >= np.maximum(5.0 * tau, least)
    window = int(np.argmax(enough)) if enough.any() else len(tau) - 1
    return float(tau[window]), window


def effective_size(samples: np.ndarray, quantile: float = 0.5) -> float:
    """How many independent samples the series is worth for a quantile: N / tau of 1{x <= q}."""
    return len(samples) / autocorrelation_time(_below(samples, quantile))


def _below(samples: np.ndarray, quantile: float) -> np.ndarray:
    return (samples <= np.quantile(samples, quantile)).astype(np.float64)


def rank_effective_size(samples: np.ndarray) -> float:
    """What the series is worth for its median if its normal scores are an autoregression.

    Used to decide *whether* to claim an interval. N / tau from the window scatters by half its
    value near the limit of 50, and claiming where it happens to be high selects the intervals that
    are too short: coverage where claimed falls to 60 to 90 %. This estimate scatters by a seventh.
    The lag-one correlation of the normal scores is corrected for its bias (Marriott and Pope,
    1954); a Gaussian AR(1) gives the indicator 1{x <= median} correlations 2/pi asin(rho^k).

    Args:
        samples: shape (N,), in the order taken.
    """
    from scipy.special import ndtri

    count = len(samples)
    _, place, shared = np.unique(samples, return_inverse=True, return_counts=True)
    # Equal samples share a rank: ranks by position would make a quantised clock look like a trend.
    scores = ndtri((np.cumsum(shared) - 0.5 * shared) / count)[place]
    power = float(scores @ scores)
    if count < 4 or power == 0.0:
        return float(count)
    rho = float(scores[1:] @ scores[:-1]) / power
    rho = min(max(rho + (1 + 3 * rho) / count, 1e-9), 0.9999)
    lags = np.arange(1, min(count, int(np.log(1e-6) / np.log(rho)) + 2))
    return count / (1.0 + 4.0 / np.pi * float(np.arcsin(rho**lags).sum()))


def corrected_size(samples: np.ndarray, quantile: float, confidence: float = 0.95) -> float:
    """The effective size that makes an interval as wide as not knowing tau demands.

    N / tau alone covers 90 % instead of 95 % where N / tau is near 50. The window is no less than
    2 sqrt(N), because rare, long bursts hardly show at short lags and still make much of the
    uncertainty. The mean is estimated, which biases tau by (2W+1)/N (U. Wolff, "Monte Carlo errors
    with less errors", 2004); tau is estimated with a relative variance of 2(2W+1)/N (N. Madras and
    A. Sokal, 1988), which is that of a variance from N/(2W+1) degrees of freedom, so that Student's
    quantile takes the place of the normal one, weighted down to nothing as tau comes to 1, where
    there is nothing to estimate; chance values of tau below 1 count down to 0.8, so that errors
    around 1 do not all fall on one side; and few bursts count for more than they show (`_bursts`).

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
        confidence: of the interval it is meant for.
    """
    from scipy.special import stdtrit

    count = len(samples)
    tau, window = _windowed(_below(samples, quantile), 2 * float(np.sqrt(count)))
    if window == 0:
        return float(count)
    freedom = max(1.5, count / (2 * window + 1))
    upper = 1 - (1 - confidence) / 2
    wider = float(stdtrit(freedom, upper)) / NormalDist().inv_cdf(upper)
    tau = max(0.8, tau * (1 + (2 * window + 1) / count))
    if MIDDLE[0] <= quantile <= MIDDLE[1]:
        tau += quantile / (1 - quantile) * _bursts(samples)
    return count / (tau * (1 + (wider**2 - 1) * max(0.0, 1 - 1 / tau**2)))


def _bursts(samples: np.ndarray) -> float:
    """What is unknown of rare bursts, as an addition to tau at the median.

    Stretches of k bursts of l samples shift every rank by the share of time that they take, whose
    variance, sum l^2 / N^2, is part of tau already; but it rests on k events, and k is a Poisson
    count with a relative variance of 1/k. It is counted three times, since series that happened to
    meet few bursts, or none, show too little of it.
    """
    centre = np.median(samples)
    scale = 1.4826 * np.median(np.abs(samples - centre))
    far = np.flatnonzero(samples > centre + BURST_BEYOND * scale)
    if len(far) == 0:
        return 0.0
    edges = np.flatnonzero(np.diff(far) > BURST_GAP) + 1
    lengths = np.array([len(burst) for burst in np.split(far, edges)])
    return 3.0 / len(lengths) * float((lengths**2).sum()) / len(samples)


def _claimable(samples: np.ndarray, quantile: float) -> float:
    """The effective size that decides whether an interval may be claimed."""
    ranks = rank_effective_size(samples)
    if MIDDLE[0] <= quantile <= MIDDLE[1]:
        # The direct estimate has half the say, because it scatters.
        return min(ranks, 2 * effective_size(samples, quantile))
    # In the tails it alone sees that extremes come in clusters, and where bursts are rarer than the
    # quantile, only half as far out.
    outer = quantile + np.sign(quantile - 0.5) * min(quantile, 1 - quantile) / 2
    return min(ranks, *(_cautious_size(samples, level) for level in (quantile, outer)))


def _cautious_size(samples: np.ndarray, quantile: float) -> float:
    """The effective size over the wider window."""
    count = len(samples)
    return count / max(1.0, _windowed(_below(samples, quantile), 2 * float(np.sqrt(count)))[0])


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
    in (`corrected_size`); claimed only where the samples are worth enough (`rank_effective_size`).

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
    worth = _claimable(samples, quantile)
    if worth < MIN_EFFECTIVE:
        return None, (
            f"{len(samples)} samples are worth {worth:.0f} independent ones, "
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
