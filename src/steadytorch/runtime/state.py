"""Detects whether a model keeps state between calls or draws random numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from steadytorch.transforms.inference_mode import Leaving
from steadytorch.workload.contents import (
    SEQUENCES,
    Contents,
    bytes_of,
    contents,
    copy_of,
    home_of,
    kept_attributes,
    put_back,
    same,
)
from steadytorch.workload.generators import OBJECTS, HostStates, set_state, state_of
from steadytorch.workload.reads import reads_of

KEEPS_STATE = "the model keeps state between its calls"
DRAWS = "the model draws random numbers when called"

_KNOWN = ("torch.", "steadytorch.")
_OF_ALL = frozenset(vars(nn.Module()))


class State:
    """A snapshot of the state that a model keeps between calls.

    If `forward` changes attributes or buffers, outputs depend on earlier calls, and a converted
    copy of the model would diverge. Assigned attributes and written tensors are detected, in
    buffers and one level deep in lists, tuples, deques, sets and dictionaries; also in what the
    code of `forward` reads of objects, classes, globals and closures, modules included (see
    `Reads`). So are writes to arrays and numbers drawn from generators found there. Iterators and
    queues cannot be compared: a model that holds or reads one always counts as changed.

    Args:
        modules: the module trees to inspect.
        keep: whether to copy tensors and states of generators, for `restore`.
        most: limit on the bytes of all copies; above it, nothing is copied.

    Attributes:
        restorable: whether the tensors were copied.
    """

    def __init__(
        self, modules: list[nn.Module], keep: bool = False, most: float = math.inf
    ) -> None:
        own = list({id(m): m for tree in modules for m in tree.modules()}.values())
        self._reads = reads_of(own)
        trees = [*modules, *self._reads.modules]
        self._modules = list({id(m): m for tree in trees for m in tree.modules()}.values())
        self._before = [kept_attributes(module) for module in self._modules]
        self._seen = [{name: contents(v) for name, v in found.items()} for found in self._before]
        self._read = [contents(value) for value in self._reads.held()]
        kept = [t for found in self._before for t in _kept_in(found)] if keep else []
        kept += [t for found in self._read for t in _tensors_in(found[0])] if keep else []
        held = chain(*(found.values() for found in self._seen), self._read) if keep else ()
        items = [item for each in held for item in each[2]]
        arrays = [(each, len(found)) for each in items if (found := bytes_of(each)) is not None]
        # Sparse tensors count as dense ones: they have no `nbytes`.
        size = sum(t.numel() * t.element_size() for t in kept)
        size += sum(length for _, length in arrays)
        self.restorable = keep and size <= most
        self._copies = [(t, t.detach().clone()) for t in kept] if self.restorable else []
        # Memory is not kept itself, as a `bytearray` could not grow then.
        self._arrays = [(each, copy_of(each)) for each, _ in arrays if self.restorable]
        generators = [item for item in items if isinstance(item, OBJECTS)]
        self._generators = [(generator, state_of(generator)) for generator in generators]

    def changed(self) -> bool:
        """Whether the model's state differs from the snapshot."""
        return not all(map(same, self._read, map(contents, self._reads.held()))) or any(
            _differs(before, module)
            for before, module in zip(self._seen, self._modules, strict=True)
        )

    def mend(self) -> None:
        """Converts inference tensors left in attributes or containers to ordinary tensors."""
        leaving = Leaving([], objects=False)
        with torch.inference_mode(False):
            for held in map(vars, self._modules):
                for name in _own_names(held):
                    held[name] = leaving.changed(held[name])

    def restore(self) -> None:
        """Restores attributes, and also the contents of tensors and arrays if `restorable`."""
        self._reads.assign([value for value, *_ in self._read])
        for found in self._read:
            if not same(found, contents(found[0])):
                _refill(found)
        for module, before, seen in zip(self._modules, self._before, self._seen, strict=True):
            if _differs(seen, module):
                for name in kept_attributes(module).keys() - before.keys():
                    del vars(module)[name]
                vars(module).update(before)
                for found in seen.values():
                    if not same(found, contents(found[0])):
                        _refill(found)
        self._restore_contents()

    def _restore_contents(self) -> None:
        with torch.no_grad():
            for tensor, copy in self._copies:
                # Writing equal numbers would look like a change. Sparse tensors are not compared.
                if tensor.layout != torch.strided or not torch.equal(tensor, copy):
                    tensor.copy_(copy)
        for array, copy in self._arrays:
            put_back(array, copy)
        for generator, state in self._generators:
            set_state(generator, state)


def _differs(seen: dict[str, Any], module: nn.Module) -> bool:
    now = kept_attributes(module)
    return now.keys() != seen.keys() or not all(
        same(before, contents(now[name])) for name, before in seen.items()
    )


def _kept_in(attributes: dict[str, Any]) -> list[Tensor]:
    found = [t for name in _own_names(attributes) for t in _tensors_in(attributes[name])]
    return list({id(tensor): tensor for tensor in found}.values())


def _own_names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name == "_buffers" or name not in _OF_ALL]


def _refill(seen: Contents) -> None:
    """Restores the items of a list, dictionary, set or deque from a snapshot."""
    value, keys, items, _ = seen
    if keys is not None:
        value.clear()
        value.update(zip(keys, items, strict=True))
    elif isinstance(value, list):
        value[:] = items
    elif isinstance(value, set):
        value.clear()
        value.update(items)
    elif isinstance(value, deque):
        value.clear()
        value.extend(items)


def writes_of(copy: nn.Module) -> Callable[[], bool]:
    """Returns a function that tells whether calls of a model copy changed the copy's state.

    Unlike `State`, the check is fast enough for every call: it skips modules of PyTorch's own
    classes. The `forward` of PyTorch's own modules changes no state in evaluation mode. In training
    mode, PyTorch's own modules such as batch norm change state at the first call, which `State`
    detects.

    Args:
        copy: the copy that calls run; only they may change it.
    """
    modules = [m for m in copy.modules() if not home_of(m).startswith(_KNOWN)]
    registries = [dict.values(m._buffers) for m in modules if isinstance(m._buffers, dict)]
    homes = [vars(m) for m in modules]
    places = [(vars(m), n) for m in modules for n in kept_attributes(m) if n not in _OF_ALL]
    tensors = [t for m in modules for t in m.buffers(recurse=False) if not t.is_inference()]
    tensors += [t for home, name in places for t in _tensors_in(home[name])]
    version, flatten = attrgetter("_version"), chain.from_iterable
    held, versions, sizes = list(flatten(registries)), [*map(version, tensors)], [*map(len, homes)]
    values = [_held(home[name]) for home, name in places]

    def changed() -> bool:
        try:
            return not (
                [*map(version, tensors)] == versions
                and all(map(is_, flatten(registries), held))
                and [home[name] for home, name in places] == values
                and [*map(len, homes)] == sizes
            )
        except Exception:  # an attribute is gone, or cannot be compared
            return True

    return changed


def _held(value: Any) -> Any:
    """Returns a shallow copy of a container, and any other value as it is."""
    return type(value)(value) if type(value) in (list, deque, dict, set) else value


def _tensors_in(value: Any) -> list[Tensor]:
    items = value.values() if isinstance(value, dict) else value
    found = items if type(value) in (*SEQUENCES, dict) else [value]
    return [t for t in found if isinstance(t, Tensor) and not t.is_inference()]


class Draws:
    """A snapshot of PyTorch's, Python's and NumPy's generators, for a model on `device`.

    Random numbers that other threads draw at the same time are attributed to the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._found, self._host = self._now(), HostStates()

    def happened(self) -> bool:
        """Whether random numbers were drawn since the snapshot."""
        return not all(map(torch.equal, self._found, self._now())) or self.on_host()

    def on_host(self) -> bool:
        """Whether Python's or NumPy's random numbers were drawn since the snapshot."""
        return self._host.drawn()

    def undo(self) -> None:
        """Restores the random number generators, so that the same numbers are drawn again."""
        self._host.restore()
        torch.set_rng_state(self._found[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._found[1], self._device)

    def _now(self) -> list[Tensor]:
        cuda = [] if self._device is None else [torch.cuda.get_rng_state(self._device)]
        return [torch.get_rng_state(), *cuda]
