"""Feeds a workload from a data loader: endless batches, one per step, moved to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

from steadytorch.errors import UsageError
from steadytorch.workload.signature import CONSTANTS, map_tensors

TargetLoss = Callable[..., torch.Tensor]

_MARK = "DataLoader"
"""Name of the profiler range for loader waits; `torch.utils.data` uses it in its ranges too."""
_END = object()


class Batch(NamedTuple):
    """The model's inputs and the loss's targets of one step.

    Attributes:
        inputs: positional arguments of the model.
        kwargs: keyword arguments of the model.
        targets: arguments of the loss after the model's output: none or one.
    """

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts a mapping, a tuple, a list or a single value to positional and keyword arguments."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, list):
        return tuple(given), {}
    return (given if isinstance(given, tuple) else (given,)), {}


def read_batch(given: Any, supervised: bool) -> Batch:
    """Splits a loader's batch into inputs and targets.

    Args:
        given: the model's arguments in any form that a workload's inputs may have; if
            `supervised`, a pair of these and the targets.
        supervised: whether there are targets.

    Raises:
        UsageError: `supervised`, but the batch is not a pair.
    """
    if not supervised:
        return Batch(*arguments(given))
    if not (isinstance(given, tuple | list) and len(given) == 2):
        kind = type(given).__name__
        size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise UsageError(
            f"training needs batches (inputs, targets), but the loader gave a {kind}{size}"
        )
    inputs, targets = given
    return Batch(*arguments(inputs), (targets,))


def first_batch(loader: Any, supervised: bool) -> Batch:
    """Takes the first batch of a loader that can be iterated repeatedly.

    Raises:
        UsageError: the loader is not iterable, is an iterator, or is empty.
        Exception: any exception of the loader.
    """
    if not isinstance(loader, Iterable):
        raise UsageError(
            f"a loader must be iterable, got a {type(loader).__name__}: pass a DataLoader"
        )
    source = iter(loader)
    if source is loader:
        raise UsageError(
            f"the loader is a {type(loader).__name__}, which gives its batches only once: pass "
            "an iterable that can restart, such as a DataLoader"
        )
    given = next(source, _END)
    if given is _END:
        raise UsageError("the loader is empty: it must give at least one batch")
    return read_batch(given, supervised)


class Targeted(nn.Module):
    """A loss with the targets of one batch bound, so that it takes only the model's output.

    The class is an `nn.Module`, so that `Module.to` also moves and converts the targets.

    Args:
        loss: maps the model's output and the targets to a scalar tensor.
        targets: further arguments of the loss: tensors with any nesting.
    """

    def __init__(self, loss: TargetLoss, *targets: Any) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of a model's output for the bound targets."""
        return self.loss(output, *self.targets)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Targeted:
        self.targets = map_tensors(fn, self.targets)
        return super()._apply(fn, recurse)


@dataclass(frozen=True)
class Feed:
    """A data loader as the source of a workload's batches.

    Attributes:
        loader: an iterable of batches that can be iterated repeatedly.
        on_host: whether the loader's batches hold tensors in host memory.
    """

    loader: Iterable[Any]
    on_host: bool

    def batches(
        self, example: Batch, device: torch.device, supervised: bool = False
    ) -> Iterator[Batch]:
        """Endless batches, each moved to the device by a plain `.to(device)`.

        Batches with other shapes, layouts or constants than the example, such as a short last
        batch, are skipped, so that all steps have the same signature.

        Args:
            example: a batch with the required signature; its targets and device are ignored.
            device: device of the returned batches.
            supervised: whether batches are pairs of inputs and targets.

        Returns:
            An iterator that raises `UsageError` if a whole pass over the loader has no batch like
            the example.
        """
        return _Batches(self.loader, example, device, supervised)


class _Batches(Iterator[Batch]):
    """The iterator that `Feed.batches` returns.

    The iterator is a class, because a generator's frame would keep the last batch alive.
    """

    def __init__(
        self, loader: Iterable[Any], example: Batch, device: torch.device, supervised: bool
    ) -> None:
        self._loader, self._example = loader, example[:2]
        self._device, self._supervised = device, supervised
        self._source: Iterator[Any] = iter(())
        self._found = True

    def __next__(self) -> Batch:
        while True:
            given = _next(self._source)
            if given is _END:
                self._begin()
                continue
            batch = Batch(*_moved(tuple(read_batch(given, self._supervised)), self._device))
            if _alike(batch[:2], self._example):
                self._found = True
                return batch

    def _begin(self) -> None:
        if not self._found:
            raise UsageError(
                "a whole pass over the loader gave no batch with the shapes of its first one: "
                "every step needs such a batch"
            )
        self._source, self._found = iter(self._loader), False


def _next(source: Iterator[Any]) -> Any:
    with record_function(_MARK):
        return next(source, _END)


def _moved(values: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), values)


def _alike(one: Any, other: Any) -> bool:
    """Whether two nested arguments have the same signature, ignoring devices."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _layout(one) == _layout(other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return not isinstance(one, CONSTANTS) or one == other


def _layout(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tensor.shape, tensor.dtype, strides
