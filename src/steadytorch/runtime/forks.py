"""Switches inherited tuned modules to the untouched model in forked processes.

Only the forking thread survives in the child. A parallel region of OpenMP would wait forever for
lost threads, and locks held by other threads stay locked. The child therefore runs inherited
modules untouched until it calls `refresh`.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from steadytorch.runtime import settings

FORKED = "the process was forked after the plan was applied; refresh() serves tuned again"


class Inherited(Protocol):
    """An object with locks that is switched off in a forked child."""

    def after_fork(self) -> None:
        """Replaces locks and switches to untouched calls; called in the child."""


_modules: WeakSet[Inherited] = WeakSet()


def watch(module: Inherited) -> None:
    """Registers a module for `after_fork`, as long as it lives."""
    _modules.add(module)


def _in_child() -> None:
    settings.after_fork()
    for module in list(_modules):
        module.after_fork()


os.register_at_fork(after_in_child=_in_child)
