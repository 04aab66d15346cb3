"""Runs the parts of a training step: forward and backward, their errors, and the update."""

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
    Returned,
    Value,
    call,
    copied,
    nesting,
    output_error,
    values_of,
)
from steadytorch.workload.narrow_output import narrow_output
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.start import Start, buffers_of, optimizer_of, parameters_of
from steadytorch.workload.workload import Workload

OUTPUTS, LOSS, BUFFERS = "outputs", "loss", "buffers"
BLEND = 0.25
"""Share of each weight taken from its flipped tensor on every other input set. It exceeds the
rounding of any class, so that a candidate that copied weights shows an error."""
SMALL = 1e-2
"""Tensors with a norm below this share of the total are judged against this share. This covers
gradients that are zero apart from rounding, such as those of a bias before a batch norm."""
ALONG = 4.0
"""Rounding error allowed in the direction of an update, in standard errors; see `_follows`."""


class Passes(NamedTuple):
    """Results of one forward and backward pass.

    Attributes:
        returned: values that the model returned; tensors are not copied.
        outputs: copies of these values.
        nesting: nesting of the returned value.
        loss: the scalar loss.
        gradients: gradients by parameter, not copied; None if there is none.
        moved: change of each floating-point buffer.
        counted: values of the other buffers afterwards.
    """

    returned: list[Value]
    outputs: list[Value]
    nesting: list[str]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    moved: dict[str, Tensor]
    counted: dict[str, Tensor]

    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        held = [self.loss, *(g for g in self.gradients.values() if g is not None)]
        return all(bool(tensor.isfinite().all()) for tensor in held)


@torch.no_grad()
def begin(workload: Workload, start: Start, number: int) -> None:
    """Restores the start state and seeds generators; also changes the weights for odd input sets.

    For odd input sets, each weight is blended with its flipped tensor, by the share `BLEND`. The
    seed is the number of the input set, so all steps on one set draw the same random numbers.
    """
    start.restore()
    torch.manual_seed(number)
    if number % 2:
        for tensor in parameters_of(workload).values():
            if tensor.dim() and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.copy_((1 - BLEND) * tensor + BLEND * tensor.flip(0))


def passes(workload: Workload, model: Any, arguments: Arguments) -> Passes:
    """Runs one forward and one backward pass from the current weights.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`, or with a compiled loss.
        model: the model to call instead of the workload's.
        arguments: arguments of the call.
    """
    parameters = parameters_of(workload)
    before = {name: buffer.clone() for name, buffer in buffers_of(workload).items()}
    for parameter in parameters.values():
        parameter.grad = None
    returned, narrowed = _called(workload, model, arguments)
    result = returned.result if narrowed is None else returned.result.to(narrowed)
    outputs = copied(returned._replace(result=result))
    loss = _loss_of(workload, returned.result, narrowed)
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


def loss_alone(workload: Workload, model: Any, arguments: Arguments) -> Tensor:
    """Runs one forward pass from the current weights and returns the loss.

    16-bit outputs of a float32 model are converted to float32 before the loss, since bf16 resolves
    only 0.4 % of it: the slope of a U-Net's loss scattered by 7 % in 16 bits, and by 3 % when
    converted.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`, or with a compiled loss.
        model: the model to call instead of the workload's.
        arguments: arguments of the call.
    """
    returned, narrowed = _called(workload, model, arguments)
    result = returned.result
    if narrowed is None and torch.float32 in {p.dtype for p in parameters_of(workload).values()}:
        result = map_tensors(_widened, result)
    return _loss_of(workload, result, narrowed).detach()


def _called(
    workload: Workload, model: Any, arguments: Arguments
) -> tuple[Returned, torch.dtype | None]:
    """Calls the model; also returns the dtype to which a compiled loss converts its output."""
    step = workload.training_step
    assert step is not None
    with narrow_output(step.autocast and step.compiled_loss is not None) as narrow:
        return call(model, arguments), narrow.dtype


def _loss_of(workload: Workload, result: Any, narrowed: torch.dtype | None) -> Tensor:
    assert workload.training_step is not None
    loss: Callable[..., Tensor] = workload.training_step.called_loss
    return loss(result) if narrowed is None else loss(result, dtype=narrowed)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def errors_of(found: Passes, right: Mapping[str, Any]) -> dict[str, OutputError]:
    """Returns the errors of outputs, loss, gradients and buffers against a reference.

    Args:
        found: passes of a candidate or of the untouched workload.
        right: the parts in higher precision: `outputs`, a list; `loss`; `gradients` and `buffers`
            (their change), by name.
    """
    return {
        OUTPUTS: output_error(found.outputs, right[OUTPUTS]),
        LOSS: output_error([found.loss], [right[LOSS]]),
        GRADIENTS: _error_of_all(_present(found.gradients), _present(right[GRADIENTS])),
        BUFFERS: _error_of_all(found.moved, right[BUFFERS]),
    }


def size_fault(found: Passes, right: Mapping[str, Any]) -> str | None:
    """Names a gradient or buffer change of the wrong size; None if all sizes are right."""
    expected = _present(right[GRADIENTS])
    if (wrong := wrong_size(_present(found.gradients), expected)) is not None:
        return "the gradient of {} is {:.2g} times as large as it should be".format(*wrong)
    if (wrong := wrong_size(found.moved, right[BUFFERS])) is not None:
        return "buffer {} moves {:.2g} times as far as it should".format(*wrong)
    return None


def _present(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def gradient_errors(found: Passes, right: Mapping[str, Any]) -> list[float]:
    """Returns the relative L2 error of each existing gradient, in the order of parameters."""
    sizes, off = _sizes(_present(found.gradients), _present(right[GRADIENTS]))
    return [off[name] / size if size else 0.0 for name, size in sizes.items()]


def _error_of_all(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> OutputError:
    """Returns the relative error of all tensors together, and the largest for a single tensor."""
    sizes, off = _sizes(found, right)
    whole, off_whole = together(sizes.values()), together(off.values())
    if not whole:
        return OutputError(off_whole, off_whole)
    single = [off[name] / max(size, SMALL * whole) for name, size in sizes.items()]
    return OutputError(off_whole / whole, max(single))


def _sizes(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the norm of each reference tensor and the norm of its error, both by name."""
    sizes = {name: norm(tensor) for name, tensor in right.items()}
    return sizes, {name: norm(found[name], right[name]) for name in right}


def optimizer_fault(workload: Workload, step: Callable[[], Any], start: Start) -> str | None:
    """Returns how a step's weight update contradicts its gradients; None if it follows them.

    Takes the step, then gives the step's gradients to the untouched optimizer from the same weights
    and state, and compares both updates.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`.
        step: the step of a candidate, or the workload's own.
        start: state from which the step starts; restored at the end.
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
        if not _follows(before[name], after[name], parameter.detach()):
            stays = torch.equal(after[name], before[name])
            what = (
                "leaves {} unchanged"
                if stays
                else "updates {} differently than its gradient requires"
            )
            fault = f"the step {what.format(name)}"
            break
    start.restore()
    return fault


def _follows(before: Tensor, after: Tensor, expected: Tensor) -> bool:
    """Whether a weight update equals the expected update up to rounding.

    Optimizers may round weights once or after each operation, so results differ by up to a unit in
    the last place. A difference of one unit in the last place may exceed a small update. Rounding
    errors have no common direction and mostly cancel when projected onto the update, so the
    projection gets a tighter bound.
    """
    if torch.equal(after, expected):
        return True
    before, after, expected = (_real(tensor) for tensor in (before, after, expected))
    due, off = expected - before, after - expected
    size = norm(due)
    rounding = torch.finfo(before.dtype).eps * norm(before) if before.is_floating_point() else 0.0
    along = abs(float((off.double() * due.double()).sum())) / size if size else 0.0
    return (
        norm(off) <= REPEATABLE * size + rounding
        and along <= REPEATABLE * size + ALONG * rounding / max(due.numel(), 1) ** 0.5
    )


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
