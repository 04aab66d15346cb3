"""Clocks that can be replaced: real time in production, scripted time in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        ...


class HostClock:
    """The monotonic clock of this machine, at the resolution of `time.perf_counter_ns`."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return time.perf_counter_ns()


class FakeClock:
    """A clock that moves only when told: for tests of samplers, races and budgets."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return self._now_ns

    def advance(self, nanoseconds: int) -> None:
        """Moves the time on."""
        self._now_ns += nanoseconds
