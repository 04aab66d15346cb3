"""Replaceable clocks: real time in production, scripted time in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        ...


class HostClock:
    """The monotonic clock `time.perf_counter_ns`."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return time.perf_counter_ns()


class FakeClock:
    """A manually advanced clock, for tests of samplers, races and budgets."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return self._now_ns

    def advance(self, nanoseconds: int) -> None:
        """Advance the time."""
        self._now_ns += nanoseconds
