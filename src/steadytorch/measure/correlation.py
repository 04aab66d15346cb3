"""How many independent samples a correlated series is worth.

Two questions with two answers: whether there is enough to claim an interval at all, for which an
estimate must scatter little, and how wide that interval has to be, for which it must be right under
whatever correlation there is.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from steadytorch.measure.periodicity import without_lines

MIDDLE = (0.1, 0.9)
"""Quantiles outside are tails."""
COARSER = 4
"""Factor from one length of blocks to the next."""
FEWEST_BLOCKS = 200
"""Fewer blocks than these say too little about their correlation."""
LENIENCY = 1.5
"""What blocks say of the worth counts this many times where it is decided whether to claim."""
WORTH_PER_COSINE = 8
"""The low frequencies end where the spectrum bends: at this part of the effective size."""
BURST_BEYOND = 6.0
"""Robust standard deviations above the median from which on a sample may belong to a burst."""
BURST_GAP = 10
"""Far samples this close together are one burst."""
BURSTS_COUNT = 4.0
"""Times that the variance of few bursts is counted beyond what the series shows of it."""


def autocorrelation_time(indicator: np.ndarray, least: float = 0.0) -> float:
    """Integrated autocorrelation time tau = 1 + 2 sum rho_k of a series, in samples.

    The sum is cut at the first window W >= 5 tau(W) (A. Sokal, "Monte Carlo methods in statistical
    mechanics", 1997, section 3). A constant series has tau 1, and none has less.

    Args:
        indicator: shape (N,), typically 1{x <= q}.
        least: lags that the window holds in any case.
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
    """How many independent samples the series is worth for a quantile: N / tau of 1{x <= q}."""
    return len(samples) / autocorrelation_time(_below(samples, quantile))


def _below(samples: np.ndarray, quantile: float) -> np.ndarray:
    return (samples <= np.quantile(samples, quantile)).astype(np.float64)


def rank_effective_size(samples: np.ndarray) -> float:
    """What the series is worth for its median if its normal scores are an autoregression.

    The lag-one correlation of the normal scores is corrected for its bias (Marriott and Pope,
    1954); a Gaussian AR(1) gives the indicator 1{x <= median} correlations 2/pi asin(rho^k). It
    scatters by a seventh where N / tau from a window scatters by half, which matters where it is
    decided whether to claim: claiming where an estimate happens to be high selects the intervals
    that are too short, and coverage where claimed falls to 60 to 90 %.

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
    """Normal quantiles of the ranks, shape (N,)."""
    from scipy.special import ndtri

    _, place, shared = np.unique(samples, return_inverse=True, return_counts=True)
    # Equal samples share a rank: ranks by position would make a quantised clock look like a trend.
    return ndtri((np.cumsum(shared) - 0.5 * shared) / len(samples))[place]


def _coarse_size(samples: np.ndarray, leniency: float = 1.0) -> float:
    """The least `rank_effective_size` of the series and of means over longer and longer blocks.

    Independent noise on top of a slow one hides its correlation from neighbouring samples, and not
    from neighbouring blocks, in which it averages out.
    """
    scores, length = _scores(samples), COARSER
    least = _autoregressive_size(scores)
    while (blocks := len(samples) // length) >= FEWEST_BLOCKS:
        means = scores[: blocks * length].reshape(blocks, length).mean(axis=1)
        least = min(least, leniency * rank_effective_size(means))
        length *= COARSER
    return least


def claimable_size(samples: np.ndarray, quantile: float) -> float:
    """The effective size that decides whether an interval of a quantile may be claimed.

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
    """
    if MIDDLE[0] <= quantile <= MIDDLE[1]:
        # The direct estimate has half the say, because it scatters.
        return min(_coarse_size(samples, LENIENCY), 2 * effective_size(samples, quantile))
    # Extremes come in clusters that the middle knows nothing of; where bursts are rarer than the
    # quantile, only half as far out.
    outer = quantile + np.sign(quantile - 0.5) * min(quantile, 1 - quantile) / 2
    window = 2 * float(np.sqrt(len(samples)))
    direct = (
        len(samples) / autocorrelation_time(_below(samples, level), window)
        for level in (quantile, outer)
    )
    return min(rank_effective_size(samples), _clustered_size(samples, quantile), *direct)


def _clustered_size(samples: np.ndarray, quantile: float) -> float:
    """The worth by the clusters in which the samples beyond a quantile come.

    Of n samples beyond it, theta n are clusters, by the distances T between them: theta is
    2 (sum T)^2 / (n sum T^2), the "intervals" estimate of the extremal index (C. Ferro, J. Segers,
    "Inference for clusters of extreme values", 2003). It counts twice, because the fewer clusters
    there are, the less is known of their sizes.
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
    """How many of the marked samples belong to each cluster of them."""
    places = np.flatnonzero(far)
    if len(places) == 0:
        return np.zeros(0)
    edges = np.flatnonzero(np.diff(places) > BURST_GAP) + 1
    return np.diff(np.concatenate([[0], edges, [len(places)]])).astype(np.float64)


def corrected_size(samples: np.ndarray, quantile: float, confidence: float = 0.95) -> float:
    """The effective size that makes an interval as wide as not knowing tau demands.

    tau is the spectrum of 1{x <= q} at frequency zero over its variance: the mean square of its
    first B cosine coefficients, each of which is an estimate of its own, so that Student's quantile
    at B degrees of freedom takes the place of the normal one (E. Lazarus, D. Lewis, J. Stock,
    M. Watson, "HAR inference: recommendations for practice", 2018). B is half the root of N, or
    less where the spectrum bends sooner. What is periodic is taken out first, since only its
    unfinished period is unknown; and few bursts count for more than they show (`_bursts`).

    Args:
        samples: shape (N,), in the order taken.
        quantile: between 0 and 1.
        confidence: of the interval it is meant for.
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
    # Half: as a whole it would be a variance, and it is a bias. Simulated, one covers 96.1 %.
    shifted = 0.5 * count * rest.shift**2
    tau = (float(low @ low) / cosines + shifted) / variance
    if MIDDLE[0] <= quantile <= MIDDLE[1]:
        tau += quantile / (1 - quantile) * _bursts(samples)
    upper = 1 - (1 - confidence) / 2
    wider = float(stdtrit(cosines, upper)) / NormalDist().inv_cdf(upper)
    # Strict alternation has no low frequencies at all; more than tenfold worth is not believed.
    return count / max(0.1, tau * wider**2)


def _bursts(samples: np.ndarray) -> float:
    """What is unknown of rare bursts, as an addition to tau at the median.

    Stretches of k bursts of l samples shift every rank by the share of time that they take, whose
    variance, sum l^2 / N^2, is part of tau already; but it rests on k events, and k is a Poisson
    count with a relative variance of 1/k. It is counted `BURSTS_COUNT` times, since series that
    happened to meet few bursts, or none, show too little of it.
    """
    centre = np.median(samples)
    scale = 1.4826 * np.median(np.abs(samples - centre))
    lengths = _clusters(samples > centre + BURST_BEYOND * scale)
    if len(lengths) == 0:
        return 0.0
    return BURSTS_COUNT / len(lengths) * float((lengths**2).sum()) / len(samples)
