"""Builds executors: callables that run a model with a candidate's transforms applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steadytorch import transforms
from steadytorch.compiled import artefact, compiler_choices
from steadytorch.compiled.artefact import Shelf
from steadytorch.compiled.compiler_choices import Choices
from steadytorch.compiled.prebuilt import Source, supplied
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.candidate import Candidate
from steadytorch.rewrite.copying import MOST_OWN_BYTES, copy_with
from steadytorch.runtime.served_inputs import (
    EXACT,
    Guarded,
    Test,
    are_finite,
    are_in_range,
    are_narrow,
)
from steadytorch.runtime.settings import setting_flags
from steadytorch.runtime.state import DRAWS, KEEPS_STATE, Draws, State
from steadytorch.transforms.base import Scoped, Transform
from steadytorch.workload.containers import BorrowedArguments
from steadytorch.workload.index_ranges import Range
from steadytorch.workload.indices import Indices, find_indices
from steadytorch.workload.signature import map_tensors, tensors_of
from steadytorch.workload.workload import TrainingStep, Workload

Call = Callable[..., Any]


@dataclass(frozen=True)
class Executor:
    """A callable that runs a model with a candidate's transforms applied.

    Attributes:
        call: has the call signature of the model.
        is_live: whether each call runs the model itself, with its current weights and modules.
        modules: the module trees that calls may run: the model, then its converted copies.
        static: arguments at fixed addresses that a call need not copy, or None.
        close: undoes all transforms.
    """

    call: Call
    is_live: bool
    modules: list[nn.Module]
    static: tuple[tuple[Any, ...], dict[str, Any]] | None
    close: Callable[[], None]


def build(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    candidate: Candidate,
    alias_outputs: bool = False,
    source: Source | None = None,
    trains: bool = False,
    pads: bool = False,
    shelf: Shelf | None = None,
    choices: Choices = compiler_choices.NONE,
) -> Executor:
    """Builds an executor that applies a candidate's transforms to a model, for these inputs.

    Args:
        model: the untouched model; it is not changed.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        candidate: the transforms in order of application.
        alias_outputs: whether outputs may be buffers that the next call overwrites.
        source: compiled code that `compile` loads instead of compiling; None to compile.
        trains: whether gradients must reach the model's own weights.
        pads: whether outputs may be padded, because only a compiled loss takes them.
        shelf: where engines find the converted model; None to convert.
        choices: what `compile` is to choose without timing.

    Raises:
        UsageError: a transform is unknown, or the transforms cannot be combined.
        UnsupportedError: a transform cannot be applied here.
    """
    if len(candidate) > len(transforms.names()) or transforms.conflict(candidate):
        raise UsageError("its transforms cannot be combined")
    parts = [part for part in map(transforms.create, candidate) if not part.of_step]
    stack = ExitStack()
    loss = _not_for_transforms if pads else None
    step = TrainingStep(_not_for_transforms, _not_for_transforms, compiled_loss=loss)
    # Transforms may run the model, which may write to containers that its caller passed.
    own_args, own_kwargs = BorrowedArguments((args, dict(kwargs))).arguments
    workload = Workload(model, own_args, own_kwargs, training_step=step if trains else None)
    grad = torch.is_grad_enabled()
    try:
        # Tensors made in the caller's inference mode could not be written to later.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(grad),
            supplied(source),
            artefact.supplied(shelf or artefact.EMPTY),
            compiler_choices.supplied(choices),
        ):
            return _apply(parts, workload, stack, alias_outputs)
    except BaseException:
        stack.close()
        raise


def _not_for_transforms(given: Any) -> Any:
    """Stands in for the loss and the optimizer, which model transforms must not call."""
    raise UsageError("the loss and the optimizer are the caller's")


def _apply(
    parts: list[Transform], workload: Workload, stack: ExitStack, alias_outputs: bool
) -> Executor:
    given, modules, is_live = workload, [workload.model], True
    flags = stack.enter_context(ExitStack())
    for part in parts:
        if part.compiles and not workload.is_training:
            workload = _with_own_buffers(workload, modules)
        before = workload.model
        workload = stack.enter_context(_applied_without_trace(part, workload, modules))
        now = workload.model
        if now is before:
            continue
        if isinstance(now, Scoped):
            # Takes effect at once, since later transforms may run the model (recording does).
            if part.process_wide:
                flags.enter_context(setting_flags())
        else:
            is_live = False
            if part.records:
                flags.close()  # replaying a graph does not run the calls that set the flags
        if isinstance(now, nn.Module):
            modules.append(now)
    call = workload.model
    static = getattr(call, "static_inputs", None)
    # `exact` skips the check of the signature, which the look-up of the entry has done.
    call = getattr(call, "aliasing" if alias_outputs else "exact", call)
    if tests := _tests(parts, given):
        call = Guarded(call, given.inputs, given.kwargs, tests)
    return Executor(call, is_live, modules, static, stack.close)


def _tests(parts: list[Transform], workload: Workload) -> list[Test]:
    """The tests that inputs of a workload must pass to be served by these transforms."""
    inputs, kwargs = workload.inputs, workload.kwargs
    tests = are_finite(inputs, kwargs) if any(part.drops_nan for part in parts) else []
    indices, narrows = Indices({}), any(part.narrows_integers for part in parts)
    if any(part.compiles or part.engine for part in parts):
        within = EXACT if narrows else None
        indices = _indices(workload.model, inputs, kwargs, workload.device, within)
    tests += are_in_range(indices)
    if narrows:
        tests += are_narrow(inputs, kwargs, indices)
    return tests


def _indices(
    model: nn.Module,
    inputs: tuple[Any, ...],
    given: Mapping[str, Any],
    device: torch.device,
    within: Range | None = None,
) -> Indices:
    """The model's indices in a call with these inputs, from a call on copies of them.

    Args:
        model: the untouched model.
        inputs: positional arguments of the call.
        given: keyword arguments of the call.
        device: device of the model.
        within: range of other integers that the call computes, or None.

    Raises:
        Exception: whatever the model raises for these inputs.
    """
    tensors = tensors_of((inputs, given))
    if not any(tensor.is_cpu for tensor in tensors):
        return Indices({})
    args, kwargs = map_tensors(torch.Tensor.clone, (inputs, dict(given)))
    copied, draws = _apart(model) or model, Draws(device)
    state = State([model], keep=True, most=MOST_OWN_BYTES)
    try:
        live = _originals(model, copied)
        tensors_now = tensors_of((args, kwargs))
        found = find_indices(lambda: copied(*args, **kwargs), tensors_now, live, within)
        return found.allowing(tensors)
    except Exception:
        copied(*args, **kwargs)  # raises, unless only the recorder is at fault
        return Indices({})
    finally:
        draws.undo()
        if state.changed():
            state.restore()


def _originals(model: nn.Module, copied: nn.Module) -> dict[int, torch.Tensor]:
    """The model's buffers and plain tensors by the `id` of their copies."""
    return {
        id(value): getattr(own, name)
        for own, other in zip(model.modules(), copied.modules(), strict=True)
        for name, value in [*other.named_buffers(recurse=False), *vars(other).items()]
        if isinstance(value, torch.Tensor)
    }


def _with_own_buffers(workload: Workload, modules: list[nn.Module]) -> Workload:
    """Copies the model and its buffers before compilation.

    A later call may take a branch that writes to buffers. The copy keeps buffer writes out of the
    caller's model.
    """
    model = workload.model
    if model is not modules[0] or not isinstance(model, nn.Module):
        return workload
    copied = _apart(model)
    if copied is None:
        return workload
    modules.append(copied)
    return workload.with_model(copied)


def _apart(model: nn.Module) -> nn.Module | None:
    """A copy of the model with its own buffers, or None if it cannot be copied."""
    try:
        return copy_with(model, lambda tensor: tensor, apart=True)
    except Exception:
        return None


@contextmanager
def _applied_without_trace(
    part: Transform, workload: Workload, modules: list[nn.Module]
) -> Iterator[Workload]:
    """Applies a transform; rejects recording, tracing or converting that changed state.

    Random numbers that were drawn meanwhile are drawn again by the first call. Python's and NumPy's
    may have become constants, so these are rejected too.
    """
    if part.records:
        state = State(modules, keep=True)
    else:  # only the caller's model is traced or converted
        state = State(modules[:1], keep=True, most=MOST_OWN_BYTES)
    if state.changed():  # at once: it cannot be compared
        raise UnsupportedError(KEEPS_STATE)
    is_applied, draws = False, Draws(workload.device)
    try:
        with part.applied(workload) as changed:
            if state.changed():
                raise UnsupportedError(KEEPS_STATE)
            if draws.on_host():
                raise UnsupportedError(DRAWS)
            is_applied = True
            if draws.happened():
                draws.undo()
            yield changed
    except BaseException:
        if not is_applied and state.changed():
            state.restore()
        if not is_applied and draws.happened():
            draws.undo()
        raise
