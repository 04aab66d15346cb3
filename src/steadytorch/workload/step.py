"""One training step as PyTorch users write it: forward, loss, backward, clipping, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadytorch.workload.compiled_loss import CompiledLoss
from steadytorch.workload.narrow_output import narrow_output
from steadytorch.workload.update import Update


class EagerStep:
    """A training step in eager mode, called once per micro-batch.

    Args:
        model: called with the inputs.
        loss: maps the model's output and the targets to a scalar.
        optimizer: the caller's optimizer; it may hold parameters of the loss as well.
        update: implementation of the optimizer's step; None for the optimizer's own.
        compiled_loss: the compiled form of the loss; None to call the loss itself.
        autocast: whether the model runs under autocast, and may leave the conversion of its output
            to a compiled loss.
        clip: maximum norm of all gradients together; None to disable clipping.
        accumulate: number of micro-batches whose mean gradient one update uses.
        scaler: a `torch.amp.GradScaler`; None to disable gradient scaling.

    Attributes:
        turn: micro-batches since the last update.
        inspect: called with each loss before its backward pass; None to call nothing.
        norm: gradient norm before the last clipping, on the device; None without clipping.
    """

    def __init__(
        self,
        model: Any,
        loss: Callable[..., Tensor],
        optimizer: Optimizer,
        *,
        update: Update | None = None,
        compiled_loss: CompiledLoss | None = None,
        autocast: bool = False,
        clip: float | None = None,
        accumulate: int = 1,
        scaler: Any = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.update = update or Update(optimizer)
        self.compiled_loss, self._autocast = compiled_loss, autocast
        self.clip, self.accumulate, self.scaler = clip, accumulate, scaler
        self.turn = 0
        self.inspect: Callable[[Tensor], None] | None = None
        self.norm: Tensor | None = None

    def __call__(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> Tensor:
        """Processes one micro-batch, and takes the optimizer's step if it completes a batch.

        Returns:
            The loss of the micro-batch, detached.
        """
        loss = self.backward(inputs, kwargs, targets)
        self.turn += 1
        if self.turn == self.accumulate:
            self.turn = 0
            self.advance()
        return loss

    def backward(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> Tensor:
        """Runs forward and backward on a micro-batch.

        Before the first micro-batch of a batch, the gradients are cleared.

        Returns:
            The loss of the micro-batch, detached.
        """
        if self.turn == 0:
            self.optimizer.zero_grad()
        if self.compiled_loss is None:
            loss = self.loss(self.model(*inputs, **kwargs), *targets)
        else:
            with narrow_output(self._autocast) as narrow:
                output = self.model(*inputs, **kwargs)
            loss = self.compiled_loss(output, *targets, dtype=narrow.dtype)
        if self.inspect is not None:
            self.inspect(loss)
        share = loss if self.accumulate == 1 else loss / self.accumulate
        (share if self.scaler is None else self.scaler.scale(share)).backward()
        return loss.detach()

    def advance(self, rates: list[Tensor] | None = None) -> None:
        """Clips the gradients and takes the optimizer's step.

        Args:
            rates: as for `Update`.
        """
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        if self.scaler is None:
            self.update(rates)
            return
        with self.update.switched():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def parameters(self) -> list[Tensor]:
        """The parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]
