from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.layout_conversion import NAME, rule

from ..findings.cases import MS, US, launch, op, step, the, traced

TO = "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false>(Params)"
BACK = "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true, false>(Params)"


def _convolution(conversion, length):
    return [
        step(1, 0, 10 * MS),
        op("aten::cudnn_convolution", 0, 100 * US),
        *launch(conversion, call=(10 * US, 20 * US), gpu=(MS, MS + length), correlation=1),
        *launch("s16816cudnn", call=(30 * US, 40 * US), gpu=(5 * MS, 6 * MS), correlation=2),
    ]


@pytest.mark.parametrize("kernel", [TO, BACK])
def test_conversions_are_found_with_the_operator_that_needs_them(kernel):
    found = the(rule(traced(_convolution(kernel, 100 * US))))
    assert found.id == NAME
    assert found.recoverable_ns == (0, 100 * US)
    assert found.transforms == ("channels_last",)
    assert any("aten::cudnn_convolution" in line for line in found.evidence)


def test_a_small_share_is_not_worth_it():
    assert rule(traced(_convolution(TO, 20 * US))) == ()


def test_other_kernels_are_not_conversions():
    name = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32"
    assert rule(traced(_convolution(name, MS))) == ()


def test_without_a_gpu_it_abstains():
    assert isinstance(rule(traced([op("aten::conv2d", 0, MS)])), Abstention)
    assert isinstance(rule(Case()), Abstention)
