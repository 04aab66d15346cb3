"""Building the executor of a candidate, and what must be known of it to serve it safely."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steadytorch import transforms
from steadytorch.compiled.prebuilt import Source, supplied
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.candidate import Candidate
from steadytorch.rewrite.copying import copy_with
from steadytorch.runtime.settings import setting_flags
from steadytorch.runtime.state import KEEPS_STATE, State
from steadytorch.transforms.base import Scoped, Transform
from steadytorch.workload.containers import Lent
from steadytorch.workload.workload import TrainingStep, Workload

Call = Callable[..., Any]


@dataclass(frozen=True)
class Executor:
    """A candidate, live.

    Attributes:
        call: takes what the model takes.
        is_live: whether each call runs the model itself, with its weights and modules as they are.
        modules: the module trees that calls may run: the model, and its converted copies.
        static: arguments at fixed addresses that a call need not copy, or None.
        close: undoes everything.
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
) -> Executor:
    """Applies a candidate to the model for the inputs at hand.

    Args:
        model: the untouched model; it is left as it was found.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        candidate: transforms in the order of their application.
        alias_outputs: whether outputs may be the buffers that the next call overwrites.
        source: of what `compile` is to take instead of compiling; None for none.
        trains: whether gradients of the model's own weights are to flow through calls.

    Raises:
        UsageError: the transforms are unknown or cannot be combined.
        UnsupportedError: one of them cannot be applied here.
    """
    if len(candidate) > len(transforms.names()) or transforms.conflict(candidate):
        raise UsageError("its transforms cannot be combined")
    parts = [part for part in map(transforms.create, candidate) if not part.of_step]
    stack = ExitStack()
    step = TrainingStep(_of_the_caller, _of_the_caller) if trains else None
    # Transforms may run the model, which may write to containers that its caller passed.
    own_args, own_kwargs = Lent((args, dict(kwargs))).arguments
    workload = Workload(model, own_args, own_kwargs, training_step=step)
    grad = torch.is_grad_enabled()
    try:
        # In the caller's inference mode, tensors that are made here could not be written to later.
        with torch.inference_mode(False), torch.set_grad_enabled(grad), supplied(source):
            return _apply(parts, workload, stack, alias_outputs)
    except BaseException:
        stack.close()
        raise


def _of_the_caller(given: Any) -> Any:
    """Stands for the loss and the optimizer, which no transform of the model looks at."""
    raise UsageError("the loss and the optimizer are the caller's")


def _apply(
    parts: list[Transform], workload: Workload, stack: ExitStack, alias_outputs: bool
) -> Executor:
    modules, is_live = [workload.model], True
    flags = stack.enter_context(ExitStack())
    for part in parts:
        if part.compiles and not workload.is_training:
            workload = _apart(workload, modules)
        before = workload.model
        workload = stack.enter_context(_unremembered(part, workload, modules))
        now = workload.model
        if now is before:
            continue
        if isinstance(now, Scoped):
            # At once: what follows may run it, to record it for example.
            if part.process_wide:
                flags.enter_context(setting_flags())
        else:
            is_live = False
            if part.records:
                flags.close()  # a recorded graph is replayed without the calls that were recorded
        if isinstance(now, nn.Module):
            modules.append(now)
    call = workload.model
    static = getattr(call, "static_inputs", None)
    # Entries are found by signature: none is called with another than it was built for.
    call = getattr(call, "aliasing" if alias_outputs else "exact", call)
    return Executor(call, is_live, modules, static, stack.close)


def _apart(workload: Workload, modules: list[nn.Module]) -> Workload:
    """What is to be compiled, with buffers that are not the model's.

    Compiled code stands for one way through the model. Where a call takes another, what the model
    keeps between calls may have been written to before that is found out.
    """
    model = workload.model
    if model is not modules[0] or not isinstance(model, nn.Module):
        return workload
    try:
        copied = copy_with(model, lambda tensor: tensor, apart=True)
    except Exception:  # it holds what cannot be copied
        return workload
    modules.append(copied)
    return workload.with_model(copied)


@contextmanager
def _unremembered(
    part: Transform, workload: Workload, modules: list[nn.Module]
) -> Iterator[Workload]:
    """Applies a transform; recording runs the model a few times, which it must not remember."""
    state = State(modules, keep=True) if part.records else None
    with part.applied(workload) as changed:
        if state is not None and state.changed():
            state.restore()
            raise UnsupportedError(KEEPS_STATE)
        yield changed
