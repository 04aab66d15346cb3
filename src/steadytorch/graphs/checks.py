"""Checks of a recorded step: synchronising calls, and agreement with the eager step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_APART = 1e-3
"""Maximum relative L2 distance between graph and eager step, for loss, gradients and update each.
Libraries may choose other algorithms while recording, which moves 16-bit sums by about 1e-4. A
wrong mask, rate or batch moves them by 1e-2 and more."""
NOISE_FACTOR = 4.0
"""The maximum is at least this multiple of the distance between two eager steps from one state."""
ROOM = 4
"""A snapshot stays on the GPU if this many copies of all tensors that a step writes to fit there:
the state before, the first step's updates and its gradients, and one spare."""
_PROTOTYPE = "Synchronization debug mode is a prototype"
_SYNCHRONISES = "synchronizing CUDA operation"


@contextmanager
def synchronisations(watched: bool = True) -> Iterator[list[str]]:
    """Collects calls of this thread that wait for the GPU, as `file:line` with advice.

    Args:
        watched: False to collect nothing.
    """
    found: list[str] = []
    if not watched:
        yield found
        return
    before, here = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    others: list[tuple[Any, ...]] = []

    def noted(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if _SYNCHRONISES not in str(message):
            others.append((message, category, filename, lineno))
        elif threading.get_ident() == here:
            found.append(_format_wait(filename, lineno))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for message, category, filename, lineno in others:
        if _PROTOTYPE not in str(message):  # for whoever listens
            warnings.warn_explicit(message, category, filename, lineno)


def _format_wait(file: str, line: int) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        text = ""
    code = f" `{text[:60]}`" if text else ""
    return (
        f"{Path(file).name}:{line}{code} waits for the GPU: keep the value on the GPU, "
        "and read it outside of the step"
    )


class _Taken(NamedTuple):
    """Results of one step: its loss, its gradients, and the change of each tensor."""

    loss: Iterable[Tensor]
    gradients: Iterable[Tensor]
    update: Iterable[Tensor]


class Snapshot:
    """State before a step (tensors, random state), from which several steps run and are compared.

    The first step's results are kept; the results of later steps are compared with them, one tensor
    at a time.

    Args:
        tensors: all that a step writes to.
        room: copies go to the host unless this multiple of their size is free beside a step.
    """

    def __init__(self, tensors: Sequence[Tensor], room: int = ROOM) -> None:
        self._tensors = list(tensors)
        self._on_host = room * sum(t.nbytes for t in self._tensors) > max(free_bytes(), 0)
        with torch.no_grad():
            self._kept = [self._copy(tensor) for tensor in self._tensors]
        self._random = (torch.get_rng_state(), torch.cuda.get_rng_state())
        self._first: _Taken | None = None
        self._apart: list[tuple[float, ...] | None] = []
        self._drawn: list[Tensor] = []

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu" if self._on_host else tensor.device, copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the tensors, in place, and the random state."""
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)
        torch.set_rng_state(self._random[0])
        torch.cuda.set_rng_state(self._random[1])

    @torch.no_grad()
    def taken(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Keep the results of the first step, or compare the results of a later step with them."""
        moved = (
            tensor.detach() - kept.to(tensor.device)
            for tensor, kept in zip(self._tensors, self._kept, strict=True)
            if tensor.is_floating_point() or tensor.is_complex()
        )
        self._drawn.append(torch.cuda.get_rng_state())
        left = _Taken([loss], [g for g in gradients if g is not None], moved)
        if self._first is None:
            self._first = _Taken(*([self._copy(tensor) for tensor in part] for part in left))
            return
        try:
            self._apart.append(tuple(map(distance, left, self._first)))
        except ValueError:  # of another length
            self._apart.append(None)

    def disagreement(self) -> str | None:
        """Return how the third step (a replay) differs from the first two (eager), or None.

        The tolerance is `MOST_APART` or, if larger, `NOISE_FACTOR` times the distance between the
        two eager steps.
        """
        noises, found = self._apart
        if noises is None or found is None:
            return "the graph leaves another number of gradients than the eager step"
        for what, noise, apart in zip(("loss", "gradients", "update"), noises, found, strict=True):
            if not apart <= max(MOST_APART, NOISE_FACTOR * noise):
                return (
                    f"graph and eager step differ in {what}: relative error {apart:.1e}, "
                    f"between two eager steps {noise:.1e}{self._other_draws()}"
                )
        return None

    def _other_draws(self) -> str:
        """Message suffix if the graph draws other random numbers than the eager step, or ""."""
        eager, _, replayed = self._drawn
        if torch.equal(eager, replayed):
            return ""
        return (
            "; the model draws other random numbers while it is recorded: its code asks whether a "
            "graph is being captured, as that of transformers does for attention masks. Compiled "
            "code does not ask"
        )


def free_bytes() -> int:
    """Memory of the current GPU beside that of a step, PyTorch's cache included.

    A step takes what this process has had at its peak so far.
    """
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    of_step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached - of_step


def distance(found: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Relative L2 distance between two sequences of tensors, one pair in memory at a time.

    Equal infinities, and NaN in both tensors, count as equal, because the first steps of a
    GradScaler may overflow.

    Raises:
        ValueError: there are more tensors on one side.
    """
    off = size = 0.0
    for mine, theirs in zip(found, right, strict=True):
        one, other = _wide(mine), _wide(theirs.to(mine.device))
        apart = (one - other).masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
        off += float(apart.norm()) ** 2
        size += float(other.masked_fill(~other.isfinite(), 0.0).norm()) ** 2
    if off == 0:
        return 0.0
    return (off / size) ** 0.5 if size else float("inf")


def _wide(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.double()
