"""The result of a performance gate between two revisions: one row per workload."""

from __future__ import annotations

from typing import Literal

import msgspec

from steadytorch.results.compare import Interval
from steadytorch.results.shown import Shown

RowStatus = Literal["judged", "added", "removed", "failed", "skipped"]


class Revision(msgspec.Struct, frozen=True):
    """One of the two revisions that a gate compares.

    Attributes:
        name: as the user typed it; `working tree` for the head.
        commit: full hash of the commit; for the head, of the commit below the working tree.
        changed: number of files that differ from the commit.
    """

    name: str
    commit: str
    changed: int = 0


class GateRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a gate for one workload.

    Attributes:
        workload: as the user typed it.
        status: `judged`: both sides were timed; `added` or `removed`: it exists on the head or on
            the base only; `failed`: it fails on a side, see `reason`; `skipped`: interrupted before
            it could be judged.
        reason: why it has no verdict, in one line; None if it has one.
        verdict: `faster`, `slower`, `tie` or `undecided`, said of the head and beyond the
            threshold; None unless judged.
        interval: the effect of the head on time, as a fraction, at level 1 - `alpha`; `effect` in
            JSON.
        alpha: error probability of the interval, after its division among workloads and looks.
        mde: minimum detectable effect at this number of processes, as a fraction; None if unknown.
        base_median_ns: median block time of the base; None if nothing was timed.
        head_median_ns: of the head.
        processes: fresh processes of each side.
        pairs: pairs of blocks, over all processes.
        samples: per process, the pairs (block of the base, block of the head) in ns; `samples_ns`
            in JSON.
    """

    workload: str
    status: RowStatus
    reason: str | None = None
    verdict: str | None = None
    interval: Interval | None = msgspec.field(name="effect", default=None)
    alpha: float | None = None
    mde: float | None = None
    base_median_ns: float | None = None
    head_median_ns: float | None = None
    processes: int = 0
    pairs: int = 0
    samples: tuple[tuple[tuple[float, float], ...], ...] = msgspec.field(
        name="samples_ns", default=()
    )


class GateResult(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The result of a performance gate: the working tree compared with a base revision.

    Attributes:
        base: the revision compared against.
        head: the working tree.
        threshold: slowdown from which the gate fails, as a fraction.
        familywise_alpha: probability of a false verdict on any of the workloads.
        metric: `latency` or `period`.
        rows: one per workload, in the order given.
        gate_failed: whether a workload is slower beyond the threshold, with confidence.
        notes: remarks for the reader, such as uncommitted changes.
        interrupted: whether the user stopped it; earlier rows are kept.
    """

    base: Revision
    head: Revision
    threshold: float
    familywise_alpha: float
    metric: str
    rows: tuple[GateRow, ...]
    gate_failed: bool
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def workload(self) -> str:
        """All workload names, comma-separated, as the title of a saved result."""
        return ", ".join(row.workload for row in self.rows)

    def count(self, verdict: str) -> int:
        """Number of rows with the given verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def failed(self) -> tuple[GateRow, ...]:
        """Rows without a verdict because the workload failed on the base or on the head."""
        return tuple(row for row in self.rows if row.status == "failed")
