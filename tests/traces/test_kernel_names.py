from __future__ import annotations

import pytest

from steadytorch.traces.kernel_names import (
    communicates,
    converts_layout,
    is_double,
    is_product,
    is_single,
    short,
    uses_tensor_cores,
)

WITH = [
    "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn",
    "volta_h884gemm_256x64_ldg8_nn",
    "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn",
    "ampere_h16816gemm_128x128_ldg8_stages_32x5_nn",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>()",
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(Params)",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(Params)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x256x64_4x1x1",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> >, 128, cutlass::bfloat16_t, float> > > >",
    "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 64u, 128u, (deep_gemm::GemmType)0>(CUtensorMap)",
]
WITHOUT = [
    "volta_sgemm_128x64_nn",
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "ampere_sgemm_64x32_sliced1x4_tn",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)",
    "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int)",
    "void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>(Params)",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>(Params)",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(Params)",
]
OTHERS = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)",
    "triton_poi_fused_convolution_relu_0",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*)",
    "Memcpy HtoD (Pageable -> Device)",
]


@pytest.mark.parametrize("name", WITH)
def test_names_with_marks_of_tensor_cores(name):
    assert uses_tensor_cores(name)


@pytest.mark.parametrize("name", WITHOUT + OTHERS)
def test_names_without_such_marks(name):
    assert not uses_tensor_cores(name)


@pytest.mark.parametrize("name", WITHOUT[:8])
def test_names_of_arithmetic_in_single_precision(name):
    assert is_single(name)


@pytest.mark.parametrize("name", [*WITH[:-2], "my_gemm_kernel", "gemm_bf16_128x128"])
def test_names_that_do_not_show_single_precision(name):
    assert uses_tensor_cores(name) or not is_single(name)


@pytest.mark.parametrize("name", [n for n in WITH + WITHOUT if "nchwToNhwc" not in n])
def test_names_of_products(name):
    assert is_product(name)


@pytest.mark.parametrize("name", [*OTHERS, "cudnn::ops::convertTensor_kernel<float>"])
def test_names_of_others(name):
    assert not is_product(name)


@pytest.mark.parametrize(
    ("name", "converts"),
    [
        (WITHOUT[-2], True),
        ("void cudnn::ops::nhwcToNchwKernel<float, float>(Params)", True),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128", False),
    ],
)
def test_conversions_of_layout(name, converts):
    assert converts_layout(name) is converts


def test_double_precision_and_collectives_are_told():
    assert is_double("volta_dgemm_128x64_nn")
    assert not is_double("volta_sgemm_128x64_nn")
    assert communicates(OTHERS[1])
    assert not communicates(OTHERS[0])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("void at::native::(anonymous namespace)::f<4, float>(int, float)", "f<4, float>"),
        ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("a\x1b[31mred", "a?[31mred"),
        ("x" * 100, "x" * 67 + "..."),
    ],
)
def test_names_are_shortened_to_what_they_are(name, shown):
    assert short(name) == shown
