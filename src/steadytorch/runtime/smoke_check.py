"""Compares the first step of a training plan in this process with the untouched model.

Tuning has already verified the plan's numerical results. The smoke check verifies that the executor
built in this process trains this model. Without the smoke check, backward exceptions would reach
the caller, and wrong gradients would go unnoticed. Backward passes with `retain_graph` or
`create_graph` are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from steadytorch.errors import one_line
from steadytorch.runtime.agreement import SIZES, disagreement, norm, together, wrong_size
from steadytorch.runtime.executors import Executor
from steadytorch.runtime.faults import is_callers
from steadytorch.runtime.lending import lending
from steadytorch.runtime.state import Draws, State
from steadytorch.workload.narrow_output import narrow_output
from steadytorch.workload.signature import map_tensors, tensors_of

RESEMBLES = 0.5
"""Allowed relative L2 error of outputs in training mode. Rounding to bf16 gave up to 0.2; other
weights give 1 and more."""


class _Passes(NamedTuple):
    """The results of one forward and one backward pass.

    Attributes:
        outputs: the outputs, with pending writes to containers.
        gradients: gradients of the parameters by name.
        moved: changes of the floating-point buffers by name.
        counts: values of the other buffers by name.
    """

    outputs: Any
    gradients: dict[str, Tensor | None]
    moved: dict[str, Tensor]
    counts: dict[str, Tensor]


class TrainingSmokeCheck:
    """Runs one forward and backward pass of the executor and of the model, and compares them.

    Restores the state afterwards.

    In place of a loss, the check uses a sum of the outputs with random weights. The check does not
    accumulate into the parameters' `grad`. Module and tensor hooks run during the check as in any
    call.

    Args:
        model: the untouched model.
        executor: the plan's executor, on the model's own weights.
        device: the device of both.
        pads: whether outputs may have other strides than the model's.
    """

    def __init__(
        self, model: nn.Module, executor: Executor, device: torch.device, pads: bool = False
    ) -> None:
        self._model, self._executor, self._device, self._pads = model, executor, device, pads

    def fault(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Returns why the executor failed the check, or None if it passed.

        Args:
            args: positional arguments of a call.
            kwargs: keyword arguments of the call.
        """
        draws = Draws(self._device)
        try:
            expected = self._passes(self._model, args, kwargs)
        except Exception as error:  # the caller's own step may still succeed
            if is_callers(error, self._executor.modules, is_live=True):
                raise
            return f"a test step of the untouched model raised {one_line(error)}"
        drawn = draws.happened()
        draws.undo()  # the same numbers for both
        try:
            found = self._passes(self._executor.call, args, kwargs)
        except Exception as error:
            if is_callers(error, self._executor.modules, self._executor.is_live):
                raise
            return f"its first step raised {one_line(error)}"
        finally:
            redrawn = draws.happened()
            draws.undo()
        if redrawn is not drawn:
            both = ("its executor", "the model")
            one, other = both if redrawn else both[::-1]
            return f"{one} draws random numbers, and {other} does not"
        fault = _difference(found, expected, strides=not self._pads)
        # Other layouts and compiled code draw other numbers: sizes are all that can be compared.
        return fault if fault is None or not drawn else _size_difference(found, expected)

    def _passes(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Passes:
        # The innermost hooks win. The caller's, such as those of activation checkpointing, are made
        # for one pass only.
        with saved_tensors_hooks(_identity, _identity), narrow_output(allowed=False):
            return self._unhooked_passes(call, args, kwargs)

    def _unhooked_passes(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Passes:
        state = State([self._model, *self._executor.modules], keep=True)
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        try:
            made = lending(call)(*args, **kwargs)
            outputs = made.result, made.written
            gradients = self._gradients(tensors_of(made.result))
            after = dict(self._model.named_buffers())
            floats = {name: b for name, b in after.items() if b.is_floating_point()}
            moved = {name: buffer - before[name] for name, buffer in floats.items()}
            counts = {name: b.clone() for name, b in after.items() if name not in floats}
        finally:
            state.restore()
        return _Passes(map_tensors(torch.Tensor.detach, outputs), gradients, moved, counts)

    def _gradients(self, outputs: list[Tensor]) -> dict[str, Tensor | None]:
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if not roots or not named:
            return dict.fromkeys(named)
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.rand(root.shape, generator=generator).to(root.device, root.dtype)
            for root in roots
        ]
        found = torch.autograd.grad(roots, list(named.values()), weights, allow_unused=True)
        return dict(zip(named, found, strict=True))


def _identity(saved: Tensor) -> Tensor:
    return saved


def _difference(found: _Passes, expected: _Passes, strides: bool) -> str | None:
    reason = disagreement(found.outputs, expected.outputs, RESEMBLES, strides)
    if reason is not None:
        return f"wrong: {reason}"
    for name, gradient in expected.gradients.items():
        if (gradient is None) is not (found.gradients[name] is None):
            return f"wrong: gives {name} {'a' if gradient is None else 'no'} gradient"
    for what, one, other in (
        ("the gradient of {}", _present(found.gradients), _present(expected.gradients)),
        ("the movement of buffer {}", found.moved, expected.moved),
    ):
        if found.moved.keys() != expected.moved.keys():
            return "wrong: has other floating-point buffers than the model"
        if (wrong := wrong_size(one, other)) is not None:
            return f"wrong: {what.format(wrong[0])} is {wrong[1]:.2g} times as large"
    for name, count in expected.counts.items():
        if not torch.equal(found.counts[name], count):
            return f"wrong: buffer {name} differs from the model's"
    return None


def _size_difference(found: _Passes, expected: _Passes) -> str | None:
    for name, gradient in expected.gradients.items():
        if (gradient is None) is not (found.gradients[name] is None):
            return f"wrong: gives {name} {'a' if gradient is None else 'no'} gradient"
    found_all, expected_all = (
        together(map(norm, _present(passes.gradients).values())) for passes in (found, expected)
    )
    if expected_all and not SIZES[0] <= found_all / expected_all <= SIZES[1]:
        return f"wrong: its gradients are {found_all / expected_all:.2g} times as large"
    return None


def _present(gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: g.to_dense() for name, g in gradients.items() if g is not None}
