from __future__ import annotations

import pytest

from steadytorch.ledger.ledger import build_ledger
from steadytorch.rates.device_rates import Rates
from steadytorch.rates.roofline import product_flops, roofline

from ..traces.profiled import trace_of
from ..traces.published import needs_published
from ..traces.published import trace as published
from ..traces.synthetic import kernel, launch, memcpy, memset, op, step, trace

RATES = Rates(
    device="a device",
    copy_bandwidth_bytes_per_s=1e12,
    matrix_flops_per_s={"float16": 1e14, "float32": 1e13, "tf32": 5e13},
)
US = 1_000
SQUARE = {"dims": [[512, 512]] * 2, "types": ["c10::Half"] * 2}
VECTORS = {"dims": [[1 << 20]] * 2, "types": ["float"] * 2}
FLOPS, BYTES = 2 * 512**3, 3 * 2 * 512**2


def _product(*kernels, inputs=SQUARE, name="aten::mm"):
    """A product of 512 x 512 matrices by kernels of these names and lengths."""
    events, at = [step(0, 0, 100 * US), op(name, 0, 10 * US, **inputs)], 20 * US
    for number, (kind, length) in enumerate(kernels, 1):
        events += launch(
            kind, call=(number * US, number * US + 500), gpu=(at, at + length), correlation=number
        )
        at += length
    return trace(events)


def _line(found, name):
    return next(line for line in found.lines if line.name == name)


def test_a_kernel_has_the_rates_of_its_operators_work():
    line = _line(roofline(_product(("gemm", 10 * US)), RATES), "gemm")
    assert (line.flops, line.bytes) == (FLOPS, BYTES)
    assert line.flops_per_s == pytest.approx(FLOPS / 10e-6)
    assert line.bytes_per_s == pytest.approx(BYTES / 10e-6)
    assert line.share == 1


def test_the_limit_is_whatever_takes_longer():
    line = _line(roofline(_product(("gemm", 10 * US)), RATES), "gemm")
    assert line.bound == "compute"
    assert line.share_of_limit == pytest.approx(FLOPS / 1e14 / 10e-6)
    slow = Rates(device="", copy_bandwidth_bytes_per_s=1e10, matrix_flops_per_s={"float16": 1e14})
    line = _line(roofline(_product(("gemm", 10 * US)), slow), "gemm")
    assert line.bound == "memory"


def test_kernels_of_one_operator_share_its_work_by_their_time():
    found = roofline(_product(("gemm", 9 * US), ("reduce", 3 * US)), RATES)
    assert _line(found, "gemm").flops == FLOPS * 3 // 4
    shares = {line.share_of_limit for line in found.lines}
    assert max(shares) == pytest.approx(min(shares)) == pytest.approx(FLOPS / 1e14 / 12e-6)


def test_single_precision_on_tensor_cores_is_held_against_tf32():
    inputs = {"dims": [[512, 512]] * 2, "types": ["float"] * 2}
    plain = roofline(_product(("ampere_sgemm", 50 * US), inputs=inputs), RATES).lines[0]
    tensor = roofline(_product(("s1688gemm_tf32", 50 * US), inputs=inputs), RATES).lines[0]
    assert plain.share_of_limit == pytest.approx(5 * tensor.share_of_limit)


def test_what_is_no_product_is_held_against_memory_alone():
    read = _product(("add", 20 * US), inputs=VECTORS, name="aten::add")
    line = roofline(read, Rates(device="", copy_bandwidth_bytes_per_s=1e12)).lines[0]
    assert line.bound == "memory"
    assert line.share_of_limit == pytest.approx(3 * 4 * (1 << 20) / 1e12 / 20e-6)


def test_without_shapes_only_times_are_known():
    line = roofline(_product(("gemm", 10 * US), inputs={}), RATES).lines[0]
    assert (line.time_ns, line.count, line.known_ns) == (10 * US, 1, 0)
    assert line.bytes is line.flops is line.share_of_limit is line.bound is None


def test_without_rates_there_are_no_shares():
    found = roofline(_product(("gemm", 10 * US)))
    assert found.lines[0].flops == FLOPS
    assert found.lines[0].share_of_limit is found.share_of_limit is None
    assert found.known_ns == 0


def test_a_type_whose_rate_was_not_measured_has_no_share():
    inputs = {"dims": [[512, 512]] * 2, "types": ["double"] * 2}
    line = roofline(_product(("dgemm", 10 * US), inputs=inputs), RATES).lines[0]
    assert line.flops == FLOPS
    assert line.share_of_limit is None


def test_copies_within_the_device_and_fills_say_their_bytes_themselves():
    events = [
        step(0, 0, 100 * US),
        memcpy("Memcpy DtoD (Device -> Device)", 0, 4 * US, size=1 << 20),
        memset(5 * US, 6 * US, size=1000),
        memcpy("Memcpy HtoD (Pinned -> Device)", 10 * US, 20 * US, size=1 << 20),
    ]
    found = roofline(trace(events), RATES)
    assert _line(found, "Memcpy DtoD (Device -> Device)").bytes == 2 << 20
    assert _line(found, "Memset (Device)").bytes == 1000
    assert _line(found, "Memcpy HtoD (Pinned -> Device)").bytes is None


def test_the_step_is_what_its_lines_add_up_to():
    read = _product(("gemm", 9 * US), ("reduce", 3 * US))
    more = trace([step(0, 0, 50 * US), kernel("other", 0, 5 * US, correlation=0)])
    found = roofline(read, RATES)
    assert (found.busy_ns, found.known_ns, found.step_ns) == (12 * US, 12 * US, 100 * US)
    assert found.least_ns == int(FLOPS / 1e14 * 1e9)
    assert found.compute_share == found.share_of_limit == pytest.approx(FLOPS / 1e14 / 12e-6)
    assert found.memory_share == pytest.approx(BYTES / 1e12 / 12e-6)
    assert roofline(more, RATES).known_ns == 0


def test_times_are_per_step_and_lines_of_all_steps():
    events = [step(number, number * 100 * US, (number + 1) * 100 * US) for number in range(4)]
    events += [
        kernel("k", at * 100 * US, at * 100 * US + 20 * US, correlation=at + 1) for at in range(4)
    ]
    found = roofline(trace(events), RATES)
    assert (found.steps, found.busy_ns, found.step_ns) == (4, 20 * US, 100 * US)
    assert (found.lines[0].count, found.lines[0].time_ns) == (4, 80 * US)


def test_on_a_cpu_an_operators_line_holds_what_it_calls_for_its_work():
    events = [
        step(0, 0, 1000 * US),
        op("aten::linear", 0, 900 * US, dims=[[512, 512]] * 2, types=["float"] * 2),
        op("aten::mm", 100 * US, 800 * US, dims=[[512, 512]] * 2, types=["float"] * 2),
        op("aten::empty", 100 * US, 200 * US),
    ]
    found = roofline(trace(events), RATES)
    line = _line(found, "aten::mm")
    assert (line.count, line.time_ns, line.flops) == (1, 700 * US, FLOPS)
    assert _line(found, "aten::linear").time_ns == 200 * US
    assert {line.name for line in found.lines} == {"aten::mm", "aten::linear"}


def test_products_are_counted_once_and_nothing_else_is():
    square = {"dims": [[512, 512]] * 2, "types": ["float"] * 2}
    events = [
        op("aten::linear", 0, 900 * US, **square),
        op("aten::mm", 100 * US, 800 * US, **square),
        op("aten::add", 900 * US, 950 * US, **VECTORS),
        op("aten::mm", 950 * US, 990 * US, **square),
    ]
    assert product_flops(trace(events)) == 2 * FLOPS
    assert product_flops(trace(events[2:3])) == 0


def test_products_of_unknown_inputs_leave_the_count_unknown():
    counted = op("aten::mm", 0, 10 * US, dims=[[512, 512]] * 2, types=["float"] * 2)
    for name in ("aten::bmm", "aten::_scaled_mm"):
        assert product_flops(trace([counted, op(name, 20 * US, 30 * US)])) is None


def test_a_real_trace_of_a_cpu_adds_up():
    import torch

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    found = roofline(trace_of(lambda: model(torch.randn(2, 3, 16, 16)).sum().backward()), RATES)
    by_name = {line.name: line for line in found.lines}
    assert by_name["aten::mkldnn_convolution"].flops == 2 * 2 * 4 * 14 * 14 * 27
    assert sum(line.time_ns for line in found.lines) == found.busy_ns
    assert sum(line.share for line in found.lines) == pytest.approx(1)


@needs_published
def test_products_of_a_published_trace_stay_below_their_limit():
    """An H100 multiplies bf16 matrices at 600 to 800 TFLOP/s, and copies 2 to 3 TB/s."""
    read = published("h100_owlv2")
    rates = Rates(
        device="H100",
        copy_bandwidth_bytes_per_s=3.0e12,
        matrix_flops_per_s={"bfloat16": 8e14, "float32": 6e13},
    )
    found = roofline(read, rates, build_ledger(read))
    assert found.known_ns > 0.95 * found.busy_ns
    # Small operands come from the cache; large ones cannot exceed the bandwidth by much.
    large = [line for line in found.lines if line.share > 0.01 and line.share_of_limit]
    assert all(line.share_of_limit < 1.0 for line in large)
    gemm = next(line for line in found.lines if line.name.startswith("sm90_xmma_gemm_bf16"))
    assert gemm.bound == "compute"
    assert 0.7 < gemm.share_of_limit < 0.85
