"""What a comparison says of B against A."""

from __future__ import annotations

import msgspec

from steadytorch.bench.sustained_runs import Dwell


class Side(msgspec.Struct, frozen=True):
    """One of the two that are compared.

    Attributes:
        name: what results call it.
        median_ns: its median over all pairs.
    """

    name: str
    median_ns: float


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of B on time, and what it rests on.

    Attributes:
        estimate: as a fraction; -0.12 is 12 % less time. None without data.
        low: lower end of its interval, None where none may be claimed.
        high: upper end.
        verdict: faster, slower, tie or undecided, of B.
        claim: `process` or `machine`.
        pairs: pairs of blocks it rests on; 0 for saved results.
        processes: fresh processes of each side.
        mde: the smallest effect that would have been found, as a fraction; None where unknown.
    """

    estimate: float | None
    low: float | None
    high: float | None
    verdict: str
    claim: str
    pairs: int
    processes: int
    mde: float | None

    def slower_than(self, limit: float) -> bool:
        """Whether B is slower than A by more than `limit` (a fraction), with confidence."""
        return self.low is not None and self.low > limit


class CompareResult(msgspec.Struct, frozen=True, kw_only=True):
    """What pairs, or processes, say of B against A.

    Attributes:
        a: the first.
        b: the second.
        metric: `latency` or `period`.
        effect: of B.
        note: what the reader must know, such as why nothing is claimed; else empty.
        samples: per process, the pairs (block of A, block of B) in ns.
        failed: which workload failed and why, None if none did; what was taken before is kept.
        interrupted: whether the user stopped it.
        dwells: each side by itself, where a power limit holds the clock; from the first processes.
    """

    a: Side
    b: Side
    metric: str
    effect: Effect
    note: str = ""
    samples: tuple[tuple[tuple[float, float], ...], ...] = ()
    failed: str | None = None
    interrupted: bool = False
    dwells: tuple[Dwell, ...] = ()
