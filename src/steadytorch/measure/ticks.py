"""A recording as stretches between ticks: what happened in one beyond what usually happens."""

from __future__ import annotations

import numpy as np

from steadytorch.device.recording import Recording

REFERENCE_LEAST = 5
"""Stretches free of outliers that are needed to say what is usual."""
UNUSUAL = 0.95
"""Events count beyond this quantile of such stretches: chance alone gets there in one of twenty."""


class Ticks:
    """The stretches of a recording that cover given spans, and the rest to compare them with.

    Args:
        recording: what was recorded.
        spans: beginnings and ends in ns on its clock, shape (2, spans).
    """

    def __init__(self, recording: Recording, spans: np.ndarray) -> None:
        self._recording = recording
        self._at = np.asarray(recording.at_ns, dtype=np.int64)
        last = max(0, len(self._at) - 1)
        self._first = np.clip(np.searchsorted(self._at, spans[0], side="right") - 1, 0, last)
        self._last = np.clip(np.searchsorted(self._at, spans[1], side="left"), 0, last)
        marks = np.zeros(last + 1, dtype=np.int64)
        np.add.at(marks, self._first, 1)
        np.add.at(marks, self._last, -1)
        # Intervals that hold any span, summed up, so that a stretch is free if the sum stands still.
        taken = np.cumsum(marks)[:last] > 0
        self._taken = np.concatenate([[0], np.cumsum(taken)])
        self._usual: dict[tuple[str, int], np.ndarray] = {}

    def shares_a_tick(self, place: int) -> np.ndarray:
        """Which spans lie in part between the same two ticks as this one; itself included."""
        return (self._first < self._last[place]) & (self._last > self._first[place])

    def extra_events(self, channel: str, place: int) -> float:
        """Events around a span beyond those of nearly all other stretches as long; 0 if unknown."""
        return self._extra(channel, place, UNUSUAL)

    def extra_ns(self, channel: str, place: int) -> float:
        """Time counted around a span beyond that of the median stretch as long; 0 if unknown."""
        return self._extra(channel, place, 0.5)

    def level(
        self, channel: str, begin: int, end: int, *, latest: bool = False
    ) -> tuple[float | None, float]:
        """How a channel stood within a span, and at the median of all ticks; None if unknown.

        Args:
            channel: a level of the recording.
            begin: of the span, in ns.
            end: of the span, in ns.
            latest: the value at its end in place of the mean.
        """
        column = getattr(self._recording, channel)
        if not column:
            return None, 0.0
        within = np.asarray(column)[self._around(begin, end)]
        return float(within[-1] if latest else within.mean()), float(np.median(column))

    def bits(self, begin: int, end: int) -> tuple[int, int]:
        """Clock-event bits seen within a span, and those set at half of all ticks or more."""
        if not self._recording.clock_event_mask:
            return 0, 0
        masks = np.asarray(self._recording.clock_event_mask, dtype=np.int64)
        seen = int(np.bitwise_or.reduce(masks[self._around(begin, end)]))
        places = [place for place in range(seen.bit_length()) if seen >> place & 1]
        always = [place for place in places if np.mean(masks >> place & 1) >= 0.5]
        return seen, sum(1 << place for place in always)

    def _around(self, begin: int, end: int) -> slice:
        """The ticks within a span, or the two around it."""
        first, after = np.searchsorted(self._at, [begin, end + 1])
        if first < after:
            return slice(first, after)
        last = len(self._at) - 1
        return slice(min(max(first - 1, 0), last), min(first, last) + 1)

    def _extra(self, channel: str, place: int, quantile: float) -> float:
        length = int(self._last[place] - self._first[place])
        column = getattr(self._recording, channel)
        if not column or length < 1:
            return 0.0
        reference = self._reference(channel, length)
        if len(reference) < REFERENCE_LEAST:
            return 0.0
        rise = max(0, column[self._last[place]] - column[self._first[place]])
        return max(0.0, rise - float(np.quantile(reference, quantile, method="higher")))

    def _reference(self, channel: str, length: int) -> np.ndarray:
        """Rises over all stretches of `length` ticks that no span touches."""
        key = channel, length
        if key not in self._usual:
            column = np.asarray(getattr(self._recording, channel), dtype=np.int64)
            rises = (column[length:] - column[:-length]).clip(min=0)
            self._usual[key] = rises[self._taken[length:] == self._taken[:-length]]
        return self._usual[key]
