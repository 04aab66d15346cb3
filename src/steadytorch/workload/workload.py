"""What to run: a model, its inputs, and how one step of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from steadytorch.errors import UsageError
from steadytorch.workload.signature import Signature, map_tensors, signature

Loss = Callable[[Any], torch.Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class TrainingStep:
    """The rest of a training step: from the model's output to updated weights.

    Attributes:
        loss: maps the model's output to a scalar tensor. Targets are closed over.
        optimizer: an optimizer over the model's parameters, or a factory that makes one from them.
    """

    loss: Loss
    optimizer: torch.optim.Optimizer | OptimizerFactory


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and the inputs it is to be measured with.

    Use it as `Workload(model, inputs)` for inference and `Workload.training(...)` for training.

    Attributes:
        model: an `nn.Module`, or any callable.
        inputs: positional arguments. A lone tensor becomes a tuple of one, a mapping `kwargs`.
        kwargs: keyword arguments.
        name: what results call it; the model's class by default.
        training_step: loss and optimizer; None for inference.
        untouched: the model before any transform, when `model` is a transformed one.

    Raises:
        UsageError: the model cannot be called, or has no parameters to make an optimizer from.
    """

    model: Any
    inputs: Any = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    training_step: TrainingStep | None = None
    untouched: Any = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise UsageError(
                f"a workload needs a callable model, got {type(self.model).__name__}: "
                "pass an nn.Module, or a function of the inputs"
            )
        if isinstance(self.inputs, Mapping):
            self._set("kwargs", {**self.inputs, **self.kwargs})
            self._set("inputs", ())
        elif isinstance(self.inputs, list):
            self._set("inputs", tuple(self.inputs))
        elif not isinstance(self.inputs, tuple):
            self._set("inputs", (self.inputs,))
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
                "nn.Module as the model, or an optimizer in place of a factory"
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
        kwargs: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Workload:
        """A training workload: each step is forward, loss, backward and optimizer step.

        Args:
            model: the module to train; steps update its weights.
            inputs: positional arguments, as for an inference workload.
            loss: maps the model's output to a scalar tensor.
            optimizer: an optimizer over `model.parameters()`, or a factory of one.
            kwargs: keyword arguments of the model.
            name: what results call it.
        """
        return cls(model, inputs, kwargs or {}, name, TrainingStep(loss, optimizer))

    @property
    def is_training(self) -> bool:
        """Whether a step updates weights."""
        return self.training_step is not None

    @property
    def module(self) -> nn.Module | None:
        """The model where it is an `nn.Module`, else None."""
        return self.model if isinstance(self.model, nn.Module) else None

    @property
    def device(self) -> torch.device:
        """Where it runs: the device of the first parameter, else of the first input, else CPU."""
        found: list[torch.device] = []
        if self.module is not None:
            found.extend(p.device for p in self.module.parameters())
        if not found:
            map_tensors(lambda t: found.append(t.device) or t, (self.inputs, dict(self.kwargs)))
        return found[0] if found else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The element type it computes in: that of the first floating-point parameter or input."""
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
        """Shapes, dtypes, strides and devices of the inputs; see `signature.Signature`."""
        return signature(self.inputs, self.kwargs)

    def with_model(self, model: Any, inputs: tuple[Any, ...] | None = None) -> Workload:
        """The same workload through another callable, which must accept the original inputs too."""
        return replace(self, model=model, inputs=self.inputs if inputs is None else inputs)

    def to(self, device: str | torch.device) -> Workload:
        """Moves the model (in place, as `nn.Module.to` does) and returns a workload on `device`.

        A loss that is an `nn.Module` moves too; tensors that another loss closes over stay.
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
            A function of no arguments; it returns the model's output (inference, without recording
            gradients) or the detached loss (training). The optimizer is made once, here.
        """
        model, inputs, kwargs = self.model, self.inputs, dict(self.kwargs)
        if self.training_step is None:

            def infer() -> Any:
                with torch.no_grad():
                    return model(*inputs, **kwargs)

            return infer

        loss_of, optimizer = self.training_step.loss, self.training_step.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(self.untouched.parameters())

        def train() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(*inputs, **kwargs))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train
