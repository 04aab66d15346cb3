"""Serialises calls that need different process-wide PyTorch settings.

A tuned call may set flags: TF32, cuDNN's modes or the attention backend. Flags hold for the whole
process, so concurrent calls would see each other's flags and restore them in the wrong order. While
any executor that sets flags is alive or being built, calls of all tuned modules therefore run one
at a time. Serialising costs little on a GPU, because a call returns after its kernel launches. If
no executor sets flags, only smoke checks of training plans wait. Other calls that must build or
check an executor run untouched while another thread does so.

Calls of models outside of tuned modules are not serialised. If other threads call untuned models,
tune without transforms that set flags.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

SWITCH = "STEADYTORCH_MODE"
"""Environment variable; `off` makes all tuned modules of the process run untouched."""

TURNS = RLock()
"""Held by every call while `needed.alive`, and while an executor is built or checked. Building runs
models, records and compiles, so only one module builds at a time. Acquire it before other locks."""


class _Needed:
    """Counts live executors that set process-wide flags, once per flag-setting transform."""

    alive = 0


needed = _Needed()


def after_fork() -> None:
    """Resets the lock and the count in a forked child, where the parent's executors do not run."""
    global TURNS
    TURNS = RLock()
    needed.alive = 0


def is_switched_off() -> bool:
    """Whether the environment variable `STEADYTORCH_MODE` switches off all tuned serving."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value not in ("", "off"):
        _warn_of(value)
    return value == "off"


@cache
def _warn_of(value: str) -> None:
    logging.getLogger("steadytorch").warning("%s=%s does nothing: set it to off", SWITCH, value)


@contextmanager
def setting_flags() -> Iterator[None]:
    """Counts one flag-setting transform of a live executor while the context is open."""
    with TURNS:
        needed.alive += 1
    try:
        yield
    finally:
        with TURNS:
            needed.alive = max(0, needed.alive - 1)  # 0 already in a forked child
