"""Counting cycles while periods are timed. The sampler times the host and fakes a clock."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from steadytorch import transforms
from steadytorch.bench import counting as module
from steadytorch.bench.bench_worker import Series, WorkloadHandler, save_payload
from steadytorch.bench.counting import COUNTED_FROM_NS, UNCOUNTED, counted_of, counting, noted
from steadytorch.device.recording import Recording
from steadytorch.errors import UnsupportedError
from steadytorch.measure.sampler import CudaSampler, HostSampler
from steadytorch.process.messages import encode
from steadytorch.workload.workload import Workload

DEVICE = torch.device("cuda", 3)


class Sampler(CudaSampler):
    """With a counter, call i of a series runs at 1,000 + i MHz."""

    def __init__(self) -> None:
        super().__init__()
        self._host, self.calls = HostSampler(), 0

    def periods(self, step, count):
        self.clocks_mhz = self.gaps_ns = None
        found = self._host.periods(step, count)
        if self.counter is not None:
            self.clocks_mhz = 1000.0 + self.calls + np.arange(count)
            self.gaps_ns = np.full(count, 7)
            self.calls += count
        return found

    def latencies(self, step, count):
        return self._host.latencies(step, count)


class Counter:
    made = 0

    def __init__(self, driver, device, blocks):
        assert (driver, blocks) == ("driver", 132)
        assert device in (DEVICE, torch.device("cpu"))
        Counter.made += 1


@pytest.fixture
def gpu(monkeypatch):
    """Fakes a GPU with a cycle counter."""
    monkeypatch.setattr(module, "cuda_driver", lambda: "driver")
    monkeypatch.setattr(module, "CycleCounter", Counter)
    monkeypatch.setattr(Counter, "made", 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module.counter_of.cache_clear()
    yield
    module.counter_of.cache_clear()


def test_one_counter_serves_all_series_of_a_process(gpu):
    sampler = Sampler()
    for _ in range(3):
        with counting(sampler, DEVICE, COUNTED_FROM_NS) as why:
            assert why is None
            assert isinstance(sampler.counter, Counter)
            assert sampler.typical_ns == COUNTED_FROM_NS
            sampler.periods(lambda: None, 5)
            assert counted_of(sampler, 2)[0][1] == counted_of(sampler, 5)[0][-1] > 1000
            assert counted_of(sampler, 2)[1] == [7, 7]
            assert counted_of(sampler, 0) == ([], [])
        assert sampler.counter is sampler.clocks_mhz is sampler.gaps_ns is None
        clocks, gaps = counted_of(sampler, 4)
        assert np.isnan(clocks).tolist() == [True] * 4
        assert gaps == [0] * 4
    assert Counter.made == 1


@pytest.mark.parametrize("error", [UnsupportedError("no driver"), RuntimeError("out of memory")])
def test_where_it_cannot_be_counted_the_reason_is_noted(gpu, monkeypatch, error):
    def refused(driver, device, blocks):
        raise error

    monkeypatch.setattr(module, "CycleCounter", refused)
    sampler, recording = Sampler(), Recording(device="cuda", interval_ns=1, unknown={"a": "b"})
    with counting(sampler, DEVICE, 1e9) as why:
        assert sampler.counter is None
    assert str(error) in noted(recording, why).unknown[UNCOUNTED]
    assert noted(recording, None) is recording


def test_on_the_cpu_there_is_nothing_to_count():
    with counting(HostSampler(), torch.device("cpu"), 1e9) as why:
        assert why is None
    clocks, gaps = counted_of(HostSampler(), 3)
    assert all(map(math.isnan, clocks))
    assert gaps == [0, 0, 0]


def test_beside_short_iterations_it_is_not_counted(gpu):
    sampler = Sampler()
    with counting(sampler, DEVICE, COUNTED_FROM_NS - 1) as why:
        assert sampler.counter is None
    assert why == "an iteration is shorter than 0.5 ms"
    assert Counter.made == 0


@pytest.fixture
def handler(gpu, tmp_path):
    """A handler in this process with a CPU workload and a fake GPU sampler."""
    save_payload(Workload(nn.Linear(8, 8).eval(), torch.randn(2, 8)), tmp_path)
    made = WorkloadHandler(tmp_path)
    made.load("cpu", transforms.ambient())
    made.sampler, made.step = Sampler(), lambda: None
    made.iteration_ns = COUNTED_FROM_NS
    yield made
    made.close()


def taken(handler, metric):
    return msgspec.convert(handler.series(metric, 0.01), Series)


def test_every_period_has_the_clock_that_was_counted_over_it(handler):
    handler.counts_cycles = True
    found = taken(handler, "period")
    assert found.clocks_mhz == [1000.0 + i for i in range(len(found.durations_ns))]
    assert found.gaps_ns == [7] * len(found.durations_ns)
    assert UNCOUNTED not in found.recording["unknown"]
    assert encode(handler.series("period", 0.01))


@pytest.mark.parametrize(("counts", "metric"), [(True, "latency"), (False, "period")])
@pytest.mark.sampled(every=2)
def test_it_is_counted_where_that_was_asked_for_and_beside_periods_alone(handler, counts, metric):
    handler.counts_cycles = True
    taken(handler, "period")
    handler.counts_cycles = counts
    assert taken(handler, metric).clocks_mhz is None


def test_a_stretch_that_raised_has_no_clock(handler):
    calls = iter(range(10_000))

    def step():
        if next(calls) == 30:
            raise ValueError("no more")

    handler.counts_cycles = True
    # The timing overhead is measured without the workload.
    handler.step = step
    found = taken(handler, "period")
    assert found.failed == "ValueError: no more"
    assert len(found.clocks_mhz) == len(found.durations_ns) == 30
    assert np.isfinite(found.clocks_mhz).any()
    assert np.isnan(found.clocks_mhz[-1])
