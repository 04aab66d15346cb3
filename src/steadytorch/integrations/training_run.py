"""Recording of training runs, shared by the trainer callbacks."""

from __future__ import annotations

import sys
from typing import Any

from steadytorch.errors import UsageError
from steadytorch.results.watched import Watched
from steadytorch.watching.watch import Watch


class TrainingRun:
    """Records the steps of a trainer's runs and keeps the latest result.

    Args:
        quiet: whether to print no summary on standard error.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._watch: Watch[Any] | None = None
        self._running = False

    @property
    def result(self) -> Watched:
        """Breakdown of the step time and its variability in the latest run.

        Raises:
            UsageError: the callback was never called, or the run goes on.
        """
        if self._watch is None:
            raise UsageError(
                "the trainer has not called this callback: pass it in callbacks=[...] and train"
            )
        return self._watch.result

    def begin(self) -> None:
        """Start recording steps; end an earlier run that failed without calling `end`."""
        self.end(None, prints=False)
        self._watch = Watch(live=False)
        self._watch.start()
        self._running = True

    def end(self, error: BaseException | None, *, prints: bool) -> None:
        """Stop recording steps; print the summary if `prints`.

        Args:
            error: the exception that ended the run.
            prints: whether this process speaks for all ranks.
        """
        if self._watch is None or not self._running:
            return
        self._running = False
        self._watch.stop(error)
        if prints and not self._quiet and sys.stderr is not None:
            from rich.console import Console

            from steadytorch.report.run import WIDTH, render_run

            console = Console(file=sys.stderr, width=WIDTH, highlight=False)
            render_run(console, "of the trainer", self._watch.result)
