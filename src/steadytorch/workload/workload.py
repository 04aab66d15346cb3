"""`Workload`: a model, its inputs, and how to take one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._C import _set_grad_enabled

from steadytorch.errors import UsageError
from steadytorch.results.signature import Signature
from steadytorch.workload.compiled_loss import CompiledLoss
from steadytorch.workload.containers import BorrowedArguments, holds_containers
from steadytorch.workload.feed import (
    Batch,
    Feed,
    Targeted,
    TargetLoss,
    arguments,
    first_batch,
)
from steadytorch.workload.signature import map_tensors, signature, tensors_of
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import Update

Loss = TargetLoss
"""Maps the model's output, and the targets if there are any, to a scalar loss."""
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class TrainingStep:
    """The part of a training step after the forward pass: loss and optimizer step.

    Attributes:
        loss: maps the model's output to a scalar tensor, closing over the targets. With a loader it
            is a `Targeted` with the targets of the first batch.
        optimizer: an optimizer over the model's parameters, or a factory that makes one from them.
        update: makes the `Update` that takes the optimizer's step; None for the optimizer's own.
        captured: wraps the eager step in one that replays CUDA graphs; None to run it eagerly.
        compiled_loss: makes the compiled form of a loss; None to call the loss itself.
        autocast: whether the model runs under autocast, and may leave the conversion of its output
            to a compiled loss.
    """

    loss: Loss
    optimizer: torch.optim.Optimizer | OptimizerFactory
    update: Callable[[torch.optim.Optimizer], Update] | None = None
    captured: Callable[[EagerStep], Callable[..., torch.Tensor]] | None = None
    compiled_loss: Callable[[Loss], CompiledLoss] | None = None
    autocast: bool = False

    @property
    def called_loss(self) -> Loss:
        """The compiled form of the loss if there is one, else the loss."""
        return self.loss if self.compiled_loss is None else self.compiled_loss(self.loss)


@dataclass(frozen=True, eq=False)
class Workload:
    """A model together with its inputs, for inference or training.

    Use `Workload(model, inputs)` for inference, `Workload.training(...)` for training, and
    `Workload.from_loader(...)` for either with a new batch per step.

    Attributes:
        model: an `nn.Module`, or any callable.
        inputs: positional arguments. A single tensor becomes a tuple of one, a mapping `kwargs`.
        kwargs: keyword arguments.
        name: name in results; by default the model's class.
        training_step: loss and optimizer; None for inference.
        feed: source of a new batch per step; None if all steps use `inputs`. With a feed, `inputs`
            are the first batch, on the model's device.
        untouched: the model before any transform, if `model` is transformed.

    Raises:
        UsageError: the model is not callable, or an optimizer factory needs an `nn.Module`.
    """

    model: Any
    inputs: Any = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    training_step: TrainingStep | None = None
    untouched: Any = None
    feed: Feed | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise UsageError(
                f"a workload needs a callable model, got {type(self.model).__name__}: "
                "pass an nn.Module, or a function of the inputs"
            )
        inputs, kwargs = arguments(self.inputs)
        self._set("inputs", inputs)
        if kwargs:
            self._set("kwargs", {**kwargs, **self.kwargs})
        if not self.name:
            self._set("name", getattr(self.model, "__name__", type(self.model).__name__))
        if self.untouched is None:
            self._set("untouched", self.model)
        self._check_training()

    def _check_training(self) -> None:
        if self.training_step is None or isinstance(self.untouched, nn.Module):
            return
        if not isinstance(self.training_step.optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"an optimizer cannot be made for a {type(self.untouched).__name__}: pass an "
                "nn.Module as the model, or an optimizer instead of a factory"
            )

    def _set(self, attribute: str, value: Any) -> None:
        object.__setattr__(self, attribute, value)

    @classmethod
    def training(
        cls,
        model: nn.Module,
        inputs: Any,
        loss: Loss,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        *,
        targets: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Workload:
        """A training workload: each step is forward, loss, backward and optimizer step.

        Args:
            model: the module to train; steps update its weights.
            inputs: positional arguments, as for an inference workload.
            loss: maps the model's output, and the targets if there are any, to a scalar tensor.
            optimizer: an optimizer over `model.parameters()`, or a function that makes one.
            targets: further arguments of the loss: a tensor, or a tuple of them.
            kwargs: keyword arguments of the model.
            name: name in results.
        """
        given = targets if isinstance(targets, tuple) else (targets,)
        step = TrainingStep(Targeted(loss, *given) if given else loss, optimizer)
        return cls(model, inputs, kwargs or {}, name, step)

    @classmethod
    def from_loader(
        cls,
        model: Any,
        loader: Iterable[Any],
        loss: TargetLoss | None = None,
        optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
        *,
        name: str = "",
    ) -> Workload:
        """A workload whose steps each take the next batch of a data loader and run the model on it.

        Each batch is moved to the model's device. The loader restarts when it ends. Batches with
        other shapes than the first, such as a short last batch, are skipped. Creating the workload
        also takes the first batch.

        Args:
            model: the module to run, or to train with a loss and an optimizer.
            loader: an iterable that can be iterated repeatedly, such as a DataLoader. Each batch
                holds the model's arguments in any form that `inputs` may have; for training, it is
                a pair of these arguments and the targets.
            loss: maps the model's output and a batch's targets to a scalar tensor.
            optimizer: an optimizer over `model.parameters()`, or a function that makes one.
            name: name in results.

        Raises:
            UsageError: the loader is invalid or empty, or only one of loss and optimizer is given.
        """
        if (loss is None) is not (optimizer is None):
            raise UsageError("training needs both a loss and an optimizer, got only one of them")
        batch = first_batch(loader, supervised=loss is not None)
        on_host = any(tensor.device.type == "cpu" for tensor in tensors_of(batch))
        step = None
        if loss is not None and optimizer is not None:
            step = TrainingStep(Targeted(loss, *batch.targets), optimizer)
        made = cls(model, batch.inputs, batch.kwargs, name, step, feed=Feed(loader, on_host))
        return made.to(made.device)

    @property
    def is_training(self) -> bool:
        """Whether a step updates weights."""
        return self.training_step is not None

    @property
    def module(self) -> nn.Module | None:
        """The model if it is an `nn.Module`, else None."""
        return self.model if isinstance(self.model, nn.Module) else None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, else of the first input, else CPU."""
        found: list[torch.device] = []
        if self.module is not None and (first := next(self.module.parameters(), None)) is not None:
            found.append(first.device)
        if not found:
            map_tensors(lambda t: found.append(t.device) or t, (self.inputs, dict(self.kwargs)))
        return found[0] if found else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter, else input; float32 if there is neither."""
        found: list[torch.dtype] = []
        if self.module is not None:
            found.extend(p.dtype for p in self.module.parameters() if p.is_floating_point())
        if not found:
            map_tensors(
                lambda t: (t.is_floating_point() and found.append(t.dtype)) or t,
                (self.inputs, dict(self.kwargs)),
            )
        return found[0] if found else torch.float32

    def signature(self) -> Signature:
        """The shapes, dtypes, strides and devices of the inputs."""
        return signature(self.inputs, self.kwargs)

    def with_model(self, model: Any, inputs: tuple[Any, ...] | None = None) -> Workload:
        """The same workload with another model, which must accept the original inputs too."""
        return replace(self, model=model, inputs=self.inputs if inputs is None else inputs)

    def to(self, device: str | torch.device) -> Workload:
        """Moves the model (in place, as `nn.Module.to` does) and returns a workload on `device`.

        A loss that is an `nn.Module` is moved too; tensors that a function loss captures are not.
        """
        loss = None if self.training_step is None else self.training_step.loss
        for module in (self.module, loss):
            if isinstance(module, nn.Module):
                module.to(device)
        return replace(
            self,
            inputs=map_tensors(lambda t: t.to(device), self.inputs),
            kwargs=map_tensors(lambda t: t.to(device), dict(self.kwargs)),
        )

    def step_function(self) -> Callable[[], Any]:
        """A callable that takes one step: an inference call, or a whole training step.

        Returns:
            A function without arguments. It returns the model's output (inference, without
            gradients) or the detached loss (training). The optimizer is created here; the loader
            of a `feed` is started at the first step.
        """
        model, following = self.model, self._batches()
        if self.training_step is None:

            def infer() -> Any:
                inputs, kwargs, _ = following()
                return without_gradients(model, inputs, kwargs)

            return infer

        loss_of: Callable[..., torch.Tensor] = self.training_step.loss
        if self.feed is not None and isinstance(loss_of, Targeted):
            loss_of = loss_of.loss
        optimizer = self.training_step.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(self.untouched.parameters())

        update, compiled = self.training_step.update, self.training_step.compiled_loss
        eager = EagerStep(
            model,
            loss_of,
            optimizer,
            update=None if update is None else update(optimizer),
            compiled_loss=None if compiled is None else compiled(loss_of),
            autocast=self.training_step.autocast,
        )
        captured = self.training_step.captured
        step = eager if captured is None else captured(eager)

        def train() -> torch.Tensor:
            return step(*following())

        vars(train).update(step=step)
        return train

    def _batches(self) -> Callable[[], Batch]:
        """A function that returns the arguments of the next step."""
        own = Batch(self.inputs, dict(self.kwargs))
        if self.feed is None:
            if holds_containers((*self.inputs, *self.kwargs.values())):
                # A model may write to its containers; the next step must not see that.
                return lambda: Batch(*BorrowedArguments((own.inputs, own.kwargs)).arguments)
            return lambda: own
        return self.feed.batches(own, self.device, self.is_training).__next__


def without_gradients(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a function without recording gradients, at an eighth of the cost of `torch.no_grad`."""
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    _set_grad_enabled(False)
    try:
        return call(*args, **kwargs)
    finally:
        _set_grad_enabled(True)
