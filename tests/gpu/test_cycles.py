from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from steadytorch.bench.counting import counting
from steadytorch.device.telemetry import snapshot
from steadytorch.measure.sampler import CudaSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _counted(step, count):
    """Periods in ns, and the clock over each in MHz."""
    sampler = CudaSampler()
    sampler.periods(step, 20)
    with counting(sampler, torch.device("cuda", torch.cuda.current_device()), 1e6) as why:
        assert why is None
        times, _ = sampler.periods(step, count)
        assert sampler.clocks_mhz is not None
        return times, sampler.clocks_mhz


@pytest.mark.parametrize("cycles", [600_000, 10_000_000])
def test_a_kernel_of_so_many_cycles_takes_them_by_the_clock_that_was_counted(cycles):
    times, clocks = _counted(lambda: torch.cuda._sleep(cycles), 100)
    assert np.isfinite(clocks).mean() > 0.9
    assert np.nanmedian(times * clocks * 1e-3) == pytest.approx(cycles, rel=0.03)


def test_the_counted_clock_is_one_that_the_gpu_can_have():
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    _, clocks = _counted(lambda: left @ left, 2000)
    assert np.isfinite(clocks).mean() > 0.9
    highest = snapshot("cuda").sm_clock_max_mhz
    if highest is None:
        pytest.skip("NVML does not tell the highest clock here")
    assert 0.1 * highest < np.nanmin(clocks)
    assert np.nanmax(clocks) < 1.02 * highest


def test_the_counters_go_on_while_there_is_nothing_to_do():
    """Else a host that is slow would look like a clock that is low."""

    def step():
        torch.cuda._sleep(2_000_000)
        torch.cuda.synchronize()
        time.sleep(0.003)

    _, paused = _counted(step, 100)
    _, busy = _counted(lambda: torch.cuda._sleep(2_000_000), 100)
    assert np.nanmedian(paused) > 0.7 * np.nanmedian(busy)
