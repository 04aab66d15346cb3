from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.rates.memory_passes import PASSES, WRAPPED_PASSES
from steadytorch.rates.operator_work import work_of

from ..traces.profiled import inputs_of

X = torch.randn(2, 4, 8, 8)
N = X.numel()
SCALE = torch.randn(4)
ROW = torch.randn(1, 4, 1, 1)

CALLS = [
    ("aten::add", lambda: X + X.sin(), 3 * 4 * N),
    ("aten::add", lambda: X + ROW, 4 * (2 * N + 4)),
    ("aten::add", lambda: X + ROW.expand_as(X), 4 * (2 * N + 4)),
    ("aten::mul_", lambda: X.clone().mul_(X), 3 * 4 * N),
    ("aten::mul", lambda: X.bfloat16() * torch.tensor(2.0), 2 * 2 * N + 4),
    ("aten::add", lambda: X.half() + X, (2 + 4 + 4) * N),
    ("aten::gt", lambda: X > 0, 5 * N),
    ("aten::where", lambda: torch.where(X > 0, X, X.sin()), (1 + 4 + 4 + 4) * N),
    ("aten::copy_", lambda: torch.empty(2, 4, 8, 8).copy_(X), 2 * 4 * N),
    ("aten::copy_", lambda: X.to(torch.float64), (4 + 8) * N),
    ("aten::fill_", lambda: torch.empty(2, 4, 8, 8).fill_(1.0), 4 * N),
    ("aten::zero_", lambda: torch.empty(2, 4, 8, 8).zero_(), 4 * N),
    ("aten::relu", lambda: F.relu(X), 2 * 4 * N),
    ("aten::sum", lambda: X.sum(), 4 * N),
    ("aten::_softmax", lambda: X.softmax(-1), 2 * 4 * N),
    ("aten::native_batch_norm", lambda: F.batch_norm(X, SCALE, SCALE.abs(), SCALE, SCALE), None),
    ("aten::native_layer_norm", lambda: F.layer_norm(X, (8,)), 2 * 4 * N),
    ("aten::native_group_norm", lambda: F.group_norm(X, 2), 2 * 4 * N),
    ("aten::max_pool2d", lambda: F.max_pool2d(X, 2), 4 * (N + N // 4)),
    ("aten::avg_pool2d", lambda: F.avg_pool2d(X, 3, 2, 1), 4 * (N + N // 4)),
    ("aten::adaptive_avg_pool2d", lambda: F.adaptive_avg_pool2d(X, 2), 4 * (N + 2 * 4 * 4)),
    ("aten::index_select", lambda: X.index_select(1, torch.tensor([0, 2])), 4 * N + 16),
]


@pytest.mark.parametrize(("name", "call", "moved"), CALLS)
def test_bytes_are_those_read_and_written(name, call, moved):
    work = work_of(name, inputs_of(call, name))
    assert work.bytes == (4 * (2 * N + 4 * 4) if moved is None else moved)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool2d(2, dilation=3),
        nn.MaxPool2d(3, 3, 1, ceil_mode=True),
        nn.MaxPool2d((2, 3)),
    ],
    ids=repr,
)
def test_output_sizes_of_pooling_are_pytorchs(pool):
    run = lambda: pool(X)  # noqa: E731
    work = work_of("aten::max_pool2d", inputs_of(run, "aten::max_pool2d"))
    assert work.bytes == 4 * (N + pool(X).numel())


def test_pooling_with_indices_writes_them():
    run = lambda: F.max_pool2d(X.clone().requires_grad_(), 2)  # noqa: E731
    work = work_of("aten::max_pool2d_with_indices", inputs_of(run, "aten::max_pool2d_with_indices"))
    assert work.bytes == 4 * N + 12 * (N // 4)


def test_types_are_promoted_as_pytorch_does():
    scalar = torch.tensor(1.0, dtype=torch.float64)
    run = lambda: X.half() * scalar  # noqa: E731
    assert run().dtype == torch.float16
    assert work_of("aten::mul", inputs_of(run, "aten::mul")).bytes == 2 * 2 * N + 8


KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("shape", [(), (8,)])
def test_results_are_as_large_as_pytorchs(first, second, shape):
    one, other = torch.ones(8, dtype=first), torch.ones(shape, dtype=second)
    result = one * other
    work = work_of("aten::mul", inputs_of(lambda: one * other, "aten::mul"))
    assert work.bytes == one.nbytes + other.nbytes + result.nbytes


def test_the_size_of_a_result_without_promotion_is_unknown():
    types = ["c10::Float8_e4m3fn", "c10::Float8_e5m2"]
    inputs = {"dims": [[8], [8]], "types": types, "concrete": ["", ""]}
    assert work_of("aten::mul", inputs) is None


def test_operations_of_elementwise_operators_are_steps_per_element():
    assert work_of("aten::add", inputs_of(lambda: X + X, "aten::add")).flops == N


def test_kernels_of_inductor_read_or_write_each_tensor_once():
    inputs = {
        "dims": [[64, 64], [64, 64], []],
        "types": ["c10::Half", "float", "Scalar"],
        "concrete": ["", "", "4096"],
    }
    assert work_of("triton_poi_fused_add_relu_0", inputs).bytes == (2 + 4) * 4096
    assert work_of("triton_tem_fused_mm_0", inputs) is None


@pytest.mark.parametrize("name", sorted(PASSES | WRAPPED_PASSES))
@pytest.mark.parametrize("inputs", [{}, {"dims": [], "types": []}])
def test_without_inputs_the_work_is_unknown(name, inputs):
    assert work_of(name, inputs) is None
