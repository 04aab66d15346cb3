"""Computes the reference for training candidates: accurate results, and error bounds.

The error bounds of training candidates depend on the workload. In a network with kinks (ReLU,
max-pooling), gradients jump when rounding moves an activation across a kink, and batch
normalisation spreads the effect. Between equally good float32 programs, gradients of a ResNet-50
differ by percents, and gradients of a vision transformer by millionths. Therefore the untouched
step is also run with noise: weights, inputs, layer outputs and their gradients are perturbed by the
rounding error of each precision class. The resulting errors are explained by rounding (an empirical
backward error analysis), and they bound the errors of candidates in that class.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from steadytorch.errors import first_line
from steadytorch.runtime.agreement import ROUNDING
from steadytorch.runtime.state import Draws
from steadytorch.training.passes import (
    BUFFERS,
    GRADIENTS,
    LOSS,
    OUTPUTS,
    Passes,
    begin,
    errors_of,
    gradient_errors,
    optimizer_fault,
    passes,
)
from steadytorch.training.random_steps import summaries
from steadytorch.verification.verdict import (
    STEP_FACTOR,
    UNREPEATABLE,
    OutputError,
    Reference,
    worst,
)
from steadytorch.verification.verify import (
    REPEATABLE,
    Arguments,
    fresh_inputs,
    in_float64,
    widening,
    without_tf32,
)
from steadytorch.workload.signature import map_tensors, tensors_of
from steadytorch.workload.start import Start, modules_of, parameters_of
from steadytorch.workload.workload import TrainingStep, Workload

INPUT_SETS = 2
"""Input sets per step: the second has other inputs, and other weights too (see `passes.begin`), so
that a candidate that kept either fails."""
MOST_DRAWS, NUMBERS = 16, 1_000_000
"""Draws of noise for each size and input set: as many as perturb this many numbers in all, up to
the first limit. In a large network each draw moves activations across kinks. In a small one most
draws move none, and one that does may change a gradient by a third."""
COARSER = frozenset(ROUNDING.values())
"""Noise of the lower classes, from which that of class `same` is extrapolated."""
OWN_ROUNDING = {
    torch.float64: 2.0**-49,
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""Relative noise of class `same`, by dtype.

For float32 and float64: 16 unit roundoffs, the typical error of summing a few hundred terms one by
one. It grows with the square root of their number (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019). 16-bit products are summed in float32 and rounded
once."""
_NOT_FINITE = "cannot be verified: loss or gradients of the untouched workload are not finite"

Parts = dict[str, OutputError]


def make_reference(workload: Workload, seed: int, start: Start) -> tuple[dict[str, Any], Reference]:
    """Runs the untouched step at its own precision, at higher precision, and with noise.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`.
        seed: seed of inputs and noise.
        start: state from which each pass starts; restored at the end.

    Returns:
        The data for comparing candidates, to be saved for the workers; and the summary for the
        parent.
    """
    before = Draws(workload.device)
    sets, own, unfit = _own(workload, seed, start)
    again, draws = _again(workload, start, sets[0])
    higher = _higher(workload, start, sets, draws)
    right = [_right(found, workload) for found in higher.runs]
    errors = [errors_of(found, parts) for found, parts in zip(own, right, strict=True)]
    explained, rounding = _explained(workload, seed, start, sets, right, errors, draws)
    noise = errors_of(again, _right(own[0], workload))
    repeats = is_repeatable(
        noise, explained["same"], lambda: errors_of(higher.take(0, sets[0]), right[0])
    )
    finite = all(found.is_finite() for found in own)
    fault = optimizer_fault(workload, workload.step_function(), start)
    data = {
        "sets": [tensors_of(arguments) for arguments in sets],
        "right": right,
        "own": [found.outputs for found in own],
        "nesting": [found.nesting for found in own],
        "counted": [found.counted for found in own],
        "fault": _NOT_FINITE if not finite else None if repeats else UNREPEATABLE,
        "steps": fault is None,
        "explained": {
            name: {part: (error.relative_l2, error.relative_max) for part, error in parts.items()}
            for name, parts in explained.items()
        },
        "rounding": rounding,
        "draws": summaries(workload, workload.model, sets[0], start, rounding["bf16"])
        if draws
        else None,
    }
    before.undo()
    notes = [
        unfit,
        higher.problem,
        f"rounding alone moves gradients by {explained['same'][GRADIENTS].relative_l2:.0e}",
        "" if fault is None else "updates were not compared: the optimizer is not repeatable",
    ]
    return data, Reference(
        error=worst(worst(parts.values()) for parts in errors),
        precision=higher.precision,
        repeatable=repeats,
        fresh=not unfit,
        note="; ".join(filter(None, notes)),
        explained=explained,
        draws=draws,
    )


def _again(workload: Workload, start: Start, arguments: Arguments) -> tuple[Passes, bool]:
    """Repeats the first passes; also returns whether these draw random numbers."""
    begin(workload, start, 0)
    drawn = Draws(workload.device)
    found = passes(workload, workload.model, arguments)
    return found, drawn.happened()


def _own(workload: Workload, seed: int, start: Start) -> tuple[list[Arguments], list[Passes], str]:
    """Returns input sets, untouched passes on them, and the reason if inputs are not random."""
    sets = [fresh_inputs(workload, seed + i) for i in range(INPUT_SETS)]
    try:
        return sets, [_from(workload, start, i, given) for i, given in enumerate(sets)], ""
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        note = f"random inputs do not fit ({first_line(error, 120)}), used the given ones"
        sets = [(workload.inputs, dict(workload.kwargs))] * 2
        return sets, [_from(workload, start, i, given) for i, given in enumerate(sets)], note


def _from(workload: Workload, start: Start, number: int, arguments: Arguments) -> Passes:
    begin(workload, start, number)
    return passes(workload, workload.model, arguments)


class _Higher(NamedTuple):
    """Passes at a higher precision, a function for more of them, and why not in float64."""

    runs: list[Passes]
    take: Callable[[int, Arguments], Passes]
    precision: str
    problem: str


def _higher(workload: Workload, start: Start, sets: Sequence[Arguments], draws: bool) -> _Higher:
    without_tf32()
    if draws:  # float64 would draw other numbers
        take = partial(_from, workload, start)
        runs = [take(i, given) for i, given in enumerate(sets)]
        return _Higher(runs, take, "float32", "the step draws random numbers")
    precision, problem = "float64", ""

    def take(number: int, arguments: Arguments) -> Passes:
        return in_float64(partial(_widened, workload, start, number, arguments))

    try:
        runs = [take(i, given) for i, given in enumerate(sets)]
    except (RuntimeError, TypeError, ValueError) as error:
        take, precision = partial(_from, workload, start), "float32"
        problem = f"float64 cannot run ({first_line(error, 120)})"
        runs = [take(i, given) for i, given in enumerate(sets)]
    return _Higher(runs, take, precision, problem)


def is_repeatable(noise: Parts, explained: Parts, precise: Callable[[], Parts]) -> bool:
    """Whether the workload is deterministic up to rounding.

    Two passes may differ because the workload draws random numbers, or because rounding varies
    between runs. At a higher precision, passes differ by more than rounding only if the workload is
    random.

    Args:
        noise: difference of two passes at the workload's own precision.
        explained: errors that rounding explains.
        precise: returns the difference of two passes at the higher precision.
    """
    if not any(error.relative_l2 for error in noise.values()):
        return True
    if any(e.relative_l2 > STEP_FACTOR * explained[part].relative_l2 for part, e in noise.items()):
        return False
    found = precise()
    return all(found[part].relative_l2 <= REPEATABLE for part in (OUTPUTS, GRADIENTS))


def _widened(workload: Workload, start: Start, number: int, arguments: Arguments) -> Passes:
    """Runs forward and backward on a copy of the workload in float64.

    Raises:
        RuntimeError: float64 fails, or the loss reads the weights of the original model.
    """
    assert workload.training_step is not None
    widen = widening(torch.float64)
    begin(workload, start, number)
    step = workload.training_step
    model, loss, optimizer = copy.deepcopy((workload.untouched, step.loss, step.optimizer))
    copied = replace(
        workload, model=model, untouched=model, training_step=TrainingStep(loss, optimizer)
    )
    for module in modules_of(copied).values():
        module._apply(widen)
    for tensor in parameters_of(copied).values():
        tensor.data = widen(tensor.data)
    found = passes(copied, model, map_tensors(widen, arguments))
    if any(tensor.grad is not None for tensor in parameters_of(workload).values()):
        raise RuntimeError("the loss reads the weights of the model")
    return found


def _right(found: Passes, workload: Workload) -> dict[str, Any]:
    """Returns the results that candidates must match; gradients in float32 to save memory."""
    narrow = widening(torch.promote_types(workload.dtype, torch.float32))
    return {
        OUTPUTS: found.outputs,
        LOSS: found.loss,
        GRADIENTS: {n: None if g is None else narrow(g) for n, g in found.gradients.items()},
        BUFFERS: found.moved,
    }


def _explained(
    workload: Workload,
    seed: int,
    start: Start,
    sets: Sequence[Arguments],
    right: Sequence[Mapping[str, Any]],
    errors: Sequence[Parts],
    draws: bool,
) -> tuple[dict[str, Parts], dict[str, list[float]]]:
    """Returns errors that rounding explains, by precision class, per part of the step and gradient.

    Errors per gradient are empty unless the step draws random numbers, because only `random_steps`
    uses them.
    """

    def noisy(size: float) -> tuple[Parts, list[float]]:
        parts, by_gradient = [], []
        for number, expected in enumerate(right):
            perturbed = 0
            for draw in range(MOST_DRAWS):
                begin(workload, start, number)
                noise = _Noise(workload.device, size, seed + number + len(right) * draw)
                found = _noisy(workload, sets[number], noise)
                parts.append(errors_of(found, expected))
                by_gradient.append(gradient_errors(found, expected) if draws else [])
                perturbed += noise.numbers
                if perturbed >= NUMBERS:
                    break
        return _worst_parts(parts), [max(each) for each in zip(*by_gradient, strict=True)]

    own = OWN_ROUNDING.get(workload.dtype, ROUNDING["bf16"])
    found = {size: noisy(size) for size in {own, *COARSER}}
    fine, coarse = (found[size][0][GRADIENTS] for size in (min(COARSER), max(COARSER)))
    growth = growth_of({min(COARSER): fine.relative_l2, max(COARSER): coarse.relative_l2}, own)
    most = OutputError(fine.relative_l2 * growth, fine.relative_max * growth)
    same = _worst_parts([*errors, found[own][0]])
    same[GRADIENTS] = worst([same[GRADIENTS], most])
    rounding = {name: found[size][1] for name, size in ROUNDING.items()}
    rounding["same"] = [
        max(run, growth * error)
        for run, error in zip(found[own][1], found[min(COARSER)][1], strict=True)
    ]
    lower = {name: _worst_parts([same, found[size][0]]) for name, size in ROUNDING.items()}
    return {"same": same, **lower}, rounding


def growth_of(errors: Mapping[float, float], size: float) -> float:
    """Returns the factor by which the gradient error changes from the finer noise to noise `size`.

    With float32 rounding, only a few among millions of activations cross a kink. A single
    activation that crosses a kink can cause most of the gradient error, so a few runs may miss it.
    Coarse noise moves thousands of activations across kinks. The gradient error grows linearly with
    the noise for smooth gradients, and with its square root if kink crossings cause the error.
    """
    fine, coarse = sorted(errors)
    ratio = errors[coarse] / (errors[fine] or math.inf)
    power = min(1.0, max(0.5, math.log(ratio or 1.0) / math.log(coarse / fine)))
    return (size / fine) ** power


def _worst_parts(found: Sequence[Parts]) -> Parts:
    most = {part: worst(parts[part] for parts in found) for part in found[0]}
    # A scalar's error may be small by chance; the loss follows from the outputs, so use theirs too.
    return most | {LOSS: worst([most[LOSS], most[OUTPUTS]])}


class _Noise:
    """Multiplies tensors by random numbers in (1 - size, 1 + size), and counts their numbers."""

    def __init__(self, device: torch.device, size: float, seed: int) -> None:
        self.numbers = 0
        self._size = size
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        self.numbers += tensor.numel()
        kind = tensor.dtype.to_real()
        draws = torch.rand(
            tensor.shape, generator=self._generator, device=tensor.device, dtype=kind
        )
        return tensor * draws.mul_(2 * self._size).add_(1 - self._size)


def _noisy(workload: Workload, arguments: Arguments, noise: _Noise) -> Passes:
    """Runs passes with noise on weights, inputs and layer outputs."""
    with torch.no_grad():
        for tensor in parameters_of(workload).values():
            tensor.copy_(noise(tensor))
    with _changing_outputs(noise):
        return passes(workload, workload.model, map_tensors(noise, arguments))


@contextmanager
def _changing_outputs(noise: _Noise) -> Iterator[None]:
    """Applies noise to the outputs of leaf modules, and to their gradients in the backward pass."""

    def both(tensor: Tensor) -> Tensor:
        changed = noise(tensor)
        if changed.requires_grad:
            changed.register_hook(noise)
        return changed

    def changed(module: nn.Module, arguments: Any, output: Any) -> Any:
        return None if module._modules else map_tensors(both, output)

    handle = register_module_forward_hook(changed)
    try:
        yield
    finally:
        handle.remove()
