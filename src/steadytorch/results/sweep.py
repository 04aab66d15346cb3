"""The result of tuning a list of workloads (a sweep): one row per workload."""

from __future__ import annotations

from typing import Literal

import msgspec

from steadytorch.results.shown import Shown
from steadytorch.results.tune import Gain, KeptPlan

RowStatus = Literal["done", "failed", "running", "waiting"]


class SweepRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of one workload in a sweep.

    Attributes:
        workload: the line of the list, without its comment.
        status: `done`: it has a plan; `failed`: see `reason`; `running`: a worker holds its lease;
            `waiting`: no worker does.
        reason: why it failed, or why a plan has no bundle, in one line.
        plan: the stored plan.
        speedup: of the plan over the untouched workload.
        replayed: whether the plan was in the store already.
        device: name of the device that it was tuned on.
        worker: the worker that searched or searches, as `host:pid`.
        seconds: wall-clock time of loading and searching.
    """

    workload: str
    status: RowStatus
    reason: str | None = None
    plan: KeptPlan | None = None
    speedup: Gain | None = None
    replayed: bool = False
    device: str | None = None
    worker: str | None = None
    seconds: float | None = None


class Sweep(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The state of a sweep, complete or not.

    Attributes:
        list: path of the list.
        folder: the sweep's folder.
        rows: one per workload, in the order of the list.
    """

    list: str
    folder: str
    rows: tuple[SweepRow, ...]

    def count(self, status: RowStatus) -> int:
        """Number of rows with the given status."""
        return sum(row.status == status for row in self.rows)
