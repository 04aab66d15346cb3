"""Moves a call's tensors into and out of the fixed buffers of a recorded computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.rewrite.conversion import cloned
from steadytorch.workload.opened import opened
from steadytorch.workload.signature import map_tensors

Feed = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Copies the tensors of a call into the static ones."""

FeedOne = Callable[[torch.Tensor], None]
"""Copies one tensor into a static one of its shape."""

Placer = Callable[[], torch.Tensor | None]
"""Makes the next replay write one output to a new tensor; returns the tensor, None on failure."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class StaticInputs(NamedTuple):
    """Arguments of a recorded call, with tensors at fixed addresses.

    Attributes:
        args: positional arguments; tensors are private copies with the original strides.
        kwargs: keyword arguments, likewise.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def static_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StaticInputs:
    """Copy every tensor of a call; keep the strides of tensors without gaps or overlaps."""
    # Inference tensors could not be written to outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        copies = map_tensors(lambda tensor: tensor.detach().clone(), (args, dict(kwargs)))
    return StaticInputs(*copies)


def feeder(static: StaticInputs, feeds: Sequence[FeedOne] = ()) -> Feed:
    """Make a function that copies a call's tensors into the static tensors.

    The copy converts dtype, layout and device as needed. A call with the static tensors themselves
    copies nothing. Arguments other than tensors are constants of the recorded computation.

    Args:
        static: the arguments to copy into.
        feeds: one copy function per static tensor, in order; empty copies all in one launch.

    Returns:
        A function of `(args, kwargs)`. It raises UsageError if they differ from the static ones in
        structure, a shape or a constant.
    """
    leaves = [*static.args, *static.kwargs.values()]
    if all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
        return _flat_feeder(static, feeds)
    return _nested_feeder(static, feeds)


def _flat_feeder(static: StaticInputs, feeds: Sequence[FeedOne]) -> Feed:
    count, names = len(static.args), tuple(static.kwargs)
    copy = _copier([*static.args, *static.kwargs.values()], feeds)

    def feed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) != count or len(kwargs) != len(names):
            raise _mismatch(f"{len(args)} positional and {len(kwargs)} keyword arguments")
        try:
            copy([*args, *[kwargs[name] for name in names]])
        except KeyError as missing:
            raise _mismatch(f"no argument named {missing}") from None

    return feed


def _nested_feeder(static: StaticInputs, feeds: Sequence[FeedOne]) -> Feed:
    leaves, structure = pytree.tree_flatten(opened(tuple(static)))
    order = tuple(static.kwargs)
    copy = _copier(leaves, feeds)

    def feed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.keys() != static.kwargs.keys():
            raise _mismatch(f"keyword arguments {sorted(kwargs)}")
        given = opened((args, {name: kwargs[name] for name in order}))
        found, found_structure = pytree.tree_flatten(given)
        if found_structure != structure:
            raise _mismatch(f"arguments nested as {found_structure}")
        copy(found)

    return feed


def _copier(leaves: list[Any], feeds: Sequence[FeedOne]) -> Callable[[list[Any]], None]:
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
    targets = [leaves[i] for i in places]
    shapes = [target.shape for target in targets]

    def copy(found: list[Any]) -> None:
        for place, constant in constants:
            if found[place] is not constant and found[place] != constant:
                raise _mismatch(f"{found[place]!r} instead of {constant!r}")
        sources = [found[place] for place in places]
        if [source.shape for source in sources] != shapes:
            raise _mismatch(f"shapes {[tuple(source.shape) for source in sources]}")
        if feeds:
            for feed, source in zip(feeds, sources, strict=True):
                feed(source)
        elif targets and not all(map(is_, sources, targets)):
            # Otherwise a source that requires gradients would pull the target into autograd.
            sources = [s.detach() if s.requires_grad else s for s in sources]
            torch._foreach_copy_(targets, sources)

    return copy


class Results(NamedTuple):
    """Functions that take the results out of a recorded computation.

    Attributes:
        place: call before the computation; pass its return value to `collect`.
        collect: call after the computation; returns the results.
    """

    place: Callable[[], Any]
    collect: Callable[[Any], Any]


def results(outputs: Any, placers: Sequence[Placer | None] = ()) -> Results:
    """Make functions that return outputs which the next call does not overwrite.

    Args:
        outputs: the result of the recorded computation: tensors, nested arbitrarily.
        placers: one per tensor; None, or a missing entry, copies that tensor afterwards.

    Raises:
        UnsupportedError: `outputs` contains an object in which tensors cannot be found.
    """
    leaves, structure = pytree.tree_flatten(opened(outputs))
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise UnsupportedError(
                f"the model returns a {type(leaf).__name__}, which cannot be copied out of static "
                "buffers: return tensors, nested in tuples, lists or dicts"
            )
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if isinstance(outputs, torch.Tensor):
        clone = partial(cloned, detached[0])
        if placers and placers[0] is not None:
            return Results(placers[0], lambda placed: clone() if placed is None else placed)
        return Results(_nothing, lambda placed: clone())
    given = iter(placers)
    every = [next(given, None) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    flat = type(outputs) is tuple and all(a is b for a, b in zip(leaves, outputs, strict=False))

    def place() -> Any:
        return [None if placer is None else placer() for placer in every]

    def collect(placed: Any) -> Any:
        found = [
            _copy(leaf) if new is None else new for leaf, new in zip(detached, placed, strict=True)
        ]
        return tuple(found) if flat else pytree.tree_unflatten(found, structure)

    return Results(place, collect)


def _nothing() -> None:
    return None


def _copy(leaf: Any) -> Any:
    return cloned(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _mismatch(found: str) -> UsageError:
    return UsageError(
        f"the inputs differ from the recorded ones, got {found}: pass arguments of the recorded "
        "signature, or call the untouched model"
    )
