"""A callback for the Trainer of Hugging Face transformers, and plans for its model."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadytorch.errors import UsageError
from steadytorch.integrations.training_run import TrainingRun
from steadytorch.integrations.versions import check
from steadytorch.results.watched import Watched
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.report import Report
from steadytorch.serve.plan import Plan
from steadytorch.workload.workload import Workload

check("transformers")

from transformers import TrainerCallback  # noqa: E402 - it may fail in other versions

log = logging.getLogger("steadytorch")


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


class SteadyTrainerMixin:
    """Trains the model of a Trainer by a plan: `class Mine(SteadyTrainerMixin, Trainer)`.

    Make the plan of the trainer's own batches, and set it before training::

        trainer = Mine(model=model, args=args, train_dataset=data)
        trainer.plan = steady.tune(trainer.steady_workload())
        trainer.train()

    The plan covers forward and backward of the model; clipping and update are the Trainer's. It is
    applied before Accelerate wraps the model. `train` puts the untouched model back at its end.
    Checkpoints and `config.json` are written as without a plan. Under mixed precision, FSDP,
    DeepSpeed and DataParallel the model runs untouched; the log says why.

    Attributes:
        plan: a training plan of the model; None for none.
    """

    plan: Plan | None = None
    _tuned: TunedModule | None = None
    _is_in: bool = False

    def steady_workload(self) -> Workload:
        """The model's training step on the first batch, for `steady.tune`.

        Random numbers that the caller draws later stay the same.

        Raises:
            UsageError: the trainer has no training data.
        """
        owner: Any = self
        with torch.random.fork_rng():
            batch = next(iter(owner.get_train_dataloader()), None)
        if batch is None:
            raise UsageError("the trainer has no batch to train on: pass train_dataset=...")
        inputs = dict(owner._prepare_inputs(batch))
        if owner.model_accepts_loss_kwargs:
            _, items = owner.get_batch_samples(iter([batch]), 1, owner.args.device)
            inputs |= {} if items is None else {"num_items_in_batch": items}
        kind, options = owner.get_optimizer_cls_and_kwargs(owner.args, owner.model)
        owner.model.train()
        return Workload.training(owner.model, (), _loss_of, partial(kind, **options), kwargs=inputs)

    def steady_report(self) -> Report:
        """How calls of the model were served; see `TunedModule.report`.

        Raises:
            UsageError: no plan was applied.
        """
        if self._tuned is None:
            raise UsageError("no plan was applied: set trainer.plan and call train()")
        return self._tuned.report()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As of the Trainer; puts the untouched model back at the end."""
        owner: Any = self
        untouched = owner.model
        try:
            return super().train(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            if self._is_in and self._tuned is not None:
                owner.model = owner.model_wrapped = untouched
                self._tuned.close()
                self._is_in = False

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Applies the plan, then wraps as the Trainer does."""
        owner: Any = self
        if training and self.plan is not None and not self._is_in and model is owner.model:
            reason = _obstacle(owner)
            if reason is None:
                self._tuned = model = owner.model = self.plan.apply(model)
                self._is_in = True
            else:
                log.warning("training untouched: %s", reason)
        return super()._wrap_model(  # pyright: ignore[reportAttributeAccessIssue]
            model, training, dataloader
        )


def _loss_of(output: Any) -> Tensor:
    """The loss that a model of transformers returns."""
    return output["loss"] if isinstance(output, dict) else output[0]


def _obstacle(trainer: Any) -> str | None:
    precision = trainer.accelerator.mixed_precision
    if precision != "no":
        return f"mixed precision is {precision}: tune with precision=... and leave it out"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "FSDP or DeepSpeed splits the model"
    if trainer.args.n_gpu > 1:
        return "DataParallel copies the model at each step: start one process per GPU"
    return None
