"""Finds changes of level in a series of results, such as one benchmark time per commit.

After each new value, an exact Mann-Whitney test (Mann and Whitney, 1947) compares the last few
values with the values before them. The test assumes no distribution, so single outliers do not
count as a change. The test does assume that the values of one level are exchangeable; slow drift of
the machine breaks this assumption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from steadytorch.errors import UsageError

ALPHA = 0.01
"""Probability of any false change in a series, however long it grows."""
TAILS = ((5, 1 / 2), (8, 1 / 6), (13, 1 / 6), (21, 1 / 6))
"""Numbers of last values that are tested, and their shares of the error probability. Five is the
delay at which a step shall be found. Fewer values cannot be significant at these levels."""
HISTORY = 60
"""Most values before them that are used: enough for significance, and recent."""
_FIRST = 10
"""Number of values at the first test: five before, and the last five."""
_LEAST_BEFORE = 5
_CONFIDENCE = 0.99


class Change(msgspec.Struct, frozen=True):
    """A change of level.

    Attributes:
        index: index of the first value at the new level.
        found: index of the value with which the change was established.
        low: lower end of the 99 % interval of its size, in the unit of the values.
        estimate: its size (Hodges-Lehmann).
        high: upper end of the interval.
        earliest: lowest index that the data allow in place of `index`.
        latest: highest index that the data allow in place of `index`.
    """

    index: int
    found: int
    low: float
    estimate: float
    high: float
    earliest: int
    latest: int


def find_changes(values: Sequence[float], *, alpha: float = ALPHA) -> list[Change]:
    """Finds the changes of level in a series.

    The test after value t has the significance level alpha ln(9.5) / (t ln(t)^2). The levels of all
    tests add up to less than `alpha`, which bounds the probability of a false change in the whole
    series. A change once found stays found as the series grows.

    The interval for the size of a change is the Mann-Whitney interval over the values up to the
    neighbouring changes. The interval for the size ignores the uncertainty of where the change
    occurred.

    Args:
        values: shape (n,), in order, such as logarithms of times. Differences count.
        alpha: probability of any false change.

    Raises:
        UsageError: a value is not a finite number.
    """
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or not np.isfinite(series).all():
        raise UsageError("a series must be a list of finite numbers")
    starts, found = [0], []
    for end in range(_FIRST, len(series) + 1):
        level = alpha * math.log(_FIRST - 0.5) / (end * math.log(end) ** 2)
        if _has_changed(series[starts[-1] : end], level):
            starts.append(starts[-1] + _best_split(series[starts[-1] : end]))
            found.append(end - 1)
    return _described(series, starts[1:], found)


def _has_changed(segment: np.ndarray, level: float) -> bool:
    for count, share in TAILS:
        before, after = segment[:-count][-HISTORY:], segment[-count:]
        if len(before) < _LEAST_BEFORE:
            return False
        above = int((after[:, None] > before).sum())
        below = int((after[:, None] < before).sum())
        extreme, most = max(above, below), len(before) * count
        # Levels below 1e-4 need nearly separate groups, and the exact tail takes time.
        if (
            extreme > 0.75 * most
            and 2 * rank_sum_tail(len(before), count, extreme) <= share * level
        ):
            return True
    return False


def _squares(segment: np.ndarray) -> np.ndarray:
    """Sum of squares around the two means, for each split with two or more values per side."""
    return np.array(
        [
            len(one) * one.var() + len(other) * other.var()
            for one, other in (np.split(segment, [k]) for k in range(2, len(segment) - 1))
        ]
    )


def _best_split(segment: np.ndarray) -> int:
    return 2 + int(_squares(segment).argmin())


def _described(series: np.ndarray, starts: list[int], found: list[int]) -> list[Change]:
    """Describe each change, relocated by using all values up to the neighbouring changes."""
    edges = [0, *starts, len(series)]
    changes = []
    for i in range(1, len(edges) - 1):
        left, right = edges[i - 1], edges[i + 1]
        segment = series[left:right]
        if len(segment) >= 4:
            edges[i] = left + _best_split(segment)
        split = edges[i] - left
        low, estimate, high = shift(segment[:split], segment[split:])
        first, last = _places(segment)
        changes.append(
            Change(edges[i], found[i - 1], low, estimate, high, left + first, left + last)
        )
    return changes


def _places(segment: np.ndarray) -> tuple[int, int]:
    """First and last split whose sum of squares an F test cannot distinguish from the minimum."""
    from scipy.stats import f

    squares, freedom = _squares(segment), max(1, len(segment) - 3)
    bound = squares.min() * (1 + f.ppf(_CONFIDENCE, 1, freedom) / freedom)
    allowed = np.flatnonzero(squares <= bound)
    return 2 + int(allowed[0]), 2 + int(allowed[-1])


def shift(
    before: np.ndarray, after: np.ndarray, confidence: float = _CONFIDENCE
) -> tuple[float, float, float]:
    """Lower end, estimate and upper end of the shift between two groups (Hodges-Lehmann 1963).

    Args:
        before: shape (n,).
        after: shape (m,).
        confidence: minimum coverage; with too few values the interval is all differences.
    """
    differences = np.sort((after[:, None] - before).ravel())
    cut, half = 0, (1 - confidence) / 2
    while cut + 1 < len(differences) // 2 and (
        rank_sum_tail(len(before), len(after), len(differences) - cut - 1) <= half
    ):
        cut += 1
    return (
        float(differences[cut]),
        float(np.median(differences)),
        float(differences[len(differences) - 1 - cut]),
    )


def rank_sum_tail(before: int, after: int, statistic: int) -> float:
    """P(U >= statistic) without ties; U counts the pairs in which the later value is larger."""
    counts = rank_sum_counts(*sorted((before, after)))
    return sum(counts[statistic:]) / sum(counts)


@lru_cache(maxsize=1024)
def rank_sum_counts(fewer: int, more: int) -> list[int]:
    """Number of orderings for each Mann-Whitney U: coefficients of the Gaussian binomial."""
    counts = [1] + [0] * (fewer * more)
    for i in range(1, fewer + 1):
        for at in range(len(counts) - 1, more + i - 1, -1):
            counts[at] -= counts[at - more - i]
        for at in range(i, len(counts)):
            counts[at] += counts[at - i]
    return counts
