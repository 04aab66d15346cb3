"""Switches tuned modules inherited by a forked process to the untouched model.

A forked child contains only the thread that called `fork`. In the child, OpenMP parallel regions
would wait forever for missing threads, and locks held by other threads stay locked. Inherited tuned
modules therefore run untouched in the child until it calls their `refresh`.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from steadytorch.runtime import settings

FORKED = "the process was forked after the plan was applied; refresh() serves tuned again"


class Inherited(Protocol):
    """A tuned module whose `after_fork` is called in forked child processes."""

    def after_fork(self) -> None:
        """Replaces the locks and switches to the untouched model; called in the forked child."""


_modules: WeakSet[Inherited] = WeakSet()


def watch(module: Inherited) -> None:
    """Registers a module so that forked children call its `after_fork`; holds a weak reference."""
    _modules.add(module)


def _in_child() -> None:
    settings.after_fork()
    for module in list(_modules):
        module.after_fork()


os.register_at_fork(after_in_child=_in_child)
