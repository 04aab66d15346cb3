"""Keeps what is alive out of Python's garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import decide
from steadytorch.workload.workload import Workload

# Some versions of Python start with a few hundred frozen objects of their own; a process that froze
# its objects after importing PyTorch has many times that.
_FROZEN_BY_PYTHON = 2000


class GcFreeze(Transform):
    """Objects alive on entering are not looked at by later collections, which get short.

    The one transform whose effect lasts between calls. Collections still happen, and still free
    what is made later.
    """

    name = "gc_freeze"
    risk = Risk.HOST

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Applies unless the process has frozen its objects already."""
        return decide((_is_frozen(), "already on"))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the same workload; on leaving unfreezes, unless objects were frozen before."""
        was_frozen = _is_frozen()
        gc.collect()
        gc.freeze()
        try:
            yield workload
        finally:
            if not was_frozen:
                gc.unfreeze()


def _is_frozen() -> bool:
    return gc.get_freeze_count() > _FROZEN_BY_PYTHON
