"""One line on standard error that shows how the watched steps run."""

from __future__ import annotations

import shutil
import statistics
import sys
import threading

from steadytorch.watching.clock import SLICES, UNITS, StepClock

_RECENT = 200
_PAUSE_S = 1.0


class LiveLine:
    """A line that is redrawn every second and erased at the end.

    Args:
        clock: the steps to show.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steadytorch-live", daemon=True)

    def start(self) -> None:
        """Start drawing."""
        self._thread.start()

    def stop(self) -> None:
        """Erase the line."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        drawn = False
        while not self._stop.wait(_PAUSE_S):
            if self._clock.steps:
                width = shutil.get_terminal_size().columns - 1
                print(
                    f"\r{text(self._clock)[:width]:<{width}}", end="", file=sys.stderr, flush=True
                )
                drawn = True
        if drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def text(clock: StepClock) -> str:
    """The steps so far and the latest 200, in one line."""
    recent = clock.durations_ns[-_RECENT:]
    if not recent:
        return "no step yet"
    total = sum(recent) or 1
    shares = {
        name: sum(column[-_RECENT:]) / total
        for name, column in zip(SLICES, list(clock.slices_ns), strict=True)
    }
    most = max(shares, key=lambda name: shares[name])
    return (
        f"{clock.steps:,} {UNITS[clock.unit]}, {statistics.median(recent) / 1e6:.2f} ms, slowest "
        f"{max(recent) / 1e6:.2f} ms; {most.replace('_', ' ')} {100 * shares[most]:.0f} %"
    )
