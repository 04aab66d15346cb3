"""Keeps random number generators as they were, and tells whether numbers were drawn."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

OBJECTS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Classes of generators that a model may hold."""


@contextmanager
def restored() -> Iterator[None]:
    """Restores PyTorch's, NumPy's and Python's generators at the end of the `with` block.

    Of GPUs, only generators that existed at its beginning are restored.
    """
    host = HostStates()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            host.restore()


def state_of(generator: Any) -> Any:
    """The state of a generator of one of `OBJECTS`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Puts a generator back into a state from `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def digest(generator: Any) -> int:
    """A number that tells two states of a generator of one of `OBJECTS` apart."""
    state = state_of(generator)
    return hash(state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state))


def host_states() -> tuple[Any, bytes]:
    """States of Python's and NumPy's global generators, for comparison."""
    return random.getstate(), pickle.dumps(np.random.get_state())


class HostStates:
    """A snapshot of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self._states, self._numpy = host_states(), np.random.get_state()

    def drawn(self) -> bool:
        """Whether numbers were drawn since the snapshot."""
        return host_states() != self._states

    def restore(self) -> None:
        """Restores the generators, so that the same numbers are drawn again."""
        random.setstate(self._states[0])
        np.random.set_state(self._numpy)
