"""Keeping calls apart that need different process-wide settings of PyTorch.

A plan may set flags around each of its calls (TF32, cuDNN's modes, the attention backend). They
hold for the whole process: two threads in calls that set them differently would compute under each
other's, and put back what they found in the wrong order. So while any such executor is alive, or
being built, the calls of all tuned modules take turns. On a GPU a call launches and returns, so
that little is lost; with none alive no call waits, and one that finds an executor being built or
checked runs the model untouched. Calls of models that no tuned module makes are out of reach: where
another thread runs those, tune without these transforms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

SWITCH = "STEADYTORCH_MODE"
"""Environment variable; `off` makes everything of the process run untouched."""

TURNS = RLock()
"""Held by every call while `needed`, and while executors are built and checked, one at a time.
Building runs models, records and compiles, whatever module it is for. Taken before other locks."""


class _Needed:
    """How often live executors set process-wide flags in a call; true if any do."""

    alive = 0


needed = _Needed()


def after_fork() -> None:
    """Lets go of what threads of the parent held; executors that it built do not run here."""
    global TURNS
    TURNS = RLock()
    needed.alive = 0


def is_switched_off() -> bool:
    """Whether the environment has everything run untouched."""
    return os.environ.get(SWITCH, "").strip().lower() == "off"


@contextmanager
def setting_flags() -> Iterator[None]:
    """Counts one more scope of a live executor that sets flags at each of its calls."""
    with TURNS:
        needed.alive += 1
    try:
        yield
    finally:
        with TURNS:
            needed.alive = max(0, needed.alive - 1)  # 0 already in a forked child
