"""Where a series of timings becomes steady, and whether it does.

Change points are sought in the logarithm of short medians. Leading levels that are left for good
are warm-up; levels that come back are states of the machine, and then there is no steady state.
"""

from __future__ import annotations

import msgspec
import numpy as np

BLOCK = 5
"""Samples to a median: single outliers do not pass, a change is placed within this many samples."""
MOST_BLOCKS = 1000
"""Longer series get longer blocks: the search for changes takes the square of their number."""
LEAST_BLOCKS = 10
"""Fewer than these show nothing."""
PENALTY = 15.0
"""Times ln n, for each change point: high enough that correlated noise alone makes none."""
TOLERANCE = 0.005
"""Levels within this fraction of one another are one level."""
MINOR = 0.1
"""A level that holds less than this share of the samples is an excursion, not a state."""
MOST_DROPPED = 0.5
"""Where more than this share would have to go, the series has not settled."""
CERTAIN = 4.0
"""Standard errors that a trend must have to be believed."""
SLOPE_POINTS = 300
"""Points for the slope by all pairs: 45,000 pairs take a millisecond."""
_FINEST = 5e-4
"""Least scale of the noise: a tenth of what counts as a change, and no division by zero."""
_STRONGEST = 0.98
"""Greatest correlation assumed between neighbouring medians."""


class WarmUpVerdict(msgspec.Struct, frozen=True):
    """What the change points say of a series.

    Attributes:
        dropped: how many samples at the start are warm-up, to be left out of the summary.
        steady: whether the rest keeps to one level.
        regimes: number of levels in the rest, excursions not counted.
        note: why it is not steady, else None.
    """

    dropped: int
    steady: bool
    regimes: int
    note: str | None


def steady_part(samples: np.ndarray) -> WarmUpVerdict:
    """Finds the warm-up of a series and judges what follows it.

    Args:
        samples: shape (N,), positive durations in the order taken, any one unit.
    """
    size = max(BLOCK, -(-len(samples) // MOST_BLOCKS))
    if len(samples) < LEAST_BLOCKS * size:
        least = LEAST_BLOCKS * BLOCK
        return WarmUpVerdict(
            0, False, 1, f"{len(samples)} samples are too few for a steady state ({least} needed)"
        )
    series = np.log(block_medians(samples, size))
    bounds = change_points(series)
    lengths = np.diff([0, *bounds])
    parts = np.split(series, bounds[:-1])
    levels = np.array([float(np.median(part)) for part in parts])
    shares = lengths / len(series)
    reference = _end_level(levels, shares)
    first = _first_kept(levels, reference)
    start = int(lengths[:first].sum())
    if first > 1:
        # A gradual approach goes on below what change points resolve. Waiting as long again
        # squares the ratio by which it has fallen.
        start = 2 * start
    if start > MOST_DROPPED * len(series):
        return _unsettled(levels, shares, "not settled: still changing when the samples ended")
    kept, weights = levels[first:], shares[first:] / shares[first:].sum()
    stays = weights[np.abs(kept - reference) > TOLERANCE].sum() < MINOR
    trend = _trend(series[start:])
    if trend and (stays or not _comes_back(kept)):
        return _unsettled(levels, shares, f"not settled: drifts by {trend:+.1%} over the series")
    if stays:
        return WarmUpVerdict(start * size, True, 1, None)
    regimes = max(2, _distinct(kept, weights))
    return WarmUpVerdict(
        start * size, False, regimes, f"multi-state, no steady state: {regimes} levels"
    )


def _unsettled(levels: np.ndarray, shares: np.ndarray, note: str) -> WarmUpVerdict:
    return WarmUpVerdict(0, False, max(2, _distinct(levels, shares)), note)


def _trend(series: np.ndarray) -> float | None:
    """Change from end to end by a straight line, where it matters and is more than noise."""
    change = slope(series) * (len(series) - 1)
    # The standard error of a least-squares slope, 5 % more for the robust one.
    error = 1.05 * np.sqrt(12.0 / len(series)) * noise_scale(series)
    return change if abs(change) > max(TOLERANCE, CERTAIN * error) else None


def slope(values: np.ndarray, times: np.ndarray | None = None) -> float:
    """Median of the slopes between all pairs of points (Theil, 1950; Sen, 1968).

    Long series are thinned to medians of neighbours first, since the pairs are as many as the
    square.

    Args:
        values: shape (n,), n >= 2.
        times: shape (n,), rising; the index by default.
    """
    places = np.arange(len(values), dtype=np.float64) if times is None else times
    size = -(-len(values) // SLOPE_POINTS)
    values, places = block_medians(values, size), block_medians(places, size)
    early, late = np.triu_indices(len(values), 1)
    return float(np.median((values[late] - values[early]) / (places[late] - places[early])))


def block_medians(samples: np.ndarray, size: int) -> np.ndarray:
    """Medians of consecutive blocks; samples left over at the end belong to the last block."""
    blocks = len(samples) // size
    medians = np.median(samples[: blocks * size].reshape(blocks, size), axis=1)
    medians[-1] = np.median(samples[(blocks - 1) * size :])
    return medians


def change_points(series: np.ndarray) -> list[int]:
    """Ends of the segments of constant level, the last being the length of the series.

    PELT (Killick, Fearnhead and Eckley, 2012) with squared error.

    Args:
        series: shape (n,), logarithms of medians.
    """
    from ruptures import KernelCPD

    scaled = (series - np.median(series)) / noise_scale(series)
    # The linear kernel is squared error; this implementation is the compiled one.
    search = KernelCPD(kernel="linear", min_size=2).fit(scaled[:, None])
    ends = search.predict(pen=PENALTY * np.log(len(series))) or [len(series)]
    return [int(end) for end in ends]


def noise_scale(series: np.ndarray) -> float:
    """Long-run standard deviation of the noise, whatever steps the series contains.

    The noise is taken for a first-order autoregression and measured on differences at lags one and
    two, by their median absolute deviations, which a few steps cannot move (Chakar, Lebarbier,
    Levy-Leduc and Robin, "A robust approach for estimating change-points in the mean of an AR(1)
    process", 2017). For independent noise this is 1.4826 MAD(diff) / sqrt(2); under correlation
    that scale is too small, and every wave would pass for a change.

    Args:
        series: shape (n,), n >= 4.
    """
    one, two = (_deviation(series[lag:] - series[:-lag]) for lag in (1, 2))
    if one <= _FINEST:
        return max(_FINEST, one / np.sqrt(2.0))
    rho = min(max((two / one) ** 2 - 1.0, 0.0), _STRONGEST)
    innovation = one * np.sqrt((1.0 + rho) / 2.0)
    return max(_FINEST, float(innovation / (1.0 - rho)))


def _deviation(values: np.ndarray) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _end_level(levels: np.ndarray, shares: np.ndarray) -> float:
    """The level of the last segment that is more than an excursion."""
    for level in levels[::-1]:
        if shares[np.abs(levels - level) <= TOLERANCE].sum() >= MINOR:
            return float(level)
    return float(levels[-1])


def _first_kept(levels: np.ndarray, reference: float) -> int:
    """Index of the first segment that is at the end's level, or at one that comes back."""
    gaps = np.abs(levels - reference)
    settled = int(np.flatnonzero(gaps <= TOLERANCE)[0])
    for index in range(settled):
        # Levels far from the end's are known less well: bursts of 20 and 22 % are the same state.
        near = max(TOLERANCE, gaps[index] / 4)
        if np.any(np.abs(levels[settled:] - levels[index]) <= near):
            return index
    return settled


def _comes_back(levels: np.ndarray) -> bool:
    """Whether any level is left and taken up again."""
    same = np.abs(levels[:, None] - levels) <= TOLERANCE
    return any(not row[i : np.flatnonzero(row)[-1]].all() for i, row in enumerate(same))


def _distinct(levels: np.ndarray, shares: np.ndarray) -> int:
    """Number of levels, each as wide as the tolerance on both sides, that are no excursions."""
    order = np.argsort(levels)
    held: list[float] = []
    lowest = -np.inf
    for level, share in zip(levels[order], shares[order], strict=True):
        if level - lowest > 2 * TOLERANCE:
            lowest = float(level)
            held.append(0.0)
        held[-1] += float(share)
    return sum(share >= MINOR for share in held)
