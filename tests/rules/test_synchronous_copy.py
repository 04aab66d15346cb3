from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.synchronous_copy import NAME, rule

from ..findings.cases import MS, US, kernel, memcpy, runtime, step, the, traced


def _copy(name="Memcpy DtoH (Device -> Pinned)", size=1 << 20, api="cudaMemcpy"):
    return [
        step(1, 0, 10 * MS),
        runtime(api, 100 * US, 3 * MS, correlation=5),
        memcpy(name, 1 * MS, 2 * MS, size=size, correlation=5),
        runtime("cudaLaunchKernel", 3 * MS, 3 * MS + 10 * US, correlation=6),
        kernel("k", 3 * MS + 20 * US, 9 * MS, correlation=6),
    ]


@pytest.mark.parametrize("api", ["cudaMemcpy", "cudaMemcpy2D", "cuMemcpyDtoH_v2"])
def test_a_call_that_waits_is_found_with_the_time_it_keeps_the_gpu_idle(api):
    found = the(rule(traced(_copy(api=api))))
    assert found.id == NAME
    assert found.slices == ("gpu_memcpy", "idle_synchronisation")
    assert 2 * MS <= found.cost_ns <= 3 * MS


@pytest.mark.parametrize("api", ["cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cudaMemcpyBatchAsync"])
def test_asynchronous_calls_are_not(api):
    assert rule(traced(_copy(api=api))) == ()


def test_a_copy_within_the_device_does_not_wait():
    assert rule(traced(_copy("Memcpy DtoD (Device -> Device)"))) == ()


def test_a_small_copy_to_the_device_does_not_wait():
    assert rule(traced(_copy("Memcpy HtoD (Pageable -> Device)", size=64 << 10))) == ()
    assert the(rule(traced(_copy("Memcpy HtoD (Pageable -> Device)", size=(64 << 10) + 1))))


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case()), Abstention)
