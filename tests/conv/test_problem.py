from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from steadytorch.conv.problem import ConvProblem, parse, strides
from steadytorch.errors import UsageError


def problem(**changes: Any) -> ConvProblem:
    fields: dict[str, Any] = {
        "operation": "fprop",
        "epilogue": "bias_relu",
        "number": "fp16",
        "layout": "last",
        "input": (2, 64, 56, 56),
        "weight": (128, 64, 3, 3),
        "stride": (2, 2),
        "padding": (1, 1),
        "dilation": (1, 1),
    }
    return ConvProblem(**(fields | changes))


@given(
    spatial=st.lists(st.integers(5, 40), min_size=1, max_size=3),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 1),
)
def test_the_output_has_the_shape_that_pytorch_gives(spatial, kernel, stride, padding, dilation):
    n = len(spatial)
    found = problem(
        input=(1, 2, *spatial),
        weight=(3, 2, *[kernel] * n),
        stride=(stride,) * n,
        padding=(padding,) * n,
        dilation=(dilation,) * n,
    )
    convolution = [torch.conv1d, torch.conv2d, torch.conv3d][n - 1]
    x, w = torch.empty(found.input, device="meta"), torch.empty(found.weight, device="meta")
    expected = convolution(x, w, None, stride, padding, dilation)
    assert found.output == expected.shape


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"operation": "dgrad", "epilogue": "none", "layout": "first"},
        {"number": "tf32", "groups": 4, "weight": (128, 16, 3, 3)},
        {"input": (1, 8, 100), "weight": (4, 8, 5), "stride": (1,), "padding": (0,)}
        | {"dilation": (2,)},
    ],
)
def test_a_key_reads_back_as_the_same_problem(changes):
    assert parse(problem(**changes).key) == problem(**changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fprop",
        problem().key + "x",
        problem().key.replace("fprop", "eval"),
        problem().key.replace("w128x64x3x3", "w128x32x3x3"),
        problem().key.replace("s2x2", "s0x2"),
        problem().key.replace("i2x64", "i\uff12x64"),
    ],
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(UsageError):
        parse(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stride": (1,)}, "stride"),
        ({"groups": 3}, "groups"),
        ({"input": (1, 64, 1, 1), "padding": (0, 0)}, "does not fit into"),
        ({"input": (1, 64), "weight": (128, 64)}, "spatial"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_reason(changes, words):
    with pytest.raises(UsageError, match=words):
        problem(**changes)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 7), (2, 3, 5, 7, 4)])
def test_strides_are_those_of_pytorch(shape):
    x = torch.empty(shape)
    assert strides(shape, "first") == list(x.stride())
    if len(shape) > 3:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        assert strides(shape, "last") == list(x.contiguous(memory_format=layout).stride())


def test_work_and_traffic_count_each_element_once():
    found = problem(
        epilogue="add_bias_relu",
        input=(1, 2, 3, 3),
        weight=(4, 2, 1, 1),
        stride=(1, 1),
        padding=(0, 0),
    )
    assert found.operations == 2 * (4 * 9) * 2
    assert found.traffic_bytes == 2 * (18 + 8 + 36 + 36)


@pytest.mark.parametrize(
    ("operation", "seen"), [("fprop", 28 * 28), ("wgrad", 28 * 28), ("dgrad", 56 * 56)]
)
def test_traffic_leaves_out_what_a_stride_steps_over_but_not_of_a_gradient(operation, seen):
    sizes = {"input": (64, 256, 56, 56), "weight": (512, 256, 1, 1), "padding": (0, 0)}
    found = problem(operation=operation, epilogue="none", **sizes)
    output = 64 * 512 * 28 * 28
    assert found.traffic_bytes == 2 * (64 * 256 * seen + 512 * 256 + output)


@given(
    size=st.integers(1, 30),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 6),
    padding=st.integers(0, 6),
    dilation=st.integers(1, 6),
)
def test_traffic_counts_the_input_that_a_kernel_sees(size, kernel, stride, padding, dilation):
    assume(size + 2 * padding > dilation * (kernel - 1))
    found = problem(
        epilogue="none",
        input=(1, 1, size),
        weight=(1, 1, kernel),
        stride=(stride,),
        padding=(padding,),
        dilation=(dilation,),
    )
    outputs = found.output[2]
    starts = [stride * place - padding for place in range(outputs)]
    seen = {start + dilation * tap for start in starts for tap in range(kernel)}
    assert found.traffic_bytes == 2 * (len(seen & set(range(size))) + kernel + outputs)
