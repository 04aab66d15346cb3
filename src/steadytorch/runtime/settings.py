"""Serialises calls that need different process-wide settings of PyTorch.

A plan may set flags around each call (TF32, cuDNN's modes, the attention backend). These hold for
the whole process: concurrent calls would compute under each other's flags and restore them in the
wrong order. While an executor with flags is alive or being built, calls of all tuned modules
therefore take turns. On a GPU a call returns after the launch, so this costs little. Without such
executors no call waits, and a call that finds an executor being built or checked runs untouched.

Calls of models outside of tuned modules cannot be serialised. If other threads make such calls,
tune without these transforms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

SWITCH = "STEADYTORCH_MODE"
"""Environment variable; `off` makes all tuned modules of the process run untouched."""

TURNS = RLock()
"""Held by every call while `needed.alive`, and while an executor is built or checked. Building runs
models, records and compiles, so only one module builds at a time. Acquire it before other locks."""


class _Needed:
    """Counts the scopes in which live executors set process-wide flags."""

    alive = 0


needed = _Needed()


def after_fork() -> None:
    """Resets lock and count in a forked child, where the parent's executors do not run."""
    global TURNS
    TURNS = RLock()
    needed.alive = 0


def is_switched_off() -> bool:
    """Whether the environment switches all tuned serving off."""
    return os.environ.get(SWITCH, "").strip().lower() == "off"


@contextmanager
def setting_flags() -> Iterator[None]:
    """Counts a scope of a live executor that sets flags at each call."""
    with TURNS:
        needed.alive += 1
    try:
        yield
    finally:
        with TURNS:
            needed.alive = max(0, needed.alive - 1)  # 0 already in a forked child
