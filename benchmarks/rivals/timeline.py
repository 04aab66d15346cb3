"""When each phase of a search began, for results."""

from __future__ import annotations

import time

from steadytorch.tune.setup_scheduler import NullListener


class Timeline(NullListener):
    """Records the phases of a search, in seconds since its start."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str]] = []
        self._began = time.monotonic()

    def phase(self, message: str) -> None:
        self.events.append((round(time.monotonic() - self._began, 1), message))

    def trial(self, label: str, state: str, detail: str = "") -> None:
        self.phase(f"{state}: {label}")
