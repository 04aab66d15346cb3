from __future__ import annotations

import pytest

from steadytorch.device.facts import DeviceFacts
from steadytorch.findings.finding import Abstention, Case
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rates.device_rates import Rates
from steadytorch.rules.tensor_cores_unused import NAME, capability_of, rule

from ..findings.cases import (
    MS,
    US,
    annotation,
    kernel,
    launch,
    op,
    runtime,
    step,
    the,
    trace,
    traced,
)
from ..traces import published


def _products(*kinds, dtype="float", size=64, name="aten::mm"):
    """Operators of one kernel each: names and lengths."""
    dims = [[size, size]] * 2
    events = [step(1, 0, 10 * MS)]
    for at, (kind, length) in enumerate(kinds):
        host = at * 20 * US
        events.append(op(name, host, host + 15 * US, dims=dims, types=[dtype] * 2))
        events += launch(
            kind,
            call=(host + US, host + 2 * US),
            gpu=(MS + at * MS, MS + at * MS + length),
            correlation=at + 1,
        )
    return events


def _on(major, events):
    read = trace(events, devices=[{"id": 0, "computeMajor": major, "computeMinor": 0}])
    return Case(trace=read, ledger=build_ledger(read))


PLAIN = ("ampere_sgemm_64x64_nn", 400 * US)
TENSOR = ("ampere_bf16_s16816gemm_bf16_64x64_nn", 400 * US)


def test_products_in_float32_without_tf32_are_found():
    found = the(rule(_on(8, _products(PLAIN, PLAIN))))
    assert found.id == NAME
    assert "100 %" in found.title
    assert found.transforms == ("tf32", "autocast", "cast_weights")
    assert found.cost_ns == 800 * US
    assert found.recoverable_ns == (0, 700 * US)
    assert found.confidence == "high"


def test_a_gpu_without_tf32_is_not_offered_it():
    found = the(rule(_on(7, _products(PLAIN))))
    assert "tf32" not in found.transforms
    assert "TF32" not in found.fix


@pytest.mark.parametrize(("major", "named"), [(7, False), (8, True)])
def test_bfloat16_is_named_only_where_the_gpu_computes_in_it(major, named):
    assert ("bfloat16" in the(rule(_on(major, _products(PLAIN)))).fix) is named


OF_TRAINING = [
    annotation("Optimizer.step#SGD.step", 9 * MS, 9 * MS + US),
    op("autograd::engine::evaluate_function: MmBackward0", 9 * MS, 9 * MS + US),
]


@pytest.mark.parametrize("event", OF_TRAINING)
def test_weights_of_a_training_trace_are_not_to_be_cast(event):
    found = the(rule(_on(8, [*_products(PLAIN), event])))
    assert found.transforms == ("tf32", "autocast")
    assert "weights in" not in found.fix


def test_training_in_float16_needs_a_gradient_scaler():
    found = the(rule(_on(7, [*_products(PLAIN), OF_TRAINING[0]])))
    assert "GradScaler" in found.fix
    assert found.transforms == ()


@published.needs_published
@pytest.mark.parametrize("name", ["kineto_v100_resnet50_workers0", "v100_resnet_ns_resolution"])
def test_published_training_on_a_v100_is_told_what_it_can_use(name):
    read = published.trace(name)
    found = the(rule(Case(trace=read, ledger=build_ledger(read))))
    assert "bfloat16" not in found.fix
    assert "cast_weights" not in found.transforms


def test_measured_rates_bound_what_can_be_gained():
    case = _on(8, _products(PLAIN, PLAIN))
    rates = Rates(device="", matrix_flops_per_s={"float32": 1e13, "tf32": 4e13})
    case = Case(trace=case.trace, ledger=case.ledger, rates=rates)
    assert the(rule(case)).recoverable_ns == (0, 600 * US)


@pytest.mark.parametrize(
    "kernel",
    [
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1_SN_1LDSB0",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16>",
        "igemm_fwd_gtcx2_nhwc_bf16_bx0_ex1_bt256x64x32",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<Layout> >(Argument)",
        "void ck::kernel_gemm_wmma<ck::GridwiseGemm_Wmma<256, 128> >(Argument)",
    ],
)
def test_nothing_is_claimed_of_kernels_of_another_vendor(kernel):
    found = rule(_on(9, _products((kernel, 400 * US), dtype="c10::BFloat16")))
    assert isinstance(found, Abstention)
    assert "AMD GPU" in found.why


def test_nothing_is_claimed_of_a_gpu_of_another_vendor():
    read = trace(_products(PLAIN), devices=[{"id": 0, "name": "AMD Instinct MI300X"}])
    assert isinstance(rule(Case(trace=read, ledger=build_ledger(read))), Abstention)


def test_calls_of_hip_show_a_gpu_of_another_vendor():
    events = [step(1, 0, 10 * MS)]
    events += launch(
        "my_gemm", call=(0, US), gpu=(MS, 2 * MS), correlation=1, api="hipLaunchKernel"
    )
    found = rule(_on(9, events))
    assert isinstance(found, Abstention)
    assert "AMD GPU" in found.why


CUTLASS_WMMA = (
    "void cutlass::Kernel2<cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>()",
    400 * US,
)


def test_kernels_of_cutlass_with_wmma_are_judged():
    events = _products(CUTLASS_WMMA, PLAIN)
    assert "50 %" in the(rule(_on(9, events))).title


def test_the_name_of_the_gpu_decides_before_names_of_kernels():
    events = _products(("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", 400 * US), PLAIN)
    case = traced(events)
    assert case.trace.devices[0]["name"].startswith("NVIDIA")
    assert the(rule(case))


@published.needs_published
@pytest.mark.parametrize("name", ["h100_owlv2", "h100_bert_small"])
def test_published_traces_of_nvidia_are_judged(name):
    read = published.trace(name)
    assert rule(Case(trace=read, ledger=build_ledger(read))) == ()


def test_a_gpu_without_tensor_cores_has_none_to_use():
    assert rule(_on(6, _products(PLAIN))) == ()


def test_kernels_that_use_them_are_fine():
    assert rule(_on(8, _products(TENSOR, TENSOR, dtype="c10::BFloat16"))) == ()


def test_what_prepares_for_tensor_cores_belongs_to_them():
    events = _products(TENSOR, dtype="c10::BFloat16")
    events += launch("splitKreduce", call=(3 * US, 4 * US), gpu=(5 * MS, 6 * MS), correlation=9)
    events += launch("transpose", call=(5 * US, 6 * US), gpu=(6 * MS, 7 * MS), correlation=10)
    assert rule(_on(8, events)) == ()


def test_odd_sizes_in_16_bits_are_named():
    kernel = ("ampere_fp16_sgemm_fp16_64x64_nn", 400 * US)
    found = the(rule(_on(8, _products(kernel, dtype="c10::Half", size=63))))
    assert any("[63, 63] x [63, 63]" in line for line in found.evidence)
    assert "multiples of 8" in found.fix
    assert found.transforms == ()


def _half(name, *shapes):
    """A case of one operator in 16 bits whose kernel shows nothing of tensor cores."""
    events = [
        step(1, 0, 10 * MS),
        op(name, 0, 15 * US, dims=[list(s) for s in shapes], types=["c10::Half"] * len(shapes)),
        *launch("my_kernel", call=(US, 2 * US), gpu=(MS, 2 * MS), correlation=1),
    ]
    return _on(9, events)


HEADS = (32, 12, 128, 64)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::_scaled_dot_product_efficient_attention", (HEADS,) * 3),
        ("aten::bmm", ((12, 31, 64), (12, 64, 64))),
        ("aten::convolution", ((1, 64, 31), (64, 64, 3))),
        ("aten::convolution_backward", ((1, 64, 31), (1, 64, 31), (64, 64, 3))),
    ],
)
def test_padding_is_not_advised_where_channels_and_features_fit(name, shapes):
    found = the(rule(_half(name, *shapes)))
    assert not any("multiples" in line for line in found.evidence)
    assert "Pad" not in found.fix
    assert found.confidence == "low"


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::_scaled_dot_product_efficient_attention", ((32, 16, 128, 60),) * 3),
        ("aten::addmm", ((30522,), (144, 512), (512, 30522))),
        ("aten::convolution", ((8, 63, 64), (64, 63, 3))),
        ("aten::convolution", ((1, 64, 20, 20), (255, 64, 1, 1))),
        ("aten::convolution_backward", ((1, 255, 20, 20), (1, 64, 20, 20), (255, 64, 1, 1))),
    ],
)
def test_padding_is_advised_where_channels_or_features_are_odd(name, shapes):
    found = the(rule(_half(name, *shapes)))
    assert any(str(list(shapes[-1])) in line for line in found.evidence)
    assert "multiples of 8" in found.fix


@pytest.mark.parametrize(
    ("kernel", "more"),
    [
        ("volta_dgemm_64x64_nn", {"dtype": "double"}),
        ("void gemv2T_kernel_val<float>(Params)", {}),
        ("triton_tem_fused_mm_0", {}),
        ("void conv_depthwise2d_forward_kernel<3, float>(Params)", {}),
        ("vectorized_elementwise_kernel", {"name": "aten::add"}),
    ],
)
def test_what_tensor_cores_cannot_take_or_may_be_using_them_is_left_out(kernel, more):
    assert rule(_on(8, _products((kernel, 400 * US), **more))) == ()


def test_a_small_rest_beside_tensor_cores_is_left_out():
    small = (PLAIN[0], 30 * US)
    assert rule(_on(8, _products(TENSOR, small))) == ()


def test_kernels_of_a_graph_are_told_by_their_names():
    events = [step(1, 0, 10 * MS)]
    events += launch(
        "volta_sgemm_128x64_nn",
        call=(0, US),
        gpu=(MS, 2 * MS),
        correlation=1,
        api="cudaGraphLaunch",
    )
    assert the(rule(_on(7, events))).cost_ns == MS


def _replay(*kernels):
    """A replay of a graph with these kernels, 1 ms each."""
    events = [step(1, 0, 10 * MS), runtime("cudaGraphLaunch", 0, US, correlation=1)]
    for at, name in enumerate(kernels, 1):
        events.append(kernel(name, at * MS, (at + 1) * MS, correlation=1))
    return _on(9, events)


FLASH_3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> >, 128, cutlass::bfloat16_t, float> > > >"
)
DEEP_GEMM = (
    "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 64u, 128u, (deep_gemm::GemmType)0>(CUtensorMap)"
)


def test_libraries_for_tensor_cores_in_a_graph_are_fine():
    assert rule(_replay(FLASH_3, DEEP_GEMM, "nvjet_tst_128x64_64x9_2x1_v_bz_TNT")) == ()


def test_products_of_unknown_precision_in_a_graph_cannot_be_judged():
    found = rule(_replay("my_gemm_kernel", "nvjet_tst_128x64_64x9_2x1_v_bz_TNT"))
    assert isinstance(found, Abstention)
    assert "operators" in found.why


def test_products_of_unknown_precision_are_not_counted():
    assert the(rule(_replay("my_gemm_kernel", "volta_sgemm_128x64_nn"))).cost_ns == MS


def test_the_capability_of_the_devices_facts_stands_in_for_the_trace():
    read = trace(_products(PLAIN), devices=[])
    ledger = build_ledger(read)
    facts = DeviceFacts(device="cuda", compute_capability="9.0")
    assert capability_of(Case(trace=read, ledger=ledger, facts=facts)) == (9, 0)
    assert isinstance(rule(Case(trace=read, ledger=ledger)), Abstention)


def test_without_a_gpu_it_abstains():
    assert isinstance(rule(traced([op("aten::mm", 0, MS)])), Abstention)
    assert isinstance(rule(Case()), Abstention)
