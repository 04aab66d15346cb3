"""Pads input dimensions to bucket sizes that the user declares."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from steadytorch.errors import UsageError

POWERS_OF_TWO = "powers of two"
Place = int | str
"""Index of a positional argument, or name of a keyword argument."""
Number = int | float

_FIELDS = ("dim", "sizes", "inputs", "pad")
_FORMATS = ((4, torch.channels_last), (5, torch.channels_last_3d))


class Dimension(msgspec.Struct, frozen=True):
    """An input dimension that may be padded to a bucket size.

    Attributes:
        name: its name in reasons.
        dim: its index in each tensor; negative indices count from the end.
        sizes: the bucket sizes in ascending order; None for the powers of two.
        inputs: the arguments whose tensors have this dimension; None for all arguments.
        pad: padding value by argument; the key `None` stands for all others. The default is 0.
    """

    name: str
    dim: int
    sizes: tuple[int, ...] | None
    inputs: tuple[Place, ...] | None
    pad: Mapping[Place | None, Number]

    def bucket(self, size: int) -> int | None:
        """Returns the smallest bucket size that is at least `size`, or None."""
        if self.sizes is None:
            return 1 << max(size - 1, 0).bit_length()
        at = bisect_left(self.sizes, size)
        return self.sizes[at] if at < len(self.sizes) else None

    def index_in(self, place: Place, tensor: torch.Tensor) -> int | None:
        """Returns the index of this dimension in a tensor, or None if the tensor lacks it."""
        if self.inputs is not None and place not in self.inputs:
            return None
        if not -tensor.dim() <= self.dim < tensor.dim():
            return None
        return self.dim % tensor.dim()

    def value_for(self, place: Place) -> Number | None:
        """Returns the declared padding value of an argument, or None."""
        return self.pad.get(place, self.pad.get(None))


def declared(buckets: Mapping[str, Any]) -> tuple[Dimension, ...]:
    """Parses the user's declaration of bucket sizes.

    Args:
        buckets: for each dimension's name, a mapping with these keys; `batch` may map to its
            sizes alone, and is dimension 0 of all tensors:

            - `dim`: the index of the dimension.
            - `sizes`: a list of positive integers, or "powers of two".
            - `inputs`: indices of positional and names of keyword arguments; default all tensors.
            - `pad`: a number, or a mapping of arguments to numbers.

    Raises:
        UsageError: the declaration is invalid; the message says what to write instead.
    """
    if not isinstance(buckets, Mapping) or not buckets:
        raise UsageError(f"buckets are {buckets!r}: write them as {{'batch': [1, 8, 32]}}")
    return tuple(_dimension(name, given) for name, given in buckets.items())


def _dimension(name: Any, given: Any) -> Dimension:
    if not isinstance(name, str):
        raise UsageError(f"bucket name {name!r} is a {type(name).__name__}: use a string")
    if not isinstance(given, Mapping):
        if name != "batch":
            raise UsageError(
                f"bucket {name!r} does not say which dimension it is: "
                f"write {{'dim': 1, 'sizes': {given!r}}}"
            )
        given = {"dim": 0, "sizes": given}
    unknown = [field for field in given if field not in _FIELDS]
    if unknown:
        raise UsageError(f"bucket {name!r} has {unknown[0]!r}: it may have {', '.join(_FIELDS)}")
    dim = given.get("dim", 0 if name == "batch" else None)
    if not _is_whole(dim):
        raise UsageError(f"bucket {name!r} has dim {dim!r}: use an index, such as 1")
    inputs = _inputs(name, given.get("inputs"))
    return Dimension(
        name, dim, _sizes(name, given.get("sizes")), inputs, _pad(name, given.get("pad"))
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_place(value: Any) -> bool:
    return isinstance(value, str) or (_is_whole(value) and value >= 0)


def _sizes(name: str, given: Any) -> tuple[int, ...] | None:
    if given == POWERS_OF_TWO:
        return None
    fits = isinstance(given, (list, tuple)) and bool(given)
    if not fits or not all(_is_whole(size) and size > 0 for size in given):
        raise UsageError(
            f"bucket {name!r} has sizes {given!r}: use a list of whole numbers above 0, "
            f"or {POWERS_OF_TWO!r}"
        )
    return tuple(sorted(set(given)))


def _inputs(name: str, given: Any) -> tuple[Place, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or not given or not all(map(_is_place, given)):
        raise UsageError(
            f"bucket {name!r} has inputs {given!r}: list the arguments, positional ones by index, "
            "keyword ones by name"
        )
    return tuple(given)


def _pad(name: str, given: Any) -> dict[Place | None, Number]:
    values = given if isinstance(given, Mapping) else {} if given is None else {None: given}
    for place, value in values.items():
        number = isinstance(value, (bool, int, float)) and value == value  # not NaN
        if not number or not (place is None or _is_place(place)):
            raise UsageError(
                f"bucket {name!r} has pad {given!r}: use a number, or numbers by argument, such as "
                "{'attention_mask': 0}"
            )
    return dict(values)


class Extension(msgspec.Struct, frozen=True):
    """The padding of one tensor dimension: its new size and the fill value.

    Attributes:
        dim: its index, not negative.
        size: the new size.
        value: the value of new elements; None to draw them at random.
        sign: the sign of all random values, 1 or -1.
    """

    dim: int
    size: int
    value: Number | None
    sign: int = 1


def extended(tensor: torch.Tensor, extensions: Sequence[Extension]) -> torch.Tensor:
    """Pads a tensor at the end of the given dimensions; returns new memory in the same format.

    Random padding values are larger in magnitude than all of the tensor's, so that they show in any
    maximum, or with a negative sign in any minimum.

    Args:
        tensor: a dense tensor.
        extensions: one or more extensions.
    """
    shape = list(tensor.shape)
    for extension in extensions:
        shape[extension.dim] = extension.size
    grown = _empty_like(tensor, shape)
    front = grown
    for extension in extensions:
        size = tensor.shape[extension.dim]
        rest = grown.narrow(extension.dim, size, extension.size - size)
        if extension.value is not None:
            rest.fill_(extension.value)
        else:
            largest = tensor.detach().abs().amax() if tensor.numel() else 0.0
            rest.normal_().abs_().add_(1).mul_(extension.sign * (largest + (largest == 0)))
        front = front.narrow(extension.dim, 0, size)
    front.copy_(tensor)
    return grown


def _empty_like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    if tensor.is_contiguous() or 0 in tensor.stride():
        return torch.empty(shape, **options)
    for dims, memory_format in _FORMATS:
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=memory_format):
            return torch.empty(shape, memory_format=memory_format, **options)
    outermost_first = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return torch.empty_permuted(shape, outermost_first, **options)
