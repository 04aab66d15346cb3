"""Serves varying shapes with few plans: pads inputs to a bucket's size and slices outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError, UsageError, one_line
from steadytorch.rewrite.copying import copy_with
from steadytorch.runtime.agreement import bound, disagreement
from steadytorch.runtime.padding import Dimension, Extension, Place, declared, extended
from steadytorch.workload.opened import opened
from steadytorch.workload.signature import is_size, map_tensors, signature, tensors_of

VERIFYING = "its bucket is being verified"
MOST_REMEMBERED = 1000
"""Limit on remembered buckets, counted with their other dimensions."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Sizes = dict[str, tuple[int, int]]
"""Given size and bucket size by name of the dimension, where they differ."""


@dataclass(frozen=True)
class Fitted:
    """A call whose inputs are padded to the size of a bucket.

    Attributes:
        args: positional arguments, with padded tensors in new memory.
        kwargs: keyword arguments.
        slice_outputs: cuts the outputs of the padded call to the given sizes; raises
            `UnsupportedError` if the outputs differ in form from the verified ones.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    slice_outputs: Callable[[Any], Any]


class _Cut(NamedTuple):
    """An output dimension whose size follows a padded dimension; `leaf` is the output's index."""

    leaf: int
    dim: int
    name: str


class _Refused(Exception):  # noqa: N818 - carries a finding, not an error
    """Raised if a bucket cannot be used; the message is the reason."""


class _Unverifiable(_Refused):
    """Raised if this call cannot verify a bucket, but a later call may; the message says why."""


class Buckets:
    """Pads inputs to the next larger bucket, after verifying that padding keeps the results.

    The first use of a bucket verifies it with five or more calls of the untouched model.
    Verification runs on copies of the inputs and buffers, and restores random state; forward hooks
    of the model run too.

    1. Each dimension is padded alone, to find the output dimensions that change with its size.
    2. All dimensions are padded together. The outputs, cut to the unpadded sizes, must equal those
       of an unpadded call in shape, type and values (class `same`).
    3. Floating-point inputs without a declared `pad` are padded with random values too, above the
       inputs' largest and below their smallest, because zeros would not reveal every maximum or
       minimum over the batch. A declared `pad` is never replaced by random values, since it has a
       meaning for the model, as in an attention mask.

    A bucket that fails verification is refused with the reason. Typical causes of refusal are
    statistics, softmax or mean over the batch, and randomness. Each bucket is verified once, not
    once for every size within it.

    Args:
        buckets: the declaration; see `padding.declared`.
        model: the untouched model.

    Raises:
        UsageError: the declaration is invalid.
    """

    def __init__(self, buckets: Mapping[str, Any], model: Any) -> None:
        self._dimensions = declared(buckets)
        self._model = model
        self._known: dict[Any, tuple[_Cut, ...] | str] = {}
        self._lock = Lock()

    def fit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Fitted | str:
        """Pads a call to its bucket, or returns the reason to run the model unpadded.

        Inputs that already have a bucket's size are returned unchanged. The reasons form a bounded
        set of texts, so that calls can be counted by reason.
        """
        try:
            sizes = self._sizes(args, kwargs)
            if not sizes:
                return Fitted(args, kwargs, _whole)
            padded = self._padded(args, kwargs, sizes)
            cuts = self._cuts_for((args, dict(kwargs)), padded, sizes)
        except _Refused as refused:
            return str(refused)
        except UsageError:
            return "these inputs have no signature"
        except Exception as error:  # tensors that cannot be narrowed, values that do not fit
            return f"the inputs could not be padded: {type(error).__name__}"
        return Fitted(*padded, functools.partial(_cut, cuts, sizes))

    # -- padding --------------------------------------------------------------------------------

    def _sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
        found: dict[str, set[int]] = {dimension.name: set() for dimension in self._dimensions}
        for place, argument in _by_place(args, kwargs):
            for tensor in _tensors(argument):
                for dimension in self._dimensions:
                    index = dimension.index_in(place, tensor)
                    if index is not None:
                        found[dimension.name].add(tensor.shape[index])
        sizes = {d.name: _size_and_bucket(d, found[d.name]) for d in self._dimensions}
        return {name: (size, bucket) for name, (size, bucket) in sizes.items() if size < bucket}

    def _padded(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sizes: Sizes,
        noise: int = 0,
    ) -> Arguments:
        """Pads inputs along the dimensions in `sizes`.

        With `noise`, floating-point inputs without a declared padding value are padded with random
        values of that sign, 1 or -1, which shows whether padding changes the outputs.
        """
        dimensions = [d for d in self._dimensions if d.name in sizes]

        def pad(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            extensions = []
            for dimension in dimensions:
                index = dimension.index_in(place, tensor)
                if index is not None:
                    value = dimension.value_for(place)
                    if value is None and not (noise and tensor.is_floating_point()):
                        value = 0
                    size = sizes[dimension.name][1]
                    extensions.append(Extension(index, size, value, noise or 1))
            if extensions and tensor.layout != torch.strided:
                raise _Refused("an input to be padded is not a dense tensor")
            return extended(tensor, extensions) if extensions else tensor

        done = {
            place: pad(place, argument)
            if type(argument) is torch.Tensor
            else map_tensors(functools.partial(pad, place), argument)
            for place, argument in _by_place(args, kwargs)
        }
        return tuple(done[i] for i in range(len(args))), {name: done[name] for name in kwargs}

    # -- verification ---------------------------------------------------------------------------

    def _cuts_for(self, given: Arguments, padded: Arguments, sizes: Sizes) -> tuple[_Cut, ...]:
        key = (_layout(*padded), tuple(sizes), getattr(self._model, "training", None))
        known = self._known.get(key)
        if known is None:
            known = self._first_sight(key, given, sizes)
        if isinstance(known, str):
            raise _Refused(known)
        return known

    def _first_sight(self, key: Any, given: Arguments, sizes: Sizes) -> tuple[_Cut, ...] | str:
        with self._lock:
            if key in self._known:
                return self._known[key]
            if len(self._known) >= MOST_REMEMBERED:
                return "too many shapes besides the buckets"
            self._known[key] = VERIFYING
        try:
            found = self._found(given, sizes)
        except BaseException:  # interrupted, or unverifiable with this call
            del self._known[key]
            raise
        self._known[key] = found
        return found

    def _found(self, given: Arguments, sizes: Sizes) -> tuple[_Cut, ...] | str:
        try:
            return self._verified(given, sizes)
        except _Unverifiable:
            raise
        except _Refused as refused:
            return str(refused)
        except Exception as error:
            return f"its bucket could not be verified: {one_line(error)}"

    def _shows_padding(self, given: Arguments, sizes: Sizes) -> bool:
        """Whether any input differs from the padding; otherwise verification proves nothing."""
        dimensions = [d for d in self._dimensions if d.name in sizes]
        for place, argument in _by_place(*given):
            values = [d.value_for(place) for d in dimensions]
            for tensor in _tensors(argument):
                if any(d.index_in(place, tensor) is not None for d in dimensions):
                    free = tensor.is_floating_point() and None in values
                    if free or any(bool((tensor != (v or 0)).any()) for v in values):
                        return True
        return False

    @torch.no_grad()
    def _verified(self, given: Arguments, sizes: Sizes) -> tuple[_Cut, ...]:
        if not self._shows_padding(given, sizes):
            raise _Unverifiable("the inputs hold padding only; other inputs must verify the bucket")
        model = _with_own_buffers(self._model)
        devices = {t.device for t in tensors_of(given) if t.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            expected = _unpadded(model, given)
            cuts: tuple[_Cut, ...] = ()
            for name, size in sizes.items():
                found = _run(model, self._padded(*given, {name: size}))
                cuts += _following_dimensions(expected, found, name, size)
            _refuse_shared(cuts)
            limit = bound("same", self._model, given)
            for noise in (0, 1, -1):
                found = _run(model, self._padded(*given, sizes, noise))
                # strides=False: cut outputs may keep the strides of the bucket.
                fault = disagreement(
                    _cut(cuts, sizes, found), expected, limit, strides=False, slices=True
                )
                if fault is not None:
                    raise _Refused(f"padding changes the results: {fault}")
        return cuts


def _unpadded(model: Any, given: Arguments) -> Any:
    args, kwargs = map_tensors(torch.clone, given)
    try:
        expected = model(*args, **kwargs)
    except Exception as error:
        raise _Unverifiable("the model raises on these inputs") from error
    if disagreement((args, kwargs), given, 0.0, strides=False) is not None:
        raise _Refused("the model writes to its inputs")
    return expected


def _run(model: Any, padded: Arguments) -> Any:
    # Inputs that are not padded are the caller's own tensors.
    args, kwargs = map_tensors(torch.clone, padded)
    try:
        return model(*args, **kwargs)
    except Exception as error:
        raise _Refused(f"the model fails on padded inputs: {one_line(error)}") from error


def _with_own_buffers(model: Any) -> Any:
    """Copies a model; the copy shares the weights but has its own buffers."""
    if not isinstance(model, nn.Module):
        return model
    try:
        return copy_with(model, lambda t: t if isinstance(t, nn.Parameter) else t.clone())
    except Exception as error:
        raise _Refused(f"the model cannot be copied: {one_line(error)}") from error


def _following_dimensions(
    expected: Any, found: Any, name: str, size: tuple[int, int]
) -> tuple[_Cut, ...]:
    """Finds the output dimensions that padding the input grew from `size[0]` to `size[1]`."""
    leaves, nesting = pytree.tree_flatten(opened(expected), is_leaf=is_size)
    found_leaves, found_nesting = pytree.tree_flatten(opened(found), is_leaf=is_size)
    if found_nesting != nesting:
        raise _Refused("padding changes how the outputs are nested")
    cuts = []
    for i, (ref, out) in enumerate(zip(leaves, found_leaves, strict=True)):
        if not isinstance(ref, torch.Tensor):
            continue
        if not isinstance(out, torch.Tensor) or out.dim() != ref.dim():
            raise _Refused(f"padding changes the number of dimensions of output {i}")
        for dim, (before, after) in enumerate(zip(ref.shape, out.shape, strict=True)):
            if before == after:
                continue
            if (before, after) != size:
                raise _Refused(
                    f"dimension {dim} of output {i} follows {name}, but has another size"
                )
            cuts.append(_Cut(i, dim, name))
    return tuple(cuts)


def _refuse_shared(cuts: tuple[_Cut, ...]) -> None:
    places = [(cut.leaf, cut.dim) for cut in cuts]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise _Refused(f"dimension {place[1]} of output {place[0]} follows several buckets")


def _whole(outputs: Any) -> Any:
    """Returns the outputs unchanged; serves calls that need no padding."""
    return outputs


def _cut(cuts: tuple[_Cut, ...], sizes: Sizes, outputs: Any) -> Any:
    leaves, nesting = pytree.tree_flatten(opened(outputs), is_leaf=is_size)
    whole = list(leaves)
    for leaf, dim, name in cuts:
        size, bucket = sizes[name]
        tensor = leaves[leaf] if leaf < len(leaves) else None
        if not isinstance(tensor, torch.Tensor) or tensor.shape[dim : dim + 1] != (bucket,):
            raise UnsupportedError("the padded call returned outputs other than those verified")
        leaves[leaf] = tensor.narrow(dim, 0, size)
    for i, tensor in enumerate(leaves):
        if tensor is not whole[i] and not tensor.is_contiguous():
            leaves[i] = tensor.clone()  # contiguous, as `view` in the caller's code may need
    return pytree.tree_unflatten(leaves, nesting)


def _size_and_bucket(dimension: Dimension, found: set[int]) -> tuple[int, int]:
    """The given size of a dimension, and the size of its bucket."""
    name = dimension.name
    if not found:
        raise _Refused(f"no input has the dimension of {name}")
    if len(found) > 1:
        raise _Refused(f"the inputs differ along {name}")
    (size,) = found
    bucket = dimension.bucket(size)
    if bucket is None:
        raise _Refused(f"{name} exceeds its largest bucket")
    if size == 0:
        raise _Refused(f"{name} is empty")
    return size, bucket


def _by_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Place, Any]]:
    return [*enumerate(args), *kwargs.items()]


def _tensors(argument: Any) -> list[torch.Tensor]:
    return [argument] if type(argument) is torch.Tensor else tensors_of(argument)


def _layout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The key of a bucket verification: layouts, devices, constants and nesting of the inputs."""
    flat: list[Any] = []
    for place, value in _by_place(args, kwargs):
        if type(value) is torch.Tensor:
            flat.append((place, value.shape, value.stride(), value.dtype, value.device))
        elif value is None or type(value) in (bool, int, str):
            flat.append((place, type(value), value))
        else:  # equally exact, ten times slower
            devices = [t.device for t in tensors_of((args, dict(kwargs)))]
            return signature(args, kwargs), tuple(devices)
    return tuple(flat)
