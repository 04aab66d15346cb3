"""Rows of a sweep."""

from __future__ import annotations

from steadytorch.results.sweep import SweepRow
from steadytorch.results.tune import Gain, KeptPlan

PLAN = KeptPlan("abcdef012345", "p.json", ("cuda_graph",), "latency")
UNTOUCHED = KeptPlan("abcdef012346", "p.json", (), "latency")
GAIN = Gain(1.324, 1.281, 1.359, "process", "faster", 9)
NO_INTERVAL = Gain(1.1, None, None, "process", "faster", 0)


def done(**changed):
    fields = {"plan": PLAN, "speedup": GAIN, "worker": "host:7", "seconds": 41.2}
    return SweepRow(workload="resnet18 --batch 8", status="done", **fields | changed)


def failed(reason):
    return SweepRow(workload="bad", status="failed", reason=reason, worker="host:7", seconds=2.0)


DONE, REFUSED = done(), failed("the data [are] missing")
