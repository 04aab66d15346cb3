"""Batches of a loader, one a step: taken apart, moved to the device, begun anew at the end."""

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
"""What profilers see a step wait for: `torch.utils.data` has the word in its ranges."""
_END = object()


class Batch(NamedTuple):
    """What one step works on.

    Attributes:
        inputs: positional arguments of the model.
        kwargs: its keyword arguments.
        targets: arguments of the loss beside the model's output: none, or one.
    """

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a mapping, a tuple, a list or a lone value stands for."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, list):
        return tuple(given), {}
    return (given if isinstance(given, tuple) else (given,)), {}


def read_batch(given: Any, supervised: bool) -> Batch:
    """A batch as a loader gives it, taken apart.

    Args:
        given: the model's arguments, in any form that the inputs of a workload may have; where it
            is `supervised`, a pair of these and the targets.
        supervised: whether there are targets.

    Raises:
        UsageError: supervised, and no pair.
    """
    if not supervised:
        return Batch(*arguments(given))
    if not (isinstance(given, tuple | list) and len(given) == 2):
        kind = type(given).__name__
        size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise UsageError(
            f"a training step takes batches (inputs, targets), the loader gave a {kind}{size}"
        )
    inputs, targets = given
    return Batch(*arguments(inputs), (targets,))


def first_batch(loader: Any, supervised: bool) -> Batch:
    """The first batch of a loader that can be begun anew.

    Raises:
        UsageError: it cannot be iterated over, or only once, or has no batch.
        Exception: whatever the loader raises.
    """
    if not isinstance(loader, Iterable):
        raise UsageError(
            f"a loader gives batches when iterated over, a {type(loader).__name__} does not"
        )
    source = iter(loader)
    if source is loader:
        raise UsageError(
            f"the loader is a {type(loader).__name__}, which gives its batches only once: pass "
            "what can be iterated over again, such as a DataLoader"
        )
    given = next(source, _END)
    if given is _END:
        raise UsageError("the loader gives no batch")
    return read_batch(given, supervised)


class Targeted(nn.Module):
    """A loss of output and targets as a loss of the output alone, with the targets of one batch.

    A module, so that targets move along and are converted with it.

    Args:
        loss: maps the model's output and the targets to a scalar tensor.
        targets: tensors, nested at will.
    """

    def __init__(self, loss: TargetLoss, *targets: Any) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of an output for these targets."""
        return self.loss(output, *self.targets)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Targeted:
        self.targets = map_tensors(fn, self.targets)
        return super()._apply(fn, recurse)


@dataclass(frozen=True)
class Feed:
    """Where a workload's batches come from.

    Attributes:
        loader: gives batches, anew each time it is iterated over.
        on_host: whether its batches hold tensors in the host's memory.
    """

    loader: Iterable[Any]
    on_host: bool

    def batches(
        self, example: Batch, device: torch.device, supervised: bool = False
    ) -> Iterator[Batch]:
        """Batches on the device without end, each moved there by a plain `.to(device)`.

        A batch of other shapes, layouts or constants than the example's, as a last short one, is
        passed over: steps are steps of one signature.

        Args:
            example: what batches must look like; its targets and its device do not matter.
            device: where they go.
            supervised: whether batches are pairs of inputs and targets.

        Returns:
            An iterator that raises `UsageError` where from the first to the last batch of the
            loader none is like the example.
        """
        return _Batches(self.loader, example, device, supervised)


class _Batches(Iterator[Batch]):
    """See `Feed.batches`. No generator: its frame would hold on to the batch that it gave last."""

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
                "the loader gave no batch of the shapes of its first one from its start to its "
                "end: every step needs one"
            )
        self._source, self._found = iter(self._loader), False


def _next(source: Iterator[Any]) -> Any:
    with record_function(_MARK):
        return next(source, _END)


def _moved(values: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), values)


def _alike(one: Any, other: Any) -> bool:
    """Whether two calls with these arguments have one signature, wherever their tensors are."""
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
