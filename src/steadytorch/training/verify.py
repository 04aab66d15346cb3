"""Verifies in a worker process that a candidate trains like the untouched workload.

On each input set, outputs, loss, gradients and buffer changes are compared with the untouched step
in float64 from the same weights. Afterwards, the weight update of one timed step must follow from
the step's gradients. Updated weights are not compared, because optimizers such as Adam make
full-length steps even from gradients that are only rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadytorch.runtime.agreement import SHARED, memory_of
from steadytorch.training.passes import (
    GRADIENTS,
    Passes,
    begin,
    errors_of,
    optimizer_fault,
    passes,
    size_fault,
)
from steadytorch.training.random_steps import (
    FIRST_SEED,
    SEEDS,
    difference,
    drawing_fault,
    summaries,
)
from steadytorch.training.replays import replay_fault
from steadytorch.verification.verdict import OutputError, Verification, decide_parts, worst
from steadytorch.verification.verify import (
    detached,
    equal,
    form_fault,
    nested,
    nesting_fault,
    on_device,
)
from steadytorch.workload.start import Start, parameters_of
from steadytorch.workload.workload import Workload


def verify_training(
    model: Any,
    step: Callable[[], Any],
    workload: Workload,
    data: Mapping[str, Any],
    start: Start,
    precision: str = "same",
) -> Verification:
    """Compares a candidate's training step with the reference on every input set.

    Args:
        model: the transformed model, called like the untouched one.
        step: the step that is timed.
        workload: the untouched workload, as returned by `with_optimizer`, or with a compiled loss.
        data: the data that `training.reference.make_reference` returned; on any device.
        start: state from which each pass starts; restored at the end.
        precision: the candidate's precision class.
    """
    if data["fault"] is not None:
        return Verification(None, data["fault"])
    errors: list[dict[str, OutputError]] = []
    before: Passes | None = None
    for number in range(len(data["sets"])):
        begin(workload, start, number)
        due = _Due(workload, data, number)
        found = passes(workload, model, nested(workload, due.inputs))
        fault = due.fault(found) or (None if before is None else _overwritten(before, found))
        if fault is not None:
            return Verification(None, fault)
        errors.append(errors_of(found, due.right))
        before = found
    fault = optimizer_fault(workload, step, start) if data["steps"] else None
    if fault is not None:
        return Verification(None, fault)
    if (fault := replay_fault(workload, step, start)) is not None:
        return Verification(None, fault)
    parts = {part: worst(found[part] for found in errors) for part in errors[0]}
    found = Verification(worst(parts.values()), None, parts)
    if data["draws"] is None:
        return found
    return _with_draws(found, model, workload, data, start, precision)


def _with_draws(
    found: Verification,
    model: Any,
    workload: Workload,
    data: Mapping[str, Any],
    start: Start,
    precision: str,
) -> Verification:
    """Compares a step that draws random numbers with the reference, as distributions if needed.

    A step that draws the same random numbers as the untouched step has already been compared
    exactly.
    """
    arguments = nested(workload, detached(on_device(data["sets"][0], workload)))
    if (fault := drawing_fault(workload, model, arguments, start)) is not None:
        return Verification(None, fault)
    explained = {part: OutputError(*both) for part, both in data["explained"][precision].items()}
    if decide_parts(found.parts, explained, precision) is None:
        return found
    rounding = data["rounding"]
    sample = summaries(workload, model, arguments, start, rounding["bf16"], FIRST_SEED + SEEDS)
    p_value, differs = difference(sample, data["draws"], precision, rounding[precision])
    return Verification(found.error, None, found.parts, p_value, differs)


class _Due:
    """The expected results of a training step on one input set.

    Args:
        workload: the workload, with its weights before the passes.
        data: the data that `make_reference` returned.
        number: number of the input set.
    """

    def __init__(self, workload: Workload, data: Mapping[str, Any], number: int) -> None:
        def here(part: str) -> Any:
            return on_device(data[part][number], workload)

        self.inputs: list[Tensor] = detached(here("sets"))
        self.right: dict[str, Any] = here("right")
        self._given = detached(self.inputs)
        self._own, self._counted = here("own"), here("counted")
        self._nesting = data["nesting"][number]
        step = workload.training_step
        self._strides = step is None or step.compiled_loss is None  # or outputs may be padded
        self._draws = data["draws"] is not None
        self._parameters = parameters_of(workload)
        self._weights = detached(self._parameters.values())

    def fault(self, found: Passes) -> str | None:
        """Returns a fault other than numerical error, such as a write to an input, or None."""
        return (
            form_fault(found.outputs, self._own)
            or self._odd(found)
            or self._gradient_fault(found.gradients)
            # Other random numbers may change sizes: those are compared as distributions.
            or (None if self._draws else size_fault(found, self.right))
        )

    def _odd(self, found: Passes) -> str | None:
        if (fault := nesting_fault(found.nesting, self._nesting, self._strides)) is not None:
            return fault
        if not equal(self._given, self.inputs):
            return "writes to its inputs"
        for before, (name, now) in zip(self._weights, self._parameters.items(), strict=True):
            if not torch.equal(before, now):
                return f"writes to {name}, which only the optimizer may update"
        for name, expected in self._counted.items():
            if name not in found.counted or not torch.equal(found.counted[name], expected):
                return f"buffer {name} differs from the untouched workload's"
        return None if found.loss.isfinite() else "the loss is not finite"

    def _gradient_fault(self, gradients: Mapping[str, Tensor | None]) -> str | None:
        for name, expected in self.right[GRADIENTS].items():
            gradient = gradients[name]
            if gradient is None or expected is None:
                if gradient is not expected:
                    return f"{'gives no' if gradient is None else 'gives a'} gradient to {name}"
            elif not gradient.isfinite().all():
                kind = "NaN" if gradient.isnan().any() else "infinity"
                return f"the gradient of {name} holds {kind}"
        return None


def _overwritten(before: Passes, found: Passes) -> str | None:
    """Whether later passes overwrote the results of earlier passes, as text; None if not."""
    if not equal(before.outputs, before.returned):
        return SHARED
    if memory_of(before.gradients) & memory_of(found.gradients):
        return "a later step overwrites the gradients of an earlier one"
    return None
