"""Effective sample size of a correlated series.

There are two estimates of the effective sample size. `claimable_size` decides whether a confidence
interval may be reported, so its variance must be small. `corrected_size` sets the width of a
confidence interval, so it must be valid under any correlation.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from steadytorch.measure.periodicity import without_lines

MIDDLE = (0.1, 0.9)
"""Quantiles outside this range are tails."""
COARSER = 4
"""Factor between successive block lengths."""
FEWEST_BLOCKS = 200
"""Minimum number of blocks for estimating their correlation."""
LENIENCY = 1.5
"""Factor on the effective size by blocks when deciding whether to claim an interval."""
WORTH_PER_COSINE = 8
"""Effective samples per cosine coefficient; higher frequencies lie beyond the spectrum's bend."""
BURST_BEYOND = 6.0
"""Robust standard deviations above the median at which a sample may belong to a burst."""
BURST_GAP = 10
"""Far samples at most this many places apart form one burst."""
BURSTS_COUNT = 4.0
"""Weight of the unknown variance of rare bursts, in multiples of the observed one."""


def autocorrelation_time(indicator: np.ndarray, least: float = 0.0) -> float:
    """Return the integrated autocorrelation time tau = 1 + 2 sum rho_k, in samples; at least 1.

    The sum is cut at the first window W >= 5 tau(W) (Sokal, "Monte Carlo methods in statistical
    mechanics", 1997, section 3). A constant series has tau 1.

    Args:
        indicator: shape (N,), typically 1{x <= q}.
        least: minimum window in lags.
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
    enough = np.arange(len(tau)) >= np.maximum(5.0 * tau, least)
    return max(1.0, float(tau[int(np.argmax(enough)) if enough.any() else -1]))


def effective_size(samples: np.ndarray, quantile: float = 0.5) -> float:
    """Return the effective sample size for a quantile q: N / tau, with tau of 1{x <= q}."""
    return len(samples) / autocorrelation_time(_below(samples, quantile))


def _below(samples: np.ndarray, quantile: float) -> np.ndarray:
    return (samples <= np.quantile(samples, quantile)).astype(np.float64)


def rank_effective_size(samples: np.ndarray) -> float:
    """Return the effective sample size for the median, assuming AR(1) normal scores.

    The lag-one correlation of the normal scores is bias-corrected (Marriott and Pope, 1954). For a
    Gaussian AR(1), the indicator 1{x <= median} has correlation 2/pi asin(rho^k) at lag k.

    The AR(1) estimate has a relative spread of one seventh; the windowed estimate of N / tau has
    one half. Reporting intervals only when a noisy estimate happens to be high selects intervals
    that are too short, with a coverage of 60 to 90 %.

    Args:
        samples: shape (N,), in the order taken.
    """
    return _autoregressive_size(_scores(samples))


def _autoregressive_size(scores: np.ndarray) -> float:
    count, power = len(scores), float(scores @ scores)
    if count < 4 or power == 0.0:
        return float(count)
    rho = float(scores[1:] @ scores[:-1]) / power
    rho = min(max(rho + (1 + 3 * rho) / count, 1e-9), 0.9999)
    lags = np.arange(1, min(count, int(np.log(1e-6) / np.log(rho)) + 2))
    return count / (1.0 + 4.0 / np.pi * float(np.arcsin(rho**lags).sum()))


def _scores(samples: np.ndarray) -> np.ndarray:
    """Return the normal quantiles of the ranks, shape (N,)."""
    from scipy.special import ndtri

    _, place, shared = np.unique(samples, return_inverse=True, return_counts=True)
    # Ties share a rank: ranking them by position would turn a quantised clock into a trend.
    return ndtri((np.cumsum(shared) - 0.5 * shared) / len(samples))[place]


def _coarse_size(samples: np.ndarray, leniency: float = 1.0) -> float:
    """Return the lowest `rank_effective_size` of the series and its means over growing blocks.

    Independent noise hides the correlation of slow noise between adjacent samples. Independent
    noise averages out in block means.
    """
    scores, length = _scores(samples), COARSER
    least = _autoregressive_size(scores)
    while (blocks := len(samples) // length) >= FEWEST_BLOCKS:
        means = scores[: blocks * length].reshape(blocks, length).mean(axis=1)
        least = min(least, leniency * rank_effective_size(means))
        length *= COARSER
    return least


def claimable_size(samples: np.ndarray, quantile: float) -> float:
    """Return the effective sample size that decides whether an interval may be reported.

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
    """
    if MIDDLE[0] <= quantile <= MIDDLE[1]:
        # The direct estimate has a large variance, so it only counts if it is half as large.
        return min(_coarse_size(samples, LENIENCY), 2 * effective_size(samples, quantile))
    # Extremes cluster independently of the middle. Bursts rarer than the quantile only show at
    # `outer`, half as far from the end.
    outer = quantile + np.sign(quantile - 0.5) * min(quantile, 1 - quantile) / 2
    window = 2 * float(np.sqrt(len(samples)))
    direct = (
        len(samples) / autocorrelation_time(_below(samples, level), window)
        for level in (quantile, outer)
    )
    return min(rank_effective_size(samples), _clustered_size(samples, quantile), *direct)


def _clustered_size(samples: np.ndarray, quantile: float) -> float:
    """Return the effective sample size from the clusters of samples beyond a quantile.

    The n samples beyond the quantile form theta n clusters, with theta the extremal index. For
    distances T between samples beyond the quantile, the "intervals" estimate of theta is 2 (sum
    T)^2 / (n sum T^2) (Ferro and Segers, "Inference for clusters of extreme values", 2003). Theta
    is squared, because with fewer clusters the cluster sizes are also less certain.
    """
    level = np.quantile(samples, quantile)
    distances = np.diff(np.flatnonzero(samples > level if quantile > 0.5 else samples < level))
    if len(distances) == 0:
        return float(len(samples))
    far = distances.astype(np.float64)
    if far.max() > 2:
        theta = 2 * (far - 1).sum() ** 2 / (len(far) * ((far - 1) * (far - 2)).sum())
    else:
        theta = 2 * far.sum() ** 2 / (len(far) * (far**2).sum())
    return (len(far) + 1) * min(1.0, float(theta)) ** 2 / min(quantile, 1 - quantile)


def _clusters(far: np.ndarray) -> np.ndarray:
    """Return the number of marked samples in each cluster."""
    places = np.flatnonzero(far)
    if len(places) == 0:
        return np.zeros(0)
    edges = np.flatnonzero(np.diff(places) > BURST_GAP) + 1
    return np.diff(np.concatenate([[0], edges, [len(places)]])).astype(np.float64)


def corrected_size(samples: np.ndarray, quantile: float, confidence: float = 0.95) -> float:
    """Return the effective sample size for an interval, including the uncertainty of tau.

    The autocorrelation time tau is the spectrum of 1{x <= q} at frequency zero, divided by the
    variance of 1{x <= q}. The spectrum at frequency zero is estimated by the mean square of the
    first B cosine coefficients. The cosine coefficients are independent, so Student's quantile at B
    degrees of freedom replaces the normal quantile (Lazarus, Lewis, Stock and Watson, "HAR
    inference: recommendations for practice", 2018). B is half the square root of N, or less if the
    spectrum bends at a lower frequency.

    Periodic parts are removed first, because only their unfinished last period adds uncertainty.
    Rare bursts add to the uncertainty of tau (`_bursts`).

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
        confidence: confidence level of the interval.
    """
    from scipy.fft import dct
    from scipy.special import stdtrit

    count, below = len(samples), _below(samples, quantile)
    variance = float(np.var(below))
    rest = without_lines(below)
    if variance == 0.0 or rest.share == 0.0:
        return float(count)
    cosines = max(4, int(min(0.5 * count**0.5, _coarse_size(samples) / WORTH_PER_COSINE)))
    low = np.asarray(dct(rest.series, norm="ortho"))[1 : cosines + 1]
    # Half, because the shift is a bias, not a variance. In simulation, a factor of 1 covers 96.1 %.
    shifted = 0.5 * count * rest.shift**2
    tau = (float(low @ low) / cosines + shifted) / variance
    if MIDDLE[0] <= quantile <= MIDDLE[1]:
        tau += quantile / (1 - quantile) * _bursts(samples)
    upper = 1 - (1 - confidence) / 2
    wider = float(stdtrit(cosines, upper)) / NormalDist().inv_cdf(upper)
    # Strict alternation has no low frequencies: cap the effective size at ten times N.
    return count / max(0.1, tau * wider**2)


def _bursts(samples: np.ndarray) -> float:
    """Return the uncertainty from rare bursts, as an addition to tau at the median.

    Bursts of slow samples shift the rank of each quantile in proportion to the share of the series
    that they fill. The variance of this share, sum l^2 / N^2 for bursts of l samples, is already
    part of tau. The number of bursts k is a Poisson count, so the estimate of this variance itself
    has a relative variance of 1/k. The addition to tau is weighted by `BURSTS_COUNT`, because a
    series with few or no bursts underestimates the uncertainty from bursts.
    """
    centre = np.median(samples)
    scale = 1.4826 * np.median(np.abs(samples - centre))
    lengths = _clusters(samples > centre + BURST_BEYOND * scale)
    if len(lengths) == 0:
        return 0.0
    return BURSTS_COUNT / len(lengths) * float((lengths**2).sum()) / len(samples)
