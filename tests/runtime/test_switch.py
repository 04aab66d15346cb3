from __future__ import annotations

import pytest
import torch

from steadytorch.ambient import flags
from steadytorch.runtime import switch
from steadytorch.runtime.switch import read_switch, traps

CUDNN = torch.backends.cudnn


@pytest.fixture
def with_device(monkeypatch):
    """As on a machine where the switch does something."""
    monkeypatch.setattr(switch, "why_not", lambda: "")


def test_it_reads_the_settings():
    with flags(
        (CUDNN, "benchmark", True), (CUDNN, "benchmark_limit", 3), (CUDNN, "deterministic", True)
    ):
        found = read_switch()
    assert (found.benchmark, found.benchmark_limit, found.deterministic) == (True, 3, True)
    assert found.fp32_precision == str(CUDNN.conv.fp32_precision)


def test_it_changes_nothing():
    before = (CUDNN.benchmark, CUDNN.benchmark_limit, CUDNN.deterministic)
    read_switch()
    assert (CUDNN.benchmark, CUDNN.benchmark_limit, CUDNN.deterministic) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_an_effect_there_are_no_traps():
    found = read_switch()
    assert found.no_effect == "there is no CUDA device"
    assert found.traps == ()


def test_with_an_effect_the_traps_are_listed(with_device):
    found = read_switch()
    assert found.no_effect == ""
    assert found.traps == traps(found.benchmark_limit, found.deterministic)


def test_only_variables_of_cudnn_are_shown():
    given = {"HOME": "/root", "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT": "1", "A_TOKEN": "secret"}
    assert read_switch(given).environment == {"TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT": "1"}


@pytest.mark.parametrize(("limit", "said"), [(10, "first 10 engines"), (0, "all engines")])
def test_the_limit_is_told(limit, said):
    assert any(said in trap for trap in traps(limit, False))


def test_deterministic_restricts_it():
    assert len(traps(10, True)) == len(traps(10, False)) + 1
    assert "deterministic engines only" in traps(10, True)[-1]
