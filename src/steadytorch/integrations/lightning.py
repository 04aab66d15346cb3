"""PyTorch Lightning: a callback that records steps, and a mixin that runs tuned training steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

from torch import Tensor, nn

from steadytorch.errors import UsageError
from steadytorch.integrations.training_run import TrainingRun
from steadytorch.integrations.versions import check
from steadytorch.results.watched import Watched
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.report import Report
from steadytorch.runtime.step import StepReport, TunedStep
from steadytorch.serve.plan import Plan
from steadytorch.workload.feed import arguments

check("lightning")

from lightning.pytorch import LightningModule  # noqa: E402 - it may fail in other versions
from lightning.pytorch.callbacks import Callback  # noqa: E402

FULL_PRECISION = "32-true"
WITHIN = frozenset(
    {
        *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients"),
    }
)
"""Hooks that Lightning runs within a step; a step taken by a plan is over before."""
OF_MODULE = WITHIN | {"backward", "optimizer_step", "optimizer_zero_grad"}
"""The same and the parts of a step, which only a module can override."""
log = logging.getLogger("steadytorch")


class SteadyCallback(Callback):
    """Records `Trainer.fit()` and can apply a plan: `Trainer(callbacks=[SteadyCallback()])`.

    A training plan is used during `fit`, an inference plan during `validate`, `test` and `predict`.
    The plan is applied before the strategy wraps the LightningModule. The original module is
    restored at the end. Checkpoints have the same keys as without a plan.

    Args:
        quiet: whether to print no summary on standard error.
        plan: a plan of one module of the LightningModule; None to record steps only.
        module: attribute of the LightningModule that holds the module of the plan.
    """

    def __init__(
        self, quiet: bool = False, *, plan: Plan | None = None, module: str = "model"
    ) -> None:
        self._run = TrainingRun(quiet)
        self._plan, self._module = plan, module
        self._untouched: nn.Module | None = None
        self._fast: TunedModule | None = None
        self._resumes = False

    @property
    def result(self) -> Watched:
        """Breakdown of the step time and its variability by cause.

        Raises:
            UsageError: the callback was never called, or training goes on.
        """
        return self._run.result

    def report(self) -> Report:
        """Counts of tuned and untouched module calls; see `TunedModule.report`.

        Raises:
            UsageError: no plan was applied.
        """
        if self._fast is None:
            raise UsageError("no plan was applied: pass plan=... and run the trainer")
        return self._fast.report()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Apply the plan before the strategy wraps the module.

        Raises:
            UsageError: the LightningModule has no module of the given name.
        """
        if self._plan is None or (self._plan.trains is not None) is not (stage == "fit"):
            return
        untouched = dict(pl_module.named_children()).get(self._module)
        if untouched is None:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise UsageError(
                f"{type(pl_module).__name__} has no module {self._module!r}: pass module=... as "
                f"one of {names}"
            )
        untouched.to(trainer.strategy.root_device)  # a plan is made for one device
        self._resumes = stage != "fit" and untouched.training
        if self._resumes:
            untouched.eval()  # as Lightning does later; a plan fits one mode
        self._untouched, self._fast = untouched, self._plan.apply(untouched)
        setattr(pl_module, self._module, self._fast)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the original module."""
        if self._untouched is not None and self._fast is not None:
            setattr(pl_module, self._module, self._untouched)
            if self._resumes:
                self._untouched.train()
            self._untouched = None
            self._fast.close()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording steps."""
        self._run.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop recording steps; print the summary on the main process."""
        self._run.end(None, prints=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop recording, keep the steps so far and restore the original module."""
        self._run.end(exception, prints=trainer.is_global_zero)
        self.teardown(trainer, pl_module, "")


class SteadyStepMixin:
    """Runs whole training steps with a plan: `class Mine(SteadyStepMixin, LightningModule)`.

    Call `use_plan` in `__init__`, and `whole_step` in `training_step`. `whole_step` runs forward
    pass, loss, backward pass, gradient clipping and optimizer update as `plan.step` does. Lightning
    still counts steps, schedules learning rates and writes checkpoints.

    With several processes or optimizers, manual optimization, mixed precision, gradient
    accumulation or clipping by value, Lightning takes the step itself and the reason is logged. It
    also does so if the module or a callback overrides a hook within the step (`WITHIN`), or a class
    overrides `backward`, `optimizer_step` or `optimizer_zero_grad`.

    `training_step` must call `whole_step` once at most, and return its loss unchanged: the step was
    taken with this loss.

    Example::

        def training_step(self, batch, index):
            images, targets = batch
            loss = self.whole_step(images, targets)
            self.log("loss", loss)
            return loss
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Checks that `training_step` returns the loss of `whole_step`."""
        super().__init_subclass__(**options)
        if "training_step" in vars(cls):
            cls.training_step = _checked(vars(cls)["training_step"])

    def use_plan(self, plan: Plan | None, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        """Set the plan, model and loss that `whole_step` uses.

        Args:
            plan: a training plan of `model`; None to leave the step to Lightning.
            model: the untouched module.
            loss: maps the output of `model` and the targets to a scalar tensor.
        """
        # Not as attributes of the module, which would register `model` a second time.
        vars(self)["_steady"] = _WholeSteps(plan, model, loss)

    def whole_step(self, inputs: Any, *targets: Any) -> Tensor:
        """Run one training step, or only forward pass and loss if Lightning takes the step.

        Args:
            inputs: inputs of the model: a tensor, a tuple of positional arguments, or a mapping of
                keyword arguments.
            targets: further arguments of the loss.

        Returns:
            The loss; detached if the step was taken.

        Raises:
            UsageError: the step was already taken.
        """
        return vars(self)["_steady"].run(self, inputs, targets)

    def step_report(self) -> StepReport | None:
        """Counts of replayed and eager steps; None before the first step with a plan."""
        step = vars(self)["_steady"].step
        return None if step is None else step.report()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run Lightning's backward pass, unless `whole_step` has already taken the step."""
        if not vars(self)["_steady"].is_taken:
            super().backward(loss, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Zero the gradients, unless `whole_step` has already taken the step."""
        if not vars(self)["_steady"].is_taken:
            super().optimizer_zero_grad(  # pyright: ignore[reportAttributeAccessIssue]
                epoch, batch_idx, optimizer
            )

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Run the closure, then step the optimizer unless `whole_step` has already done so."""
        whole: _WholeSteps = vars(self)["_steady"]
        closure = optimizer_closure
        if whole.reason(self) is None:
            whole.taken = None
            loss = optimizer_closure()
            if whole.is_taken:
                whole.taken = None
                return
            closure = partial(_returned, loss)  # the gradients are there
        super().optimizer_step(  # pyright: ignore[reportAttributeAccessIssue]
            epoch, batch_idx, optimizer, closure
        )


def _returned(value: Any) -> Any:
    return value


def _checked(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a training step to refuse another loss than that of the step that was taken."""

    @wraps(training_step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = training_step(self, *args, **kwargs)
        whole: _WholeSteps = vars(self)["_steady"]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if whole.is_taken and loss is not whole.taken:
            raise UsageError(
                f"{type(self).__name__}.training_step returns another loss than whole_step, which "
                "has already taken the step: return its loss unchanged, and compute the whole loss "
                "in the function passed to use_plan"
            )
        return output

    return checked


class _WholeSteps:
    """State of `SteadyStepMixin`: the plan, model, loss and tuned step.

    Attributes:
        step: the plan's step; None before the first.
        taken: the loss of the step that `training_step` took; None if it took none.
    """

    def __init__(self, plan: Plan | None, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        self._plan, self._model, self._loss = plan, model, loss
        self._said = False
        self._made_for: tuple[Any, float | None] = None, None
        self.step: TunedStep | None = None
        self.taken: Tensor | None = None

    @property
    def is_taken(self) -> bool:
        """Whether `training_step` took a whole step."""
        return self.taken is not None

    def __getstate__(self) -> dict[str, Any]:
        # A step belongs to one model and one process.
        return vars(self) | {"step": None, "taken": None, "_made_for": (None, None)}

    def run(self, module: Any, inputs: Any, targets: tuple[Any, ...]) -> Tensor:
        if self._plan is None or self.reason(module) is not None or not module.training:
            args, kwargs = arguments(inputs)
            return self._loss(self._model(*args, **kwargs), *targets)
        optimizer = module.optimizers(use_pl_optimizer=False)
        clip = module.trainer.gradient_clip_val
        if self.step is None or self._made_for != (optimizer, clip):  # a later fit has others
            self.step = self._plan.step(self._model, optimizer, self._loss, clip=clip)
            self._made_for = optimizer, clip
        if self.is_taken:
            raise UsageError(
                f"{type(module).__name__}.training_step calls whole_step twice, and each call is a "
                "step: call it once, with all inputs"
            )
        self.taken = self.step(inputs, *targets)
        return self.taken

    def reason(self, module: Any) -> str | None:
        """Why Lightning takes the step itself, logged once; None if the plan runs the step."""
        found = "no plan was given" if self._plan is None else _obstacle(module)
        if found is not None and self._plan is not None and not self._said:
            self._said = True
            log.warning("Lightning takes the training steps: %s", found)
        return found


def _obstacle(module: Any) -> str | None:
    trainer = module.trainer
    if trainer.world_size > 1:
        return f"{trainer.world_size} processes train"
    if trainer.precision != FULL_PRECISION:
        return f"precision is {trainer.precision}: tune with precision=... instead"
    if trainer.accumulate_grad_batches != 1:
        return "gradients are accumulated"
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        return f"gradients are clipped by {trainer.gradient_clip_algorithm}"
    if len(trainer.optimizers) != 1:
        return f"there are {len(trainer.optimizers)} optimizers"
    if not module.automatic_optimization:
        return "optimization is manual"
    return _override(module, trainer)


def _override(module: Any, trainer: Any) -> str | None:
    """Names a method within the step that the module or a callback overrides."""
    callbacks = [(each, Callback, WITHIN) for each in trainer.callbacks]
    for owner, base, names in [(module, LightningModule, OF_MODULE), *callbacks]:
        own = _overrides(type(owner), base, names) | (names & vars(owner).keys())
        if own:
            return f"{type(owner).__name__} overrides {min(own)}"
    return None


@cache
def _overrides(kind: type, base: type, names: frozenset[str]) -> frozenset[str]:
    known = {*base.__mro__, SteadyStepMixin}
    return names & {name for each in kind.__mro__ if each not in known for name in vars(each)}
