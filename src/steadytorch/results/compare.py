"""The result of comparing workload B with workload A, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from steadytorch.results.shown import Shown


class Side(msgspec.Struct, frozen=True):
    """One of the two workloads of a comparison.

    Attributes:
        name: its name in results.
        median_ns: median over all pairs.
    """

    name: str
    median_ns: float


class Interval(msgspec.Struct, frozen=True):
    """A relative change in time, with its interval: -0.12 means 12 % less time.

    Attributes:
        estimate: None without data.
        low: lower end of the 99 % interval; None if the data support none.
        high: upper end; None likewise.
    """

    estimate: float | None
    low: float | None
    high: float | None


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The relative change in time from workload A to workload B, with its evidence.

    Attributes:
        estimate: a fraction; -0.12 is 12 % less time. None without data.
        low: lower end of the 99 % interval; None if the data support none.
        high: upper end; None likewise.
        verdict: `faster`, `slower`, `tie` or `undecided`, said of B.
        claim: `process` or `machine`.
        pairs: number of pairs of blocks; 0 for saved results.
        processes: fresh processes of each side.
        mde: minimum detectable effect, as a fraction; None if unknown.
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
        """Whether the lower end of the interval shows B slower than A by more than `limit`."""
        return self.low is not None and self.low > limit


class SustainedRun(msgspec.Struct, frozen=True):
    """One side of a comparison, run alone for several seconds.

    Attributes:
        side: `a` or `b`.
        seconds: duration of the run.
        median_ns: median of its second half, after the clock has settled.
        sm_clock_mhz: median SM clock in that half; None if unknown.
    """

    side: str
    seconds: float
    median_ns: float
    sm_clock_mhz: float | None


class CompareResult(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on workload B against workload A; create it with `CompareResult.of`.

    Attributes:
        interval: estimate and interval of the effect; `effect` in JSON.
        verdict: `faster`, `slower`, `tie` or `undecided`, said of B.
        claim: `process` or `machine`.
        pairs: number of pairs of blocks; 0 for saved results.
        processes: fresh processes of each side.
        mde: minimum detectable effect, as a fraction; None if unknown.
        metric: `latency` or `period`.
        a: the first side.
        b: the second side.
        dwells: each side alone, if a power limit holds the clock; from the first processes.
        note: a caveat for the reader, such as why there is no verdict; else empty.
        gate_failed: whether B failed the gate that the user set.
        samples: per process, the pairs (block of A, block of B) in ns; `samples_ns` in JSON.
        failed: name and error of the workload that failed, else None. Earlier pairs are kept.
        interrupted: whether the user stopped the comparison.
    """

    interval: Interval = msgspec.field(name="effect")
    verdict: str
    claim: str
    pairs: int
    processes: int
    mde: float | None
    metric: str
    a: Side
    b: Side
    dwells: tuple[SustainedRun, ...] = ()
    note: str = ""
    gate_failed: bool = False
    samples: tuple[tuple[tuple[float, float], ...], ...] = msgspec.field(
        name="samples_ns", default=()
    )
    failed: str | None = None
    interrupted: bool = False

    @classmethod
    def of(cls, effect: Effect, **fields: object) -> CompareResult:
        """Creates a result from an effect and the fields that `Effect` does not have."""
        own = {name: getattr(effect, name) for name in Effect.__struct_fields__}
        ends = [own.pop(name) for name in Interval.__struct_fields__]
        return cls(interval=Interval(*ends), **own, **fields)  # pyright: ignore[reportArgumentType]

    @property
    def effect(self) -> Effect:
        """The relative change in time from A to B, with its evidence."""
        ends = self.interval
        return Effect(
            estimate=ends.estimate,
            low=ends.low,
            high=ends.high,
            verdict=self.verdict,
            claim=self.claim,
            pairs=self.pairs,
            processes=self.processes,
            mde=self.mde,
        )

    @property
    def workload(self) -> str:
        """Both workload names, joined by a slash, as the title of a saved result."""
        return f"{self.a.name} / {self.b.name}"


def effect_of(dwells: Sequence[SustainedRun]) -> float:
    """The relative change in time from A to B, by the geometric means of sustained runs."""
    means = []
    for side in "ab":
        logs = [math.log(each.median_ns) for each in dwells if each.side == side]
        means.append(sum(logs) / len(logs))
    return math.expm1(means[1] - means[0])
