"""The progress of a search: a line per event, and on terminals a live line."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from steadytorch.report.text import duration, plain, seconds


class Progress:
    """Context manager that shows the progress of a search.

    The display redraws only when the search calls a method, because a redrawing thread would
    disturb the timing.

    Args:
        console: where to print.
        budget_s: time for the search, shown beside the clock.
        brief: print no lines; a terminal still shows the live line.
    """

    def __init__(self, console: Console, budget_s: float, brief: bool = False) -> None:
        self._console, self._budget_s, self._brief = console, budget_s, brief
        self._start = time.monotonic()
        self._phase = "starting"
        self._under_way: dict[str, float] = {}
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def phase(self, message: str) -> None:
        """Prints the heading of a search phase with the elapsed time."""
        self._phase = message
        if not self._brief:
            self._print(Text.assemble((f"{self._spent():>7}  ", "dim"), (plain(message), "bold")))
        self._draw()

    def trial(self, label: str, state: str, detail: str = "") -> None:
        """Prints a line for a candidate without times; the live line shows ongoing set-ups."""
        if state == "set-up":
            self._under_way[label] = time.monotonic()
        else:
            self._under_way.pop(label, None)
        if state in ("rejected", "failed", "skipped"):
            self._line(label, f"{state}: {detail}", "yellow")
        self._draw()

    def timed(self, label: str, median_ns: float) -> None:
        """Prints a line with the candidate's median."""
        self._line(label, duration(median_ns), "green")

    def step(self, message: str) -> None:
        """Shows a message on the live line only, at most four times a second."""
        self._phase = message
        self.tick()

    def tick(self) -> None:
        """Redraws the live line, at most four times a second."""
        if time.monotonic() - self._drawn > 0.25:
            self._draw()

    def _spent(self) -> str:
        minutes, rest = divmod(int(time.monotonic() - self._start), 60)
        return f"{minutes}:{rest:02d}"

    def _line(self, label: str, outcome: str, style: str) -> None:
        if self._brief:
            return
        self._print(Text.assemble(" " * 9, plain(label), "  ", (plain(outcome), style)))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if not self._console.is_terminal:
            return
        text = Text(
            f"{self._spent():>7}  of {seconds(self._budget_s)}: {plain(self._phase)}", "dim"
        )
        for label, since in self._under_way.items():
            text.append(
                f"\n         setting up {plain(label)} ({self._drawn - since:.0f} s)", "dim"
            )
        text.truncate(self._console.width * (1 + len(self._under_way)))
        self._live.update(text, refresh=True)
