"""Finds the warm-up of a series of timings and judges whether the rest is steady.

Change points are detected in the logarithms of block medians, with at least five samples a block.
Levels at the start of the series that never recur are warm-up. Levels that recur are states of the
machine; a series with recurring levels is not steady.
"""

from __future__ import annotations

import msgspec
import numpy as np

BLOCK = 5
"""Samples per median: filters single outliers, and locates a change to within this many samples."""
MOST_BLOCKS = 1000
"""Longer series get longer blocks, because the search for changes is quadratic in their number."""
LEAST_BLOCKS = 10
"""Minimum number of blocks for a verdict."""
PENALTY = 15.0
"""Penalty per change point, in units of ln n; correlated noise alone yields none."""
TOLERANCE = 0.005
"""Levels within this fraction of each other count as one."""
MINOR = 0.1
"""A level with a smaller share of the samples is an excursion, not a state."""
MOST_DROPPED = 0.5
"""Maximum share of warm-up; above it, the series has not settled."""
CERTAIN = 4.0
"""Minimum size of a trend in standard errors."""
SLOPE_POINTS = 300
"""Maximum number of points for the slope over all pairs: 45,000 pairs take a millisecond."""
_FINEST = 5e-4
"""Minimum noise scale, a tenth of `TOLERANCE`; avoids a division by zero."""
_STRONGEST = 0.98
"""Maximum assumed correlation between adjacent medians."""


class WarmUpVerdict(msgspec.Struct, frozen=True):
    """The warm-up and steadiness of a series.

    Attributes:
        dropped: number of warm-up samples at the start.
        steady: whether the rest stays on one level.
        regimes: number of levels in the rest, excursions not counted.
        note: why it is not steady, else None.
    """

    dropped: int
    steady: bool
    regimes: int
    note: str | None


def steady_part(samples: np.ndarray) -> WarmUpVerdict:
    """Find the warm-up of a series and judge whether the remaining samples are steady.

    Args:
        samples: shape (N,), positive durations in the order taken, in any one unit.
    """
    size = max(BLOCK, -(-len(samples) // MOST_BLOCKS))
    if len(samples) < LEAST_BLOCKS * size:
        least = LEAST_BLOCKS * BLOCK
        return WarmUpVerdict(
            0, False, 1, f"too few samples to judge ({len(samples)} of {least} needed)"
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
        # A gradual approach continues below the resolution of change points. Waiting as long
        # again squares the ratio by which it has fallen.
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
    """Return the linear change over a series, or None if negligible or within the noise."""
    change = slope(series) * (len(series) - 1)
    # The standard error of a least-squares slope, plus 5 % for the robust one.
    error = 1.05 * np.sqrt(12.0 / len(series)) * noise_scale(series)
    return change if abs(change) > max(TOLERANCE, CERTAIN * error) else None


def slope(values: np.ndarray, times: np.ndarray | None = None) -> float:
    """Return the median of the slopes between all pairs of points (Theil, 1950; Sen, 1968).

    Long series are first thinned to block medians, because the number of pairs grows quadratically.

    Args:
        values: shape (n,), n >= 2.
        times: shape (n,), ascending; the index by default.
    """
    places = np.arange(len(values), dtype=np.float64) if times is None else times
    size = -(-len(values) // SLOPE_POINTS)
    values, places = block_medians(values, size), block_medians(places, size)
    early, late = np.triu_indices(len(values), 1)
    return float(np.median((values[late] - values[early]) / (places[late] - places[early])))


def block_medians(samples: np.ndarray, size: int) -> np.ndarray:
    """Return the medians of consecutive blocks; the last block includes the remainder."""
    blocks = len(samples) // size
    medians = np.median(samples[: blocks * size].reshape(blocks, size), axis=1)
    medians[-1] = np.median(samples[(blocks - 1) * size :])
    return medians


def change_points(series: np.ndarray) -> list[int]:
    """Return the end index of each segment of constant level; the last is the series length.

    Uses the PELT algorithm (Killick, Fearnhead and Eckley, 2012) with a squared-error cost.

    Args:
        series: shape (n,), logarithms of medians.
    """
    from ruptures import KernelCPD

    scaled = (series - np.median(series)) / noise_scale(series)
    # The linear kernel is squared error; KernelCPD is ruptures' compiled implementation.
    search = KernelCPD(kernel="linear", min_size=2).fit(scaled[:, None])
    ends = search.predict(pen=PENALTY * np.log(len(series))) or [len(series)]
    return [int(end) for end in ends]


def noise_scale(series: np.ndarray) -> float:
    """Return the long-run standard deviation of the noise, robust to a few level shifts.

    The noise is modelled as an AR(1) process. The scale is estimated from the median absolute
    deviations (MAD) of the differences at lags one and two, which a few level shifts hardly affect.
    Source: Chakar, Lebarbier, Levy-Leduc and Robin, "A robust approach for estimating change-points
    in the mean of an AR(1) process", 2017.

    For independent noise the result equals 1.4826 MAD(diff) / sqrt(2), where diff is the lag-1
    difference. For correlated noise 1.4826 MAD(diff) / sqrt(2) is too small and would yield false
    change points.

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
    """Return the last level that holds a share of at least `MINOR` of the samples."""
    for level in levels[::-1]:
        if shares[np.abs(levels - level) <= TOLERANCE].sum() >= MINOR:
            return float(level)
    return float(levels[-1])


def _first_kept(levels: np.ndarray, reference: float) -> int:
    """Return the index of the first segment whose level is the end level or recurs later."""
    gaps = np.abs(levels - reference)
    settled = int(np.flatnonzero(gaps <= TOLERANCE)[0])
    for index in range(settled):
        # Levels far from the end level are less precise: bursts of 20 and 22 % are one state.
        near = max(TOLERANCE, gaps[index] / 4)
        if np.any(np.abs(levels[settled:] - levels[index]) <= near):
            return index
    return settled


def _comes_back(levels: np.ndarray) -> bool:
    """Whether any level recurs after a different level."""
    same = np.abs(levels[:, None] - levels) <= TOLERANCE
    return any(not row[i : np.flatnonzero(row)[-1]].all() for i, row in enumerate(same))


def _distinct(levels: np.ndarray, shares: np.ndarray) -> int:
    """Count the levels, merged within +-`TOLERANCE`, that have a share of at least `MINOR`."""
    order = np.argsort(levels)
    held: list[float] = []
    lowest = -np.inf
    for level, share in zip(levels[order], shares[order], strict=True):
        if level - lowest > 2 * TOLERANCE:
            lowest = float(level)
            held.append(0.0)
        held[-1] += float(share)
    return sum(share >= MINOR for share in held)
