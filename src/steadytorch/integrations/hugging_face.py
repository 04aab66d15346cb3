"""Hugging Face Trainer: a callback that records steps, and a mixin that applies a tuning plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from steadytorch.errors import UsageError
from steadytorch.integrations.training_run import TrainingRun
from steadytorch.integrations.versions import check
from steadytorch.results.watched import Watched
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.report import Report
from steadytorch.serve.plan import Plan
from steadytorch.workload.generators import restored
from steadytorch.workload.workload import Workload

check("transformers")

from transformers import TrainerCallback  # noqa: E402 - it may fail in other versions
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

log = logging.getLogger("steadytorch")


class SteadyCallback(TrainerCallback):
    """Records the steps of `Trainer.train()`; pass it as `Trainer(callbacks=[SteadyCallback()])`.

    The Trainer does not notify callbacks of exceptions. If `train()` raises, call `stop`; `result`
    then covers the steps so far.

    Args:
        quiet: whether to print no summary on standard error.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._run = TrainingRun(quiet)
        self._prints = True

    @property
    def result(self) -> Watched:
        """Breakdown of the step time and its variability by cause.

        Raises:
            UsageError: the callback was never called, or training goes on.
        """
        return self._run.result

    def stop(self, error: BaseException | None = None) -> None:
        """Stop recording steps after `train()` raised; print the summary on the main process.

        Args:
            error: the exception.
        """
        self._run.end(error, prints=self._prints)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start recording steps."""
        self._prints = state.is_world_process_zero
        self._run.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop recording steps; print the summary on the main process."""
        self._run.end(None, prints=self._prints)


class SteadyTrainerMixin:
    """Makes a Trainer train with a tuning plan: `class Mine(SteadyTrainerMixin, Trainer)`.

    Tune the model on the trainer's own batches, and set `plan` before training. The plan covers the
    forward and backward passes; the Trainer still clips gradients and updates weights. The plan is
    applied before Accelerate wraps the model. `train` restores the original model when it ends.
    Checkpoints and `config.json` have the same format as without a plan. The plan is not applied
    under mixed precision, FSDP, DeepSpeed or DataParallel; the reason is logged.

    Example::

        trainer = Mine(model=model, args=args, train_dataset=data)
        trainer.plan = steady.tune(trainer.steady_workload())
        trainer.train()

    Attributes:
        plan: a training plan of the model; None to train without a plan.
    """

    plan: Plan | None = None
    _tuned: TunedModule | None = None
    _is_in: bool = False

    def steady_workload(self) -> Workload:
        """The model's training step on the first batch, for `steady.tune`.

        With `compute_loss_func` or label smoothing, the loss is computed from outputs and labels as
        the Trainer does. An overridden `compute_loss` is not followed.

        The states of the random number generators of PyTorch, NumPy and Python are preserved.

        Raises:
            UsageError: the trainer has no training data.
        """
        owner: Any = self
        with restored():
            batch = next(iter(owner.get_train_dataloader()), None)
        if batch is None:
            raise UsageError("the trainer has no batch to train on: pass train_dataset=...")
        inputs, items = dict(owner._prepare_inputs(batch)), {}
        if owner.model_accepts_loss_kwargs or owner.compute_loss_func is not None:
            _, count = owner.get_batch_samples(iter([batch]), 1, owner.args.device)
            items = {} if count is None else {"num_items_in_batch": count}
        loss, targets = _loss_of, ()
        if (own := _own_loss(owner)) is not None and "labels" in inputs:
            loss, targets = partial(own, **items), inputs.pop("labels")
        if owner.model_accepts_loss_kwargs:
            inputs |= items
        kind, options = owner.get_optimizer_cls_and_kwargs(owner.args, owner.model)
        owner.model.train()
        return Workload.training(
            owner.model, (), loss, partial(kind, **options), targets=targets, kwargs=inputs
        )

    def steady_report(self) -> Report:
        """Counts of tuned and untouched model calls; see `TunedModule.report`.

        Raises:
            UsageError: no plan was applied.
        """
        if self._tuned is None:
            raise UsageError("no plan was applied: set trainer.plan and call train()")
        return self._tuned.report()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train`, then restore the original model."""
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
        """Apply the plan to the model, then call the Trainer's own `_wrap_model`."""
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
    """The loss in a transformers model's output."""
    return output["loss"] if isinstance(output, dict) else output[0]


def _own_loss(trainer: Any) -> Callable[..., Tensor] | None:
    """The loss that the Trainer computes from outputs and labels; None if the model computes it."""
    if trainer.compute_loss_func is not None:
        return trainer.compute_loss_func
    if trainer.label_smoother is None:
        return None
    shifts = trainer.model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return partial(trainer.label_smoother, shift_labels=shifts)


def _obstacle(trainer: Any) -> str | None:
    precision = trainer.accelerator.mixed_precision
    if precision != "no":
        return f"mixed precision is {precision}: tune with precision=... and leave it out"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "FSDP or DeepSpeed splits the model"
    if trainer.args.n_gpu > 1:
        return "DataParallel copies the model at each step: start one process per GPU"
    return None
