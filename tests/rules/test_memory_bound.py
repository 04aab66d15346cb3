from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rates.device_rates import Rates
from steadytorch.rules.memory_bound import NAME, rule

from ..findings.cases import MS, US, annotation, launch, op, step, the, traced

RATES = Rates(device="", copy_bandwidth_bytes_per_s=1e12, matrix_flops_per_s={"float32": 1e13})
VECTORS = {"dims": [[1 << 20], [1 << 20], []], "types": ["float", "float", "Scalar"]}
LEAST_NS = 12 * (1 << 20) / 1e3
"""Time of one addition: 12 bytes an element at 1,000 bytes per ns."""


def _additions(length, **inputs):
    return [
        step(1, 0, 10 * MS),
        op("aten::add", 0, 100 * US, **(inputs or VECTORS)),
        *launch("add", call=(10 * US, 20 * US), gpu=(MS, MS + round(length)), correlation=1),
    ]


def test_kernels_near_the_bandwidth_are_found():
    found = the(rule(traced(_additions(LEAST_NS / 0.7), rates=RATES)))
    assert found.id == NAME
    assert "compile" in found.transforms
    assert found.recoverable_ns == (0, round(LEAST_NS / 0.7))
    assert "70 % of the limit" in found.evidence[0]


def test_kernels_far_from_it_are_not():
    assert rule(traced(_additions(LEAST_NS / 0.5), rates=RATES)) == ()


def test_what_fits_into_a_cache_is_no_traffic_of_the_memory():
    small = {"dims": [[1 << 16], [1 << 16], []], "types": ["float", "float", "Scalar"]}
    assert rule(traced(_additions(LEAST_NS / 16 / 0.7, **small), rates=RATES)) == ()


def test_data_faster_than_the_memory_came_from_a_cache():
    assert rule(traced(_additions(LEAST_NS / 3.5), rates=RATES)) == ()
    assert the(rule(traced(_additions(LEAST_NS / 1.6), rates=RATES)))


@pytest.mark.parametrize(
    ("kind", "size"), [("c10::BFloat16", 2), ("c10::Half", 2), ("signed char", 1), ("int", 4)]
)
def test_tensors_that_16_bits_make_no_smaller_are_not_to_be_cast(kind, size):
    inputs = {"dims": VECTORS["dims"], "types": [kind, kind, "Scalar"]}
    found = the(rule(traced(_additions(LEAST_NS * size / 4 / 0.7, **inputs), rates=RATES)))
    assert "16 bits" not in found.fix
    assert found.transforms == ("compile",)


@pytest.mark.parametrize(("kind", "size"), [("float", 4), ("double", 8)])
def test_wide_floating_point_numbers_are(kind, size):
    inputs = {"dims": VECTORS["dims"], "types": [kind, kind, "Scalar"]}
    found = the(rule(traced(_additions(LEAST_NS * size / 4 / 0.7, **inputs), rates=RATES)))
    assert "16 bits" in found.fix
    assert found.transforms == ("compile", "cast_weights", "autocast")


def test_element_types_count_on_a_cpu_too():
    inputs = {"dims": VECTORS["dims"], "types": ["c10::BFloat16", "c10::BFloat16", "Scalar"]}
    events = [step(1, 0, 10 * MS), op("aten::add", 0, round(LEAST_NS / 2 / 0.7), **inputs)]
    assert the(rule(traced(events, rates=RATES))).transforms == ("compile",)


def test_weights_of_a_training_trace_are_not_to_be_cast():
    mark = annotation("Optimizer.step#SGD.step", 9 * MS, 9 * MS + US)
    found = the(rule(traced([*_additions(LEAST_NS / 0.7), mark], rates=RATES)))
    assert found.transforms == ("compile", "autocast")


def test_a_small_part_of_the_work_is_not_worth_it():
    matrices = {"dims": [[1024, 1024]] * 2, "types": ["float"] * 2}
    events = [
        *_additions(LEAST_NS / 0.7),
        op("aten::mm", 200 * US, 300 * US, **matrices),
        *launch("sgemm", call=(210 * US, 220 * US), gpu=(2 * MS, 3 * MS), correlation=2),
    ]
    assert rule(traced(events, rates=RATES)) == ()


def test_a_product_at_the_bandwidth_cannot_be_fused_away():
    vector = {"dims": [[4096, 4096], [4096]], "types": ["float"] * 2}
    events = [
        step(1, 0, 10 * MS),
        op("aten::mv", 0, 100 * US, **vector),
        *launch("gemv", call=(10 * US, 20 * US), gpu=(MS, MS + 80 * US), correlation=1),
    ]
    found = the(rule(traced(events, rates=RATES)))
    assert found.cost_ns == 80 * US
    assert found.recoverable_ns == (0, 0)


def test_operators_on_a_cpu_are_looked_at_too():
    events = [step(1, 0, 10 * MS), op("aten::add", 0, round(LEAST_NS / 0.7), **VECTORS)]
    found = the(rule(traced(events, rates=RATES)))
    assert "cpu_elementwise" in found.slices


def test_without_shapes_it_abstains_with_a_recipe():
    events = [step(1, 0, 10 * MS), op("aten::add", 0, 100 * US)]
    events += launch("add", call=(10 * US, 20 * US), gpu=(MS, 2 * MS), correlation=1)
    verdict = rule(traced(events, rates=RATES))
    assert isinstance(verdict, Abstention)
    assert "record_shapes" in verdict.recapture


def test_without_rates_it_abstains_with_a_recipe():
    verdict = rule(traced(_additions(LEAST_NS)))
    assert isinstance(verdict, Abstention)
    assert "steady explain" in verdict.recapture


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case(rates=RATES)), Abstention)
