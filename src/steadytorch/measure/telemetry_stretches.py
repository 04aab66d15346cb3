"""Compares telemetry around given time spans with the rest of the recording."""

from __future__ import annotations

import numpy as np

from steadytorch.device.recording import READ_EVERY, Recording

REFERENCE_LEAST = 5
"""Minimum number of outlier-free stretches for a reference."""
UNUSUAL = 0.95
"""Only events beyond this quantile of the reference count; chance exceeds it once in twenty."""


class TelemetryStretches:
    """Telemetry ticks around given time spans, with all other ticks as the reference.

    Args:
        recording: the telemetry.
        spans: starts and ends in ns on its clock, shape (2, spans).
    """

    def __init__(self, recording: Recording, spans: np.ndarray) -> None:
        self._recording = recording
        self._at = np.asarray(recording.at_ns, dtype=np.int64)
        last = max(0, len(self._at) - 1)
        self._first = np.clip(np.searchsorted(self._at, spans[0], side="right") - 1, 0, last)
        self._last = np.clip(np.searchsorted(self._at, spans[1], side="left"), 0, last)
        self._columns: dict[str, np.ndarray | None] = {}
        self._medians: dict[str, float] = {}
        self._usual: dict[tuple[str, int], np.ndarray] = {}
        self._taken: dict[int, np.ndarray] = {}

    def shares_a_stretch(self, channel: str, place: int) -> np.ndarray:
        """Return a mask of spans that share counter ticks with span `place`, itself included."""
        ends = self._ends(channel)
        return (self._first < ends[place]) & (ends > self._first[place])

    def extra_events(self, channel: str, place: int) -> float:
        """Return how many events a span has beyond what is usual for its length; 0 if unknown.

        Usual is the quantile `UNUSUAL` of all stretches of that length.
        """
        return self._extra(channel, place, UNUSUAL)

    def extra_ns(self, channel: str, place: int) -> float:
        """Return a span's counted ns beyond the median of equally long stretches; 0 if unknown."""
        return self._extra(channel, place, 0.5)

    def level(
        self, channel: str, begin: int, end: int, *, latest: bool = False
    ) -> tuple[float | None, float]:
        """Return a channel's level in a span (None if unknown) and its median over all ticks.

        Args:
            channel: a level channel of the recording.
            begin: start of the span in ns.
            end: end of the span in ns.
            latest: take the last value instead of the mean.
        """
        column = self._column(channel)
        if column is None:
            return None, 0.0
        if channel not in self._medians:
            self._medians[channel] = float(np.median(column))
        within = column[self._around(begin, end)]
        return float(within[-1] if latest else within.mean()), self._medians[channel]

    def bits(self, begin: int, end: int) -> tuple[int, int]:
        """Return the clock-event bits set in a span, and those set at half of all ticks or more."""
        masks = self._column("clock_event_mask")
        if masks is None:
            return 0, 0
        seen = int(np.bitwise_or.reduce(masks[self._around(begin, end)]))
        places = [place for place in range(seen.bit_length()) if seen >> place & 1]
        always = [place for place in places if np.mean(masks >> place & 1) >= 0.5]
        return seen, sum(1 << place for place in always)

    def _around(self, begin: int, end: int) -> slice:
        """Return the slice of ticks within a span; if empty, of the two ticks around the span."""
        first, after = np.searchsorted(self._at, [begin, end + 1])
        if first < after:
            return slice(first, after)
        last = len(self._at) - 1
        return slice(min(max(first - 1, 0), last), min(first, last) + 1)

    def _column(self, channel: str) -> np.ndarray | None:
        """Return a channel's values at all ticks; None if it was not recorded."""
        if channel not in self._columns:
            values = getattr(self._recording, channel)
            self._columns[channel] = np.asarray(values, dtype=np.int64) if values else None
        return self._columns[channel]

    def _ends(self, channel: str) -> np.ndarray:
        """Return, for each span, the tick after it by which the channel has been read again."""
        late = READ_EVERY.get(channel, 1) - 1
        return np.minimum(self._last + late, max(0, len(self._at) - 1))

    def _extra(self, channel: str, place: int, quantile: float) -> float:
        first, end = int(self._first[place]), int(self._ends(channel)[place])
        column = self._column(channel)
        if column is None or end <= first:
            return 0.0
        reference = self._reference(channel, column, end - first)
        if len(reference) < REFERENCE_LEAST:
            return 0.0
        rise = max(0, int(column[end] - column[first]))
        return max(0.0, rise - float(np.quantile(reference, quantile, method="higher")))

    def _reference(self, channel: str, column: np.ndarray, length: int) -> np.ndarray:
        """Return the counter's increase in each stretch of `length` ticks that touches no span."""
        key = channel, length
        if key not in self._usual:
            rises = (column[length:] - column[:-length]).clip(min=0)
            taken = self._intervals_taken(channel)
            self._usual[key] = rises[taken[length:] == taken[:-length]]
        return self._usual[key]

    def _intervals_taken(self, channel: str) -> np.ndarray:
        """For each tick, count the earlier intervals between ticks that touch a span."""
        late = READ_EVERY.get(channel, 1)
        if late not in self._taken:
            marks = np.zeros(max(1, len(self._at)), dtype=np.int64)
            np.add.at(marks, self._first, 1)
            np.add.at(marks, self._ends(channel), -1)
            held = np.cumsum(marks)[:-1] > 0
            self._taken[late] = np.concatenate([[0], np.cumsum(held)])
        return self._taken[late]
