from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from steadytorch.kernels.launch import (
    MOST_ELEMENTS,
    Launch,
    is_channels_last,
    is_launchable,
    route,
)


def like(*shape, dtype=torch.float32, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floating_point_types_that_float32_holds_are_taken(dtype):
    assert is_launchable(like(2, 3, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_types_are_left_to_pytorch(dtype):
    assert not is_launchable(like(2, 3, dtype=dtype), dtype)


def test_a_mix_of_types_is_left_to_pytorch():
    assert not is_launchable(like(2, 3), torch.float16)


def test_offsets_that_need_more_than_32_bits_are_left_to_pytorch():
    assert is_launchable(like(MOST_ELEMENTS), torch.float32)
    assert not is_launchable(like(MOST_ELEMENTS + 1), torch.float32)
    assert not is_launchable(like(2, 2**30), torch.float32)


def test_nothing_is_launched_over_no_elements():
    assert not is_launchable(like(0, 3), torch.float32)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (like(2, 3, 4, 5), False),
        (like(2, 3, 4, 5, memory_format=torch.channels_last), True),
        (like(1, 3, 4, 5, memory_format=torch.channels_last), True),
        (like(4, 5, 3).permute(2, 0, 1)[None], None),
        (like(2, 1, 4, 5, memory_format=torch.channels_last), False),
        (like(2, 3, 1, 1, memory_format=torch.channels_last), False),
        (like(2, 3, 4, 6)[..., ::2], None),
        (like(2, 3, 5, 4).mT, None),
        (like(7), False),
    ],
    ids=[
        *("in order", "last", "one image", "a picture", "one channel", "one pixel", "with gaps"),
        *("transposed", "flat"),
    ],
)
def test_the_layout_is_known_by_its_strides(tensor, expected):
    assert is_channels_last(tensor) is expected


def test_a_view_that_negates_is_left_to_the_dispatcher(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    functions = [lambda: None for _ in range(3)]
    negated, plain = torch.tensor([1 + 2j]).conj().imag, torch.ones(1)
    assert negated.is_neg()
    assert route(*functions, plain) is functions[0]
    assert route(*functions, plain, negated) is functions[1]


class Program:
    """Fake compiled kernel that records its arguments."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append((grid, arguments, options))

        return launch


def test_tensors_come_first_then_what_was_given():
    program, x = Program(), torch.zeros(4)
    launch = Launch(program, (7, 1, 1), (4, True), torch.device("cpu"), warps=8)
    launch(x)
    launch(x)
    assert program.calls == [((7, 1, 1), (x, 4, True), {"num_warps": 8})] * 2


def test_the_operators_are_there_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from steadytorch.kernels.relu_max_pool import relu_max_pool2d\n"
        "from steadytorch.kernels.bias_add_relu import bias_add_relu\n"
        "x = torch.tensor([[[[-1., 2.], [3., 4.]]]])\n"
        "print(relu_max_pool2d(x, 2).item(), bias_add_relu(x, x).sum().item())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["4.0", "18.0"], found.stderr
