"""The examples that need a GPU: each provokes its finding, and its fix makes it go away."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# Tests are no package: what several of their files share is loaded by its place.
_NAME = "steadytorch_examples_provoked"
if _NAME not in sys.modules:
    _path = Path(__file__).parents[1] / "examples" / "provoked.py"
    _spec = importlib.util.spec_from_file_location(_NAME, _path)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
provoked: Any = sys.modules[_NAME]

NEEDS_TENSOR_CORES = ("layout-conversion", "tensor-cores-unused")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Rates are measured once, and here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def explained(finding: str, factory: str) -> Any:
    if finding in NEEDS_TENSOR_CORES and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")
    result = provoked.explained(finding, factory, "cuda", budget="3s")
    why = provoked.could_not_tell(finding, result)
    if why is not None and finding in provoked.OF_THE_MACHINE:
        pytest.skip(f"this machine does not show it: {why}")
    assert why is None, why
    return result


@pytest.mark.parametrize("finding", provoked.ON_GPU)
def test_the_slow_workload_provokes_its_finding_alone(finding):
    result = explained(finding, "slow")
    assert finding in provoked.ids(result), provoked.format_findings(result)
    assert not provoked.unexpected(finding, result), provoked.format_findings(result)


@pytest.mark.parametrize("finding", provoked.ON_GPU)
def test_the_mended_workload_does_not_have_it(finding):
    result = explained(finding, "mended")
    assert finding not in provoked.ids(result), provoked.format_findings(result)


def test_memory_bound_is_found_on_a_gpu_as_well():
    result = explained("memory-bound", "slow")
    assert "memory-bound" in provoked.ids(result), provoked.format_findings(result)
    assert not provoked.unexpected("memory-bound", result) - {"tensor-cores-unused"}
