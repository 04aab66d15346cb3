"""What a forked process does with the tuned modules that it inherits.

Only the thread that forked goes on. OpenMP's threads are gone, and the next parallel region with
more than one thread waits for them for ever; locks that other threads held stay locked. So the
child runs inherited modules untouched, as it would run the model, until it calls `refresh`.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from steadytorch.runtime import settings

FORKED = "the process was forked after the plan was applied; refresh() serves tuned again"


class Inherited(Protocol):
    """What has locks, and is switched off in a forked child."""

    def after_fork(self) -> None:
        """Makes locks anew and serves untouched; called in the child."""


_modules: WeakSet[Inherited] = WeakSet()


def watch(module: Inherited) -> None:
    """Has a module told of forks, as long as it lives."""
    _modules.add(module)


def _in_child() -> None:
    settings.after_fork()
    for module in list(_modules):
        module.after_fork()


os.register_at_fork(after_in_child=_in_child)
