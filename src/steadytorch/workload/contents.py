"""Compares values, and the items of containers, with a snapshot of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from queue import Queue, SimpleQueue
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from steadytorch.workload.generators import OBJECTS, digest

SEQUENCES = (list, tuple, deque)
_PLAIN = (bool, int, float, complex, str, bytes)
_CONSUMED = (Iterator, Queue, SimpleQueue)
"""Classes of values that reading changes: also generators and open files."""
ARRAY_BYTES = 1 << 16
"""Leading bytes of an array that are compared at each call, in about 20 us."""
ARRAY_SAMPLES = 512
"""Samples of 8 bytes that are compared of the rest, in about 5 us."""
_ELEMENTS = 2048
"""Elements that are compared of a larger array with gaps between its elements, in about 10 us."""
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
    found = bytes_of(value)
    return None if found is None else crc32(found)


def memory_of(value: Any) -> memoryview | None:
    """The memory of an array, as of NumPy's, `array.array` or `bytearray`, in its own order.

    None for other values, arrays of objects, and arrays with gaps between their elements.
    """
    if value is None or isinstance(value, (*_PLAIN, *SEQUENCES, dict, Tensor, nn.Module)):
        return None
    if _has_objects(value):
        return None
    try:
        return memoryview(value).cast("B")
    except (TypeError, ValueError, BufferError):  # also of other orders and types of elements
        if not _is_readable(value):
            return None
    found = _laid_out(value)
    return found.reshape(-1).view(np.uint8).data if found.flags.c_contiguous else None


def bytes_of(value: Any) -> memoryview | bytes | None:
    """The memory of an array, or a copy if it has gaps; None for other values.

    Of an array of objects, their identities.
    """
    memory = memory_of(value)
    return _laid_out(value).tobytes() if memory is None and _is_readable(value) else memory


def copy_of(value: Any) -> bytes | np.ndarray:
    """A copy of an array for `put_back`, which keeps objects alive."""
    return value.copy() if _has_objects(value) else bytes(bytes_of(value) or b"")


def put_back(value: Any, saved: bytes | np.ndarray) -> None:
    """Restores an array to a copy of `copy_of`; an array of another size stays as it is."""
    if isinstance(saved, np.ndarray):
        if value.shape == saved.shape:
            value[...] = saved
        return
    now, memory = bytes_of(value), memory_of(value)
    if now is None or now == saved or len(now) != len(saved):  # equal ones may be read-only
        return
    if memory is not None:
        memory[:] = saved
        return
    found = _laid_out(value)
    found[...] = np.frombuffer(saved, found.dtype).reshape(found.shape)


def _is_readable(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size > 0


def _has_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def _laid_out(array: np.ndarray) -> np.ndarray:
    """A view with the axes in the order of the memory, without the repetitions of broadcasting."""
    array = np.asarray(array)
    ways = (0 if step == 0 else slice(None, None, 1 if step > 0 else -1) for step in array.strides)
    array = array[(*ways, ...)]
    return array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))


def checksum(array: Any) -> int | None:
    """A checksum of an array's leading `ARRAY_BYTES` and of samples of the rest.

    None for other values.
    """
    memory = memory_of(array)  # not kept, as a `bytearray` could not grow then
    if memory is not None:
        return crc32(_samples(memory), crc32(memory[:ARRAY_BYTES]))
    if not _is_readable(array):
        return None
    if array.nbytes <= ARRAY_BYTES:
        return crc32(array.tobytes())
    return crc32(array.flat[:: -_step(array.size, _ELEMENTS)].tobytes())


def _samples(memory: memoryview) -> bytes:
    """Samples of what follows the leading `ARRAY_BYTES`, the last bytes included."""
    words = -((ARRAY_BYTES - memory.nbytes) // 8)
    if words <= 0:
        return b""
    rest = np.frombuffer(memory, np.uint64, offset=memory.nbytes - 8 * words)
    return rest[:: -_step(words, ARRAY_SAMPLES)].tobytes()


def _step(size: int, most: int) -> int:
    """An odd step, so that samples fall into different columns."""
    return -(-size // most) | 1


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
