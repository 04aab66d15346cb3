"""Sets the number of threads per operator on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

import msgspec
import torch

from steadytorch.ambient import flags
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import decide
from steadytorch.workload.workload import Workload


class _ThreadSetting:
    """PyTorch's thread count as an attribute that `ambient.flags` can set and restore."""

    @property
    def count(self) -> int:
        return torch.get_num_threads()

    @count.setter
    def count(self, value: int) -> None:
        torch.set_num_threads(value)


_SETTING = _ThreadSetting()


class _Process:
    """Whether this process was forked, which leaves it without its parent's OpenMP threads."""

    is_forked = False


def _in_child() -> None:
    _Process.is_forked = True


os.register_at_fork(after_in_child=_in_child)


class Threads(Transform):
    """Changes the number of threads per operator: fewer can be faster and steadier.

    In a training step, the changed thread count covers the forward pass only.

    PyTorch sets the thread count of the calling thread and the initial count of new threads. A
    thread whose first operator runs during a call keeps the changed thread count. OpenMP's own
    setter leaves new threads alone, but would not reset convolutions cached by oneDNN, which
    remember a thread count.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The number of threads."""

        count: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1

    name = "threads"
    risk = Risk.HOST
    process_wide = False

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """One thread per physical core, half as many, and one; the current count is left out."""
        present = torch.get_num_threads()
        cores = facts.cores_physical or present
        counts = dict.fromkeys((cores, max(1, cores // 2), 1))
        return tuple(cls.Parameters(count) for count in counts if count != present)

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a workload on the CPU and at least one logical core per thread."""
        count, cores = self.parameters.count, facts.cores_logical
        return decide(
            (facts.device != "cpu", "the workload does not run on the CPU"),
            (cores is not None and count > cores, f"{count} threads exceed {cores} logical cores"),
            (count == torch.get_num_threads(), "already on"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that sets the thread count for each call and restores it afterwards.

        Raises:
            UnsupportedError: raising the count in a forked process, where OpenMP may deadlock.
        """
        if _Process.is_forked and self.parameters.count > torch.get_num_threads():
            raise UnsupportedError(
                f"{self.parameters.count} threads may deadlock in a forked process, which lost its "
                "parent's OpenMP threads: start the process with spawn"
            )
        setting = (_SETTING, "count", self.parameters.count)

        def scope() -> AbstractContextManager[Any]:
            return flags(setting)

        yield workload.with_model(Scoped(workload.model, scope))
