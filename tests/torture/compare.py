"""What a caller can see of a call, and where two calls differ in it."""

from __future__ import annotations

import io
import os
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from steadytorch.workload.signature import strides_of

BOUNDS = {"same": 1e-4, "tf32": 5e-3, "fp16": 6e-2, "bf16": 0.15}
"""Relative error of each output by the precision class of the candidate."""


FORK_S = 60
"""For the answer of a forked child; one that hangs is a fault."""


def _threaded(call: Callable[[], Any]) -> Any:
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append((call(), None))
        except Exception as error:
            answers.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((result, error),) = answers
    if error is not None:
        raise error
    return result


def _forked(call: Callable[[], Any]) -> Any:
    """The tensors that a forked child got, as one list."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # as DataLoader's workers do: OpenMP's threads are gone
            file = io.BytesIO()
            torch.save([t.clone() for t in pytree.tree_leaves(call()) if torch.is_tensor(t)], file)
            with os.fdopen(theirs, "wb") as pipe:
                pipe.write(file.getvalue())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as pipe:
            if not select.select([pipe], [], [], FORK_S)[0]:
                raise TimeoutError("the forked child hangs")
            return torch.load(io.BytesIO(pipe.read()))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _lazy(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values that is to be negated when it is read."""
    return torch._neg_view(-x)


class Way(NamedTuple):
    """How a call is made.

    Attributes:
        mode: entered around it.
        run: what makes it.
        given: what becomes of the tensor that is passed.
    """

    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad
    run: Callable[[Callable[[], Any]], Any] = lambda call: call()
    given: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


WAYS = {
    "plain": Way(),
    "recording gradients": Way(mode=nullcontext),
    "in inference mode": Way(mode=torch.inference_mode),
    "under autocast": Way(mode=lambda: torch.autocast("cpu", torch.bfloat16)),
    "for the input's gradient": Way(nullcontext, given=lambda x: x.requires_grad_()),
    "in a thread": Way(run=_threaded),
    "in a forked child": Way(run=_forked),
    "with a negated view": Way(given=_lazy),
}
"""Forks are for the CPU alone."""


class Seen(NamedTuple):
    """What one call showed.

    Attributes:
        result: what it returned; None where it raised.
        error: type and text of what it raised.
        box: the container it was given, afterwards.
        x: the tensor it was given, afterwards.
        settings: what of the process a call must leave alone.
        drawn: the state of the random number generator.
        collected: by the caller's hook, in this call.
    """

    result: Any
    error: tuple[str, str] | None
    box: Any
    x: torch.Tensor
    settings: tuple[Any, ...]
    drawn: torch.Tensor
    collected: list[torch.Tensor]


def seen(
    call: Callable[..., Any], x: torch.Tensor, box: Any, way: Way, collected: list[torch.Tensor]
) -> Seen:
    """Makes a call and notes what it showed."""
    collected.clear()
    try:
        with way.mode():
            result, error = way.run(lambda: call(way.given(x), box)), None
    except Exception as raised:
        result, error = None, (type(raised).__name__, str(raised))
    settings = (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )
    return Seen(result, error, box, x, settings, torch.get_rng_state(), list(collected))


def difference(found: Seen, expected: Seen, precision: str, count_hooks: bool = True) -> str | None:
    """Where two calls differ for their caller; None where they do not.

    Args:
        found: the tuned module's.
        expected: the untouched model's.
        precision: class of the candidate.
        count_hooks: whether hooks must have run as often.
    """
    if found.error != expected.error:
        return f"raised {found.error}, expected {expected.error}"
    for name in ("settings",):
        if getattr(found, name) != getattr(expected, name):
            return f"{name}: {getattr(found, name)}, expected {getattr(expected, name)}"
    if not torch.equal(found.drawn, expected.drawn):
        return "random numbers were drawn"
    if not torch.equal(found.x, expected.x) or found.x.stride() != expected.x.stride():
        return "the input was written to"
    if found.x.requires_grad and _traced(found.result) != _traced(expected.result):
        return "other outputs have gradients of the input"
    for name in ("result", "box", *(["collected"] if count_hooks else [])):
        fault = _tree_fault(getattr(found, name), getattr(expected, name), BOUNDS[precision])
        if fault is not None:
            return f"{name}: {fault}"
    return None


def _traced(result: Any) -> list[bool]:
    return [t.requires_grad for t in pytree.tree_leaves(result) if torch.is_tensor(t)]


def _tree_fault(found: Any, expected: Any, bound: float) -> str | None:
    if type(found) is not type(expected):
        return f"is a {type(found).__name__}, expected a {type(expected).__name__}"
    leaves, structure = pytree.tree_flatten(found)
    due, wanted = pytree.tree_flatten(expected)
    if structure != wanted:
        return f"is nested as {structure}, expected {wanted}"
    for i, (one, other) in enumerate(zip(leaves, due, strict=True)):
        if (fault := _leaf_fault(one, other, bound)) is not None:
            return f"leaf {i} {fault}"
    return None


def _leaf_fault(one: Any, other: Any, bound: float) -> str | None:
    if type(one) is not type(other):
        return f"is a {type(one).__name__}, expected a {type(other).__name__}"
    if not isinstance(one, torch.Tensor):
        return None if one == other else f"is {one!r}, expected {other!r}"
    for name in ("shape", "dtype", "device", "layout"):
        if getattr(one, name) != getattr(other, name):
            return f"has {name} {getattr(one, name)}, expected {getattr(other, name)}"
    if strides_of(one) != strides_of(other):
        return f"has strides {one.stride()}, expected {other.stride()}"
    if one.is_inference() != other.is_inference():
        return "is an inference tensor" if one.is_inference() else "is no inference tensor"
    if not one.is_floating_point():
        return None if bound > 1e-3 or torch.equal(one, other) else "differs"
    # Few values may cancel to near nothing: against values of some size, as most are.
    size = max(float(other.detach().norm()), 0.5 * other.numel() ** 0.5)
    error = float((one.detach() - other.detach()).norm()) / max(size, 1e-6)
    return None if error <= bound else f"is off by {error:.1e}, allowed {bound:.0e}"
