"""A live status line on standard error with the times of the watched steps.

The status line is drawn below the cursor, so that the script's next output starts on its own line.
If the script writes several lines within a second, its second line partly overwrites the status
line. Erasing the status line in time would require wrapping the script's streams.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import threading

from steadytorch.watching.clock import SLICES, UNITS, StepClock

_RECENT = 200
_PAUSE_S = 1.0
_ERASE = "\x1b[J"
"""Erases from the cursor to the end of the screen (VT100, ED)."""
_BELOW = "\x1bD\x1b[A\x1b7\x1b[B\r"
_BACK = "\x1b8"
"""Scroll if there is no line below the cursor (IND, CUU), save the cursor (DECSC), and go to that
line (CUD); restore the cursor (DECRC). The column is kept throughout."""


class LiveLine:
    """A status line below the cursor that is redrawn every second and erased at the end.

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
        """Stop drawing and erase the status line."""
        self._stop.set()
        self._thread.join(1.0)

    def draw(self) -> None:
        """Draw the status line below the cursor."""
        line = text(self._clock)[: shutil.get_terminal_size().columns - 1]
        print(f"{_ERASE}{_BELOW}{line}{_BACK}", end="", file=sys.stderr, flush=True)

    def erase(self) -> None:
        """Erase the status line, if the script wrote at most one line since the last `draw`."""
        print(_ERASE, end="", file=sys.stderr, flush=True)

    def _run(self) -> None:
        drawn = False
        while not self._stop.wait(_PAUSE_S):
            if self._clock.steps:
                self.draw()
                drawn = True
        if drawn:
            self.erase()


def text(clock: StepClock) -> str:
    """Status text: the number of steps so far and the times of the latest 200 steps."""
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
