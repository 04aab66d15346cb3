from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.library import opcheck

from steadytorch.conv.operator import conv_engine


def arguments(layout, groups=2, dtype=torch.float32):
    torch.manual_seed(0)
    made = [torch.randn(s) for s in ((2, 8, 9, 9), (6, 8 // groups, 3, 3), (6,), (2, 6, 9, 9))]
    made = [
        t.to(dtype).contiguous(memory_format=layout if t.dim() == 4 else torch.contiguous_format)
        for t in made
    ]
    tensors = [t.requires_grad_() for t in made]
    return (*tensors, [1, 1], [1, 1], [1, 1], groups, True, "", "", "")


LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])


@LAYOUTS
def test_schema_fake_and_gradients_are_registered_rightly(layout):
    opcheck(torch.ops.steadytorch.conv_engine, arguments(layout))


@LAYOUTS
def test_without_a_gpu_it_is_pytorchs_convolution(layout):
    x, w, b, z, *_ = given = arguments(layout)
    expected = torch.relu(torch.conv2d(x, w, b, padding=1, groups=2) + z)
    torch.testing.assert_close(conv_engine(*given), expected)
    assert conv_engine(*given).stride() == torch.empty_like(expected).stride()


@LAYOUTS
def test_gradients_are_right(layout):
    x, w, b, z, *rest = arguments(layout, dtype=torch.float64)
    # Away from the kink of the ReLU, where differences are no gradient.
    assert torch.autograd.gradcheck(
        lambda *t: conv_engine(*t, *rest[:4], False, *rest[5:]), (x, w, b, z)
    )
    out, plain = (
        conv_engine(x, w, b, z, *rest),
        torch.relu(torch.conv2d(x, w, b, padding=1, groups=2) + z),
    )
    seed = torch.randn_like(out)
    for mine, own in zip(
        torch.autograd.grad(out, (x, w, b, z), seed),
        torch.autograd.grad(plain, (x, w, b, z), seed),
        strict=True,
    ):
        torch.testing.assert_close(mine, own)


@LAYOUTS
@pytest.mark.parametrize("engines", [("", ""), ("aten", "")])
def test_gradients_of_gradients_are_right(layout, engines):
    x, w, b, _, *rest = arguments(layout, dtype=torch.float64)
    small = (x[:1, :, :4, :4].contiguous(memory_format=layout).detach().requires_grad_(), w, b)
    assert torch.autograd.gradgradcheck(
        lambda *t: conv_engine(*t, None, *rest[:4], False, "", *engines), small, fast_mode=True
    )


@LAYOUTS
def test_the_gradients_operator_is_registered_rightly(layout):
    x, w, _, dy, *_ = arguments(layout)
    named = "last" if layout is torch.channels_last else "first"
    shared = ([2, 8, 9, 9], [6, 4, 3, 3], [1, 1], [1, 1], [1, 1], 2)
    opcheck(torch.ops.steadytorch.conv_engine_grad, (dy, w, *shared, "dgrad", named, ""))
    opcheck(torch.ops.steadytorch.conv_engine_grad, (x, dy, *shared, "wgrad", named, ""))


@pytest.mark.parametrize("engine", ["", "aten"])
def test_all_passes_run_in_the_layout_of_the_first(engine):
    (
        x,
        w,
        *_,
    ) = arguments(torch.channels_last)
    w = w.detach().contiguous().requires_grad_()
    y = conv_engine(x, w, None, None, [1, 1], [1, 1], [1, 1], 2, False, "", engine, engine)
    dx, dw = torch.autograd.grad(y, (x, w), torch.randn(y.shape))
    assert dx.is_contiguous(memory_format=torch.channels_last)
    assert dw.is_contiguous(memory_format=torch.channels_last)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.given = arguments(torch.channels_last)
        self.weight = nn.Parameter(self.given[1].detach())

    def forward(self, x):
        return conv_engine(x, self.weight, None, None, *self.given[4:8], False, "eng1", "", "") + 1


def test_it_is_exported_as_one_operator():
    net, (x, *_) = Net().eval(), arguments(torch.channels_last)
    exported = torch.export.export(net, (x.detach(),))
    assert any("conv_engine" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x.detach()), net(x))


@pytest.mark.parametrize("spatial", [1, 3])
def test_one_and_three_dimensions(spatial):
    x, w = torch.randn(2, 4, *[5] * spatial), torch.randn(3, 4, *[3] * spatial)
    convolution = {1: torch.conv1d, 3: torch.conv3d}[spatial]
    n = [1] * spatial
    found = conv_engine(x, w, None, None, n, n, n, 1, False, "", "", "")
    torch.testing.assert_close(found, convolution(x, w, padding=1))
