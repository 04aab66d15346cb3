"""One training step, taken apart: its passes, how far two of them are apart, and its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadytorch.runtime.agreement import norm, together, wrong_size
from steadytorch.verification.verdict import GRADIENTS, OutputError
from steadytorch.verification.verify import (
    REPEATABLE,
    Arguments,
    Value,
    call,
    copied,
    nesting,
    output_error,
    values_of,
)
from steadytorch.workload.start import Start, buffers_of, optimizer_of, parameters_of
from steadytorch.workload.workload import Workload

OUTPUTS, LOSS, BUFFERS = "outputs", "loss", "buffers"
BLEND = 0.25
"""Share of each weight that comes from the other end of its tensor, on every other input set: more
than any class rounds, so that weights which a candidate has copied show as an error."""
SMALL = 1e-2
"""Tensors below this share of the norm of all of them together are judged by that share. Gradients
that are zero but for rounding are among them, as those of a bias before a batch norm."""


class Passes(NamedTuple):
    """What one forward and backward pass gave.

    Attributes:
        returned: values that the model returned, tensors themselves.
        outputs: copies of these.
        nesting: of what it returned.
        loss: a scalar.
        gradients: by parameter, themselves; None where there is none.
        moved: how far each floating-point buffer moved.
        counted: the other buffers, as they are afterwards.
    """

    returned: list[Value]
    outputs: list[Value]
    nesting: list[str]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    moved: dict[str, Tensor]
    counted: dict[str, Tensor]

    def is_finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        held = [self.loss, *(g for g in self.gradients.values() if g is not None)]
        return all(bool(tensor.isfinite().all()) for tensor in held)


@torch.no_grad()
def begin(workload: Workload, start: Start, number: int) -> None:
    """Puts the weights as they came; for every other input set partly turned round (`BLEND`).

    Random numbers begin at a seed of the input set: whoever draws alike draws the same ones.
    """
    start.restore()
    torch.manual_seed(number)
    if number % 2:
        for tensor in parameters_of(workload).values():
            if tensor.dim() and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.copy_((1 - BLEND) * tensor + BLEND * tensor.flip(0))


def passes(workload: Workload, model: Any, arguments: Arguments, backward: bool = True) -> Passes:
    """Runs forward and backward once, from the weights as they are.

    Args:
        workload: untouched, as returned by `with_optimizer`.
        model: what to call in place of its model.
        arguments: of the call.
        backward: False for the forward pass alone, without gradients.
    """
    assert workload.training_step is not None
    parameters = parameters_of(workload)
    before = {name: buffer.clone() for name, buffer in buffers_of(workload).items()}
    for parameter in parameters.values():
        parameter.grad = None
    returned = call(model, arguments)
    outputs = copied(returned)
    loss = workload.training_step.loss(returned.result)
    if backward:
        loss.backward()
    after = {name: buffer.detach() for name, buffer in buffers_of(workload).items()}
    moving = {n for n, b in after.items() if b.is_floating_point() and n in before}
    return Passes(
        returned=[v.detach() if isinstance(v, Tensor) else v for v in values_of(returned)],
        outputs=outputs,
        nesting=nesting(returned),
        loss=loss.detach().clone(),
        gradients={name: _dense(p.grad) for name, p in parameters.items()},
        moved={name: after[name] - before[name] for name in sorted(moving)},
        counted={name: after[name].clone() for name in sorted(after.keys() - moving)},
    )


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def errors_of(found: Passes, right: Mapping[str, Any]) -> dict[str, OutputError]:
    """How far passes are from the right ones, by part of the step.

    Args:
        found: of a candidate, or of the untouched workload.
        right: what the parts are in higher precision: `outputs`, a list; `loss`; `gradients` and
            `buffers` (their movement), by name.
    """
    return {
        OUTPUTS: output_error(found.outputs, right[OUTPUTS]),
        LOSS: output_error([found.loss], [right[LOSS]]),
        GRADIENTS: _error_of_all(_present(found.gradients), _present(right[GRADIENTS])),
        BUFFERS: _error_of_all(found.moved, right[BUFFERS]),
    }


def size_fault(found: Passes, right: Mapping[str, Any]) -> str | None:
    """A gradient, or the movement of a buffer, whose size is wrong; in words, None if none."""
    expected = _present(right[GRADIENTS])
    if (wrong := wrong_size(_present(found.gradients), expected)) is not None:
        return "the gradient of {} is {:.2g} times as large as it should be".format(*wrong)
    if (wrong := wrong_size(found.moved, right[BUFFERS])) is not None:
        return "buffer {} moves {:.2g} times as far as it should".format(*wrong)
    return None


def _present(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _error_of_all(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> OutputError:
    """Of all tensors together, and of the one that is furthest off."""
    sizes = {name: norm(tensor) for name, tensor in right.items()}
    off = {name: norm(_difference(found[name], tensor)) for name, tensor in right.items()}
    whole, off_whole = together(sizes.values()), together(off.values())
    if not whole:
        return OutputError(off_whole, off_whole)
    single = [off[name] / max(size, SMALL * whole) for name, size in sizes.items()]
    return OutputError(off_whole / whole, max(single))


def _difference(one: Tensor, other: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float64)
    return one.to(wide) - other.to(wide)


def optimizer_fault(workload: Workload, step: Callable[[], Any], start: Start) -> str | None:
    """Whether a whole step, as it is timed, makes the update that its own gradients call for.

    The step is taken; then, from the same weights and state, the untouched optimizer is given the
    gradients that it left.

    Args:
        workload: untouched, as returned by `with_optimizer`.
        step: of a candidate, or its own.
        start: where it begins; it is there again in the end.
    """
    start.restore()
    parameters = parameters_of(workload)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    step()
    after = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: p.grad for name, p in parameters.items()}
    start.restore()
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    optimizer_of(workload).step()
    fault = None
    for name, parameter in parameters.items():
        due = norm(parameter.detach() - before[name])
        if not norm(after[name] - parameter.detach()) <= REPEATABLE * due:
            stays = torch.equal(after[name], before[name])
            what = (
                "leaves {} as it was"
                if stays
                else "updates {} otherwise than its gradient asks for"
            )
            fault = f"the step {what.format(name)}"
            break
    start.restore()
    return fault
