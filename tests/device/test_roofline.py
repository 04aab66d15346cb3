from __future__ import annotations

import math

import pytest
import torch

from steadytorch.device import roofline
from steadytorch.device.roofline import copy_bandwidth, matrix_rate, median_of_runs
from steadytorch.errors import UnsupportedError, UsageError


@pytest.fixture
def small(monkeypatch):
    """Small buffers and matrices, because the rate itself is not tested."""
    monkeypatch.setattr(roofline, "cpu_buffer_bytes", lambda: 1 << 20)
    monkeypatch.setattr(roofline, "SIDES", (64, 128))


@pytest.fixture
def takes(monkeypatch):
    """Sets how long each run takes."""
    return lambda seconds: monkeypatch.setattr(roofline, "median_seconds", lambda *_, **__: seconds)


def test_copy_bandwidth_of_the_cpu_is_a_finite_rate(small):
    rate = copy_bandwidth("cpu", budget_s=0.0)
    assert 0 < rate < math.inf


def test_bandwidth_counts_bytes_read_and_written(small, takes):
    takes(0.5)
    assert copy_bandwidth("cpu") == 2 * (1 << 20) / 0.5


@pytest.mark.parametrize("dtype", ["float32", torch.float64])
def test_matrix_rate_of_the_cpu_is_a_finite_rate(small, dtype):
    assert 0 < matrix_rate("cpu", dtype, budget_s=0.0) < math.inf


def test_matrix_rate_counts_a_multiplication_and_an_addition(small, takes):
    takes(0.001)
    assert matrix_rate("cpu", "float32") == 2 * 128**3 / 0.001


def test_matrices_stay_small_where_products_are_slow(small, takes):
    takes(1.0)
    assert matrix_rate("cpu", "float32") == 2 * 64**3


def test_the_data_multiplied_is_random_not_zero(small, monkeypatch):
    seen = []
    real = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda left, right, out: seen.append((left, right)) or real(left, right)
    )
    matrix_rate("cpu", "float32", budget_s=0.0)
    left, right = seen[0]
    assert left.unique().numel() > 200
    assert not torch.equal(left, right)


def test_nothing_global_is_changed(small):
    def state():
        return (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    before, random_before = state(), torch.get_rng_state()
    copy_bandwidth("cpu", budget_s=0.0)
    matrix_rate("cpu", "float32", budget_s=0.0)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random_before)


def test_a_process_that_asks_for_repeatable_results_is_measured_too(monkeypatch):
    multiply = torch.mm

    def refusing(*given, **options):
        if torch.are_deterministic_algorithms_enabled():  # as cuBLAS is, without a workspace set
            raise RuntimeError("is not deterministic")
        return multiply(*given, **options)

    monkeypatch.setattr(torch, "mm", refusing)
    torch.use_deterministic_algorithms(True)
    try:
        assert 0 < matrix_rate("cpu", "float32", budget_s=0.0) < math.inf
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_buffers_reach_well_beyond_the_last_level_cache(takes, monkeypatch):
    cache = 40 << 20
    monkeypatch.setattr(roofline.host, "last_level_cache_bytes", lambda: cache)
    monkeypatch.setattr(
        roofline.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 40})
    )
    takes(1.0)
    assert copy_bandwidth("cpu") >= 2 * 2 * cache


def test_short_memory_bounds_the_buffers(takes, monkeypatch):
    monkeypatch.setattr(
        roofline.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 80 << 20})
    )
    takes(1.0)
    assert copy_bandwidth("cpu") == 2 * (10 << 20)


@pytest.mark.parametrize("dtype", ["int8", torch.int32, "nonsense", "Tensor"])
def test_a_type_that_is_not_floating_point_is_misuse(dtype):
    with pytest.raises(UsageError, match="floating-point"):
        matrix_rate("cpu", dtype)


def test_a_type_the_device_cannot_multiply_is_unsupported(monkeypatch):
    def refuse(left, right, out):
        raise NotImplementedError("'addmm' is not implemented for 'Half'\nsecond line")

    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(UnsupportedError, match=r"torch.float16 matrices on 'cpu': .*'Half'$"):
        matrix_rate("cpu", "float16", budget_s=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("measure", [copy_bandwidth, lambda device: matrix_rate(device, "float32")])
def test_a_gpu_that_is_not_there_is_unsupported(measure):
    with pytest.raises(UnsupportedError, match="'cuda'"):
        measure("cuda")


def test_the_median_is_taken_over_at_least_the_fewest_runs():
    durations = iter([9.0, 1.0, 2.0, 3.0, 100.0])
    assert median_of_runs(lambda: next(durations), budget_s=0.0) == 3.0


def test_runs_go_on_until_the_budget_is_used():
    calls = []
    median_of_runs(lambda: calls.append(1) or 0.125, budget_s=1.0)
    assert len(calls) == 8


def test_runs_end_at_fifty_however_short_they_are():
    calls = []
    median_of_runs(lambda: calls.append(1) or 1e-9, budget_s=1.0)
    assert len(calls) == 50
