"""A callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from steadytorch.integrations.training_run import TrainingRun
from steadytorch.results.watched import Watched


class SteadyCallback(TrainerCallback):
    """Watches `Trainer.train()`: `Trainer(..., callbacks=[SteadyCallback()])`.

    The Trainer does not tell its callbacks of exceptions. If `train()` raises, call `stop`: then
    `result` holds the steps so far.

    Args:
        quiet: whether to print no summary on standard error.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._run = TrainingRun(quiet)

    @property
    def result(self) -> Watched:
        """Where time and variability of the steps went.

        Raises:
            UsageError: the callback was never called, or training goes on.
        """
        return self._run.result

    def stop(self, error: BaseException | None = None) -> None:
        """End the watch after `train()` raised.

        Args:
            error: the exception.
        """
        self._run.end(error, prints=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start watching."""
        self._run.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching; print the summary on the first process."""
        self._run.end(None, prints=state.is_world_process_zero)
