import pytest

from steadytorch.ledger.ledger import build_ledger
from steadytorch.rates.utilisation import utilisation

from ..traces import synthetic as syn
from ..traces.published import needs_published, oracle, trace


def of(*events):
    read = syn.trace([syn.step(0, 0, 1_000), *events])
    return utilisation(read, build_ledger(read))


def kernel(name, start, end, blocks, occupancy, **where):
    details = {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}
    return syn.kernel(name, start, end, details=details, **where)


def test_kernels_are_weighed_by_their_time():
    found = of(kernel("add", 0, 200, 0.5, 10), kernel("hmma_gemm", 200, 500, 4.0, 60))
    assert found.gpu_percent == pytest.approx(50)
    assert found.sm_efficiency_percent == pytest.approx(40)
    assert found.achieved_occupancy_percent == pytest.approx(40)
    assert found.tensor_core_percent == pytest.approx(60)


def test_kernels_side_by_side_share_the_multiprocessors():
    full = of(*(kernel("gemm", 0, 900, 4.0, 60, stream=stream) for stream in (7, 8)))
    assert full.sm_efficiency_percent == pytest.approx(90)
    partly = of(kernel("a", 0, 400, 0.5, 60, stream=7), kernel("b", 200, 600, 0.7, 60, stream=8))
    assert partly.sm_efficiency_percent == pytest.approx(20 * 0.5 + 20 * 1.0 + 20 * 0.7)


def test_kernels_outside_the_steps_do_not_count():
    found = of(kernel("add", 0, 200, 1.0, 10), kernel("add", 2_000, 9_000, 1.0, 90))
    assert found.achieved_occupancy_percent == pytest.approx(10)


def test_copies_are_no_kernels():
    assert of(syn.memset(0, 500), kernel("add", 500, 600, 1.0, 10)).gpu_percent == 10


def test_what_was_not_recorded_is_not_estimated():
    unknown = {"blocks per SM": None, "est. achieved occupancy %": None}
    found = of(syn.kernel("add", 0, 200, details=unknown))
    assert (found.sm_efficiency_percent, found.achieved_occupancy_percent) == (None, None)
    assert found.gpu_percent == 20


def test_a_trace_of_the_cpu_has_none():
    assert of(syn.op("aten::mm", 0, 10)) is None


@needs_published
def test_published_figures():
    name = "kineto_v100_resnet50_workers0"
    found = utilisation(trace(name), build_ledger(trace(name)))
    wanted = oracle(name)
    assert round(found.gpu_percent, 2) == wanted["gpu_utilisation_percent"]
    assert round(found.sm_efficiency_percent, 2) == wanted["sm_efficiency_percent"]
    assert round(found.achieved_occupancy_percent, 2) == wanted["achieved_occupancy_percent"]
    assert round(found.tensor_core_percent, 2) == wanted["tensor_core_time_percent"]
