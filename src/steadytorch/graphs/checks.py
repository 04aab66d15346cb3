"""Whether a recorded step is the eager one: what synchronises in it, and what it leaves behind."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_APART = 1e-3
"""How far loss and update of a graph may be from the eager step's, as a relative L2 distance,
where two eager steps agree better: libraries may choose other algorithms while recording, which
moves 16-bit sums by some 1e-4. A wrong mask, rate or batch moves them by 1e-2 and more."""
NOISE_FACTOR = 4.0
"""And how many times the distance of two eager steps from one state."""
_PROTOTYPE = "Synchronization debug mode is a prototype"
_SYNCHRONISES = "synchronizing CUDA operation"


@contextmanager
def synchronisations(watched: bool = True) -> Iterator[list[str]]:
    """Collects calls of this thread that wait for the GPU, as `file:line` with what to do.

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


class Taken(NamedTuple):
    """What one step left: its loss, gradients, and how far it moved each tensor."""

    loss: Tensor
    gradients: list[Tensor]
    moved: list[Tensor]


class Snapshot:
    """Tensors and random numbers before a step, to begin there again.

    Args:
        tensors: all that a step writes to.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        with torch.no_grad():
            self._kept = [tensor.detach().clone() for tensor in self._tensors]
        self._random = (torch.get_rng_state(), torch.cuda.get_rng_state())

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back in place."""
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)
        torch.set_rng_state(self._random[0])
        torch.cuda.set_rng_state(self._random[1])

    @torch.no_grad()
    def taken(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> Taken:
        """What a step since left, copied."""
        moved = [
            tensor.detach() - kept
            for tensor, kept in zip(self._tensors, self._kept, strict=True)
            if tensor.is_floating_point() or tensor.is_complex()
        ]
        return Taken(loss.clone(), [g.detach().clone() for g in gradients if g is not None], moved)

    @torch.no_grad()
    def disagreement(self, one: Taken, other: Taken, recorded: Taken) -> str | None:
        """Why a recorded step is not the eager one, from two eager ones; None if it is."""
        for what, take in (("loss", 0), ("gradients", 1), ("update", 2)):
            parts = [_listed(run[take]) for run in (one, other, recorded)]
            if len({len(part) for part in parts}) > 1:
                return f"the graph leaves another number of {what} than the eager step"
            noise, found = distance(parts[1], parts[0]), distance(parts[2], parts[0])
            if not found <= max(MOST_APART, NOISE_FACTOR * noise):
                return (
                    f"graph and eager step differ in {what}: relative error {found:.1e}, "
                    f"between two eager steps {noise:.1e}"
                )
        return None


def _listed(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Relative L2 distance of all tensors together.

    Values that are infinite or NaN in both alike count as equal: a GradScaler begins with steps
    whose gradients overflow.
    """
    off = size = 0.0
    for one, other in zip(map(_wide, found), map(_wide, right), strict=True):
        apart = (one - other).masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
        off += float(apart.norm()) ** 2
        size += float(other.masked_fill(~other.isfinite(), 0.0).norm()) ** 2
    if off == 0:
        return 0.0
    return (off / size) ** 0.5 if size else float("inf")


def _wide(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.double()
