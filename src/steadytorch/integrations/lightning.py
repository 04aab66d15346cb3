"""A callback for the Trainer of PyTorch Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from steadytorch.integrations.training_run import TrainingRun
from steadytorch.results.watched import Watched


class SteadyCallback(Callback):
    """Watches `Trainer.fit()`: `Trainer(callbacks=[SteadyCallback()])`.

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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start watching."""
        self._run.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching; print the summary on the first process."""
        self._run.end(None, prints=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching and keep the steps so far."""
        self._run.end(exception, prints=trainer.is_global_zero)
