"""The gain that a search may still expect, from the candidates it has timed."""

from __future__ import annotations

import math

ENOUGH = 0.01
"""A search ends when what is left is expected to gain less than this share of the leader's time."""
HORIZON_S = 60.0
"""Seconds over which the expected gain is stated."""
_TYPICAL, _MOST = 0.02, 0.10
"""Size of an improvement before one was seen, and the largest that is assumed."""


class Prospects:
    """Estimates the gain of the next candidates.

    By Laplace's rule of succession, one of the next n candidates improves on the leader with
    probability n / (m + n + 1) after m that did not. Its gain is the mean of those seen.
    """

    def __init__(self) -> None:
        self._misses, self._gains = 0, [_TYPICAL]

    def note(self, leader_ns: float, candidate_ns: float) -> None:
        """Records a timed candidate.

        Args:
            leader_ns: iteration time of the leader before.
            candidate_ns: iteration time of the candidate.
        """
        gain = math.log(leader_ns / candidate_ns)
        if gain < ENOUGH:
            self._misses += 1
        else:
            self._misses = 0
            self._gains.append(min(gain, _MOST))

    def expected_gain(self, number: int) -> float:
        """Expected gain of the next `number` candidates, as a share of the leader's time."""
        size = sum(self._gains) / len(self._gains)
        return size * number / (self._misses + number + 1)
