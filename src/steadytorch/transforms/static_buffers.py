"""Inputs and outputs at fixed addresses: how calls reach a recorded computation and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.workload.signature import map_tensors

Feed = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Copies the tensors of a call into the static ones."""

FeedOne = Callable[[torch.Tensor], None]
"""Copies one tensor into a static one of its shape."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class StaticInputs(NamedTuple):
    """Arguments at fixed addresses.

    Attributes:
        args: positional arguments; tensors are private copies with the strides of the originals.
        kwargs: keyword arguments, likewise.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def static_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StaticInputs:
    """Copies every tensor of a call; strides are kept where a tensor has no holes or overlaps."""
    # An inference tensor could not be written to outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        copies = map_tensors(lambda tensor: tensor.detach().clone(), (args, dict(kwargs)))
    return StaticInputs(*copies)


def feeder(static: StaticInputs, feeds: Sequence[FeedOne] = ()) -> Feed:
    """Makes the function that copies a call's tensors into the static ones.

    The copy converts element types, layouts and devices as needed; a call with all of the static
    tensors themselves copies nothing. Values that are no tensors are
    constants of the recorded computation.

    Args:
        static: the arguments to copy into.
        feeds: copies into one static tensor each, in the order in which these stand; empty to copy
            into all of them with one launch.

    Returns:
        A function of `(args, kwargs)`; it raises UsageError where these differ from the static ones
        in structure, in a shape or in a constant.
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
    leaves, structure = pytree.tree_flatten(tuple(static))
    order = tuple(static.kwargs)
    copy = _copier(leaves, feeds)

    def feed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.keys() != static.kwargs.keys():
            raise _mismatch(f"keyword arguments {sorted(kwargs)}")
        found, found_structure = pytree.tree_flatten((args, {name: kwargs[name] for name in order}))
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
                raise _mismatch(f"{found[place]!r} in the place of {constant!r}")
        sources = [found[place] for place in places]
        if [source.shape for source in sources] != shapes:
            raise _mismatch(f"shapes {[tuple(source.shape) for source in sources]}")
        if feeds:
            for feed, source in zip(feeds, sources, strict=True):
                feed(source)
        elif targets and not all(map(is_, sources, targets)):
            # Where gradients are on, a source that takes part in them would drag its target along.
            sources = [s.detach() if s.requires_grad else s for s in sources]
            torch._foreach_copy_(targets, sources)

    return copy


def collector(outputs: Any) -> Callable[[], Any]:
    """Makes the function that returns copies of outputs which the next call will overwrite.

    Args:
        outputs: what the recorded computation returned: tensors, nested at will.

    Returns:
        A function of no arguments; each call returns new tensors in the same structure.

    Raises:
        UnsupportedError: `outputs` holds an object whose tensors, if any, cannot be found.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs.detach().clone
    leaves, structure = pytree.tree_flatten(outputs)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise UnsupportedError(
                f"the model returns a {type(leaf).__name__}, which cannot be copied out of static "
                "buffers: return tensors, nested in tuples, lists or dicts"
            )
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if type(outputs) is tuple and all(a is b for a, b in zip(leaves, outputs, strict=False)):
        return lambda: tuple([_copy(leaf) for leaf in detached])
    return lambda: pytree.tree_unflatten([_copy(leaf) for leaf in detached], structure)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _mismatch(found: str) -> UsageError:
    return UsageError(
        f"this plan was recorded for other inputs, got {found}: call it with arguments of the "
        "recorded signature, or use the untouched model"
    )
