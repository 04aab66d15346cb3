"""The result of comparing B with A."""

from __future__ import annotations

import msgspec

from steadytorch.bench.sustained_runs import Dwell


class Side(msgspec.Struct, frozen=True):
    """One side of a comparison.

    Attributes:
        name: name in results.
        median_ns: median over all pairs.
    """

    name: str
    median_ns: float


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of B on time, with its evidence.

    Attributes:
        estimate: effect as a fraction; -0.12 is 12 % less time. None without data.
        low: lower end of its interval; None if the data support no interval.
        high: upper end.
        verdict: verdict about B: faster, slower, tie or undecided.
        claim: `process` or `machine`.
        pairs: number of block pairs; 0 for saved results.
        processes: fresh processes of each side.
        mde: minimum detectable effect as a fraction; None if unknown.
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
    """The result of comparing B with A.

    Attributes:
        a: the first side.
        b: the second side.
        metric: `latency` or `period`.
        effect: the effect of B.
        note: a caveat, such as why there is no verdict; else empty.
        samples: pairs (block of A, block of B) in ns, per process.
        failed: which workload failed and why, or None; earlier samples are kept.
        interrupted: whether the user stopped it.
        dwells: sustained runs of each side in the first processes, if a power limit was active.
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
