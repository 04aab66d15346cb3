from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.bench.compare import compare_live
from steadytorch.bench.measure import measure
from steadytorch.bench.sustained_runs import ROUNDS
from steadytorch.measure.sampler import CLOCKS_AGREE
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _workload(layers=1):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(layers)])
    return Workload(model.eval(), torch.ones(2048, 2048))


def test_period_and_latency_are_measured_apart():
    (only,) = measure(_workload(), budget="2s", device="cuda").processes
    assert (only.period.metric, only.latency.metric) == ("period", "latency")
    # The queue is kept filled for one, and emptied for the other.
    assert only.period.median_ns < only.latency.median_ns
    assert only.host.enqueue_median_ns > 0
    assert abs(only.device.clock_difference) < CLOCKS_AGREE
    assert only.set_up.peak_memory_bytes >= 4 * 3 * 2048**2


@pytest.mark.parametrize("metric", ["latency", "period"])
def test_three_layers_are_slower_than_one(metric):
    sides = (_workload(), (), "one"), (_workload(3), (), "three")
    effect = compare_live(*sides, metric=metric, device="cuda").effect
    assert effect.slower_than(0.02)


def test_sides_that_a_power_limit_holds_run_by_themselves_too():
    """Matrix products of 8192 in bf16 draw more than any of these GPUs may."""

    def products():
        model = nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16)
        return Workload(model.eval(), torch.randn(8192, 8192, dtype=torch.bfloat16))

    found = compare_live((products(), (), "a"), (products(), (), "b"), device="cuda")
    if not found.dwells:
        pytest.skip("no power limit was reached on this GPU")
    assert [run.side for run in found.dwells].count("a") == ROUNDS
    assert all(run.sm_clock_mhz > 0 for run in found.dwells)
