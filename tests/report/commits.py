"""Gates and series over commits, as the library makes them."""

from __future__ import annotations

from steadytorch.results.compare import Interval
from steadytorch.results.gate import GateResult, GateRow, Revision
from steadytorch.results.track import TrackChange, TrackPoint, TrackResult, TrackSeries

JUDGED = GateRow(
    workload="resnet50",
    status="judged",
    verdict="tie",
    interval=Interval(0.001, -0.004, 0.006),
    alpha=0.0033,
    mde=0.007,
    base_median_ns=12e6,
    head_median_ns=12.01e6,
    processes=5,
    pairs=100,
    samples=(((12e6, 12.01e6),) * 20,) * 5,
)
SLOWER = GateRow(
    workload="serving.py:factory",
    status="judged",
    verdict="slower",
    interval=Interval(0.05, 0.04, 0.06),
    alpha=0.0033,
    mde=0.01,
    base_median_ns=1e6,
    head_median_ns=1.05e6,
    processes=8,
    pairs=160,
)
ADDED = GateRow(workload="work.py:new", status="added", reason="it exists on the head only")
FAILED = GateRow(
    workload="work.py:broken", status="failed", reason="it fails on the head: OSError: | no <disk>"
)
STEPPED = TrackSeries(
    workload="resnet50",
    machine="cpu, AMD EPYC, 2 logical cores",
    metric="latency",
    unit="ns",
    base="",
    points=tuple(
        TrackPoint(
            f"c{number:07d}",
            f"2026-11-{number + 1:02d}T00:00:00+00:00",
            (1.0 if number < 20 else 1.02) * 1e6,
            (0.99 if number < 20 else 1.01) * 1e6,
            None if number == 3 else 1.03e6,
            f"c{number}.json",
        )
        for number in range(28)
    ),
    changes=(TrackChange(20, 24, Interval(0.02, 0.015, 0.025), 19, 20),),
)


def gated(*rows: GateRow, **fields) -> GateResult:
    made = {
        "base": Revision("origin/main", "0123456789abcdef"),
        "head": Revision("working tree", "fedcba9876543210", 2),
        "threshold": 0.01,
        "familywise_alpha": 0.01,
        "metric": "latency",
        "rows": rows or (JUDGED,),
        "gate_failed": False,
    }
    return GateResult(**made | fields)


def tracked(*series: TrackSeries, **fields) -> TrackResult:
    return TrackResult(**{"alpha": 0.01, "series": series} | fields)
