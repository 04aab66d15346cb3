"""Compares values, and the items of containers, with a snapshot of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from queue import Queue, SimpleQueue
from typing import Any
from zlib import crc32

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from steadytorch.workload.generators import OBJECTS, digest

SEQUENCES = (list, tuple, deque)
_PLAIN = (bool, int, float, complex, str, bytes)
_CONSUMED = (Iterator, Queue, SimpleQueue)
"""Classes of values that reading changes: also generators and open files."""
ARRAY_BYTES = 1 << 16
"""Leading bytes of an array that are compared at each call, in about 20 us."""
_turns = count()

Contents = tuple[Any, list[Any] | None, list[Any], list[int | None]]
"""A value, its keys if it is a dictionary, its items or itself, and their versions."""


def version(value: Any) -> int | None:
    """Tells whether a value was changed in place: another number each time that it was.

    It is the number of in-place writes to a tensor, a digest of a random number generator's state,
    or a checksum of an array's memory, as of NumPy's. Iterators and queues, which cannot be
    compared, have another number each time. None for inference tensors and other values.
    """
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, OBJECTS):
        return digest(value)
    if isinstance(value, _CONSUMED):
        return next(_turns)
    memory = memory_of(value)
    return None if memory is None else crc32(memory)


def memory_of(value: Any) -> memoryview | None:
    """The bytes of an array, as of NumPy's, `array.array` or `bytearray`; None for other values."""
    if value is None or isinstance(value, (*_PLAIN, *SEQUENCES, dict, Tensor, nn.Module)):
        return None
    try:
        return memoryview(value).cast("B")
    except (TypeError, ValueError, BufferError):  # also of arrays that are not contiguous
        return None


def checksum(array: Any) -> int | None:
    """A checksum of an array's leading `ARRAY_BYTES`; None for other values."""
    memory = memory_of(array)  # not kept, as a `bytearray` could not grow then
    return None if memory is None else crc32(memory[:ARRAY_BYTES])


def contents(value: Any, version: Callable[[Any], int | None] = version) -> Contents:
    """A snapshot of a value for `same`; one level deep in containers.

    Args:
        value: any value; the snapshot keeps it and its items alive.
        version: tells versions; other versions of an item are a change.
    """
    if isinstance(value, dict):
        return value, list(value), list(value.values()), list(map(version, value.values()))
    if isinstance(value, (*SEQUENCES, set, frozenset)):
        return value, None, list(value), list(map(version, value))
    return value, None, [value], [version(value)]


def same(before: Contents, after: Contents) -> bool:
    """Whether two snapshots are equal: plain values and containers by value, others by identity."""
    if type(before[0]) is not type(after[0]) or before[3] != after[3]:
        return False
    pairs = [(before[1] or [], after[1] or []), (before[2], after[2])]
    return all(len(one) == len(two) and all(map(_alike, one, two)) for one, two in pairs)


def _alike(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, dict):
        return list(before) == list(after) and all(map(_alike, before.values(), after.values()))
    if isinstance(before, list | tuple):  # `torch.export` makes nested ones anew
        return len(before) == len(after) and all(map(_alike, before, after))
    return isinstance(before, _PLAIN) and before == after


def kept_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, without weights that PyTorch's hooks recompute at each call.

    Hooks of weight norm, spectral norm and pruning assign a newly computed weight at each call.
    """
    computed = {
        getattr(hook, "_tensor_name" if isinstance(hook, BasePruningMethod) else "name", None)
        for hook in vars(module).get("_forward_pre_hooks", {}).values()
        if any(kind.__module__.startswith("torch.nn.utils") for kind in type(hook).__mro__)
    }
    return {name: value for name, value in vars(module).items() if name not in computed}


def home_of(module: nn.Module) -> str:
    """The Python module that defines a module's class, below the classes of parametrizations."""
    homes = (kind.__module__ for kind in type(module).__mro__)
    return next(home for home in homes if home != "torch.nn.utils.parametrize")
