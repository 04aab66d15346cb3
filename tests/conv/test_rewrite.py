from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from steadytorch import load_workload
from steadytorch.conv.module import engine_convolutions
from steadytorch.conv.rewrite import rewrite


class Net(nn.Module):
    """A few layers; `forward` is given."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 1)
        self.relu, self.drop = nn.ReLU(), nn.Dropout(0.5)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def randomised(model):
    """Sets statistics and scales that reveal a missing fold."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


def rewritten(run, x=None):
    torch.manual_seed(0)
    model = randomised(Net(run))
    x = torch.randn(2, 4, 6, 6) if x is None else x
    traced = fx.symbolic_trace(model)
    with torch.no_grad():
        expected = model.double()(x.double())
        model.float()
        found = rewrite(traced, (x.clone(),), {})(x.clone())
    return traced, float((found.double() - expected).norm() / expected.norm())


def forms(traced):
    """Epilogue of each convolution."""
    return [c.problem.epilogue for c in engine_convolutions(traced) if c.problem]


def block(net, x):
    return net.relu(net.norm(net.conv(x)) + net.second(x))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda net, x: net.conv(x), ["none"]),
        (lambda net, x: net.second(x), ["bias"]),
        (lambda net, x: net.norm(net.conv(x)), ["bias"]),
        (lambda net, x: net.relu(net.norm(net.conv(x))), ["bias_relu"]),
        (lambda net, x: F.relu(net.conv(x), inplace=True), ["bias_relu"]),
        (lambda net, x: net.drop(net.conv(x)).relu_(), ["bias_relu"]),
        (lambda net, x: net.norm(net.conv(x)) + x, ["add_bias"]),
        (lambda net, x: torch.relu(x + net.second(x)), ["add_bias_relu"]),
        (block, ["add_bias_relu", "bias"]),
        (lambda net, x: net.second(net.relu(net.conv(x))), ["bias_relu", "bias"]),
    ],
)
def test_what_follows_a_convolution_becomes_its_epilogue(run, expected):
    traced, error = rewritten(run)
    assert forms(traced) == expected
    assert error < 1e-6


def in_place_on_the_input(net, x):
    x = x * 1
    y = net.conv(x)
    x.relu_()
    return y + x


def read_twice(net, x):
    y = net.conv(x)
    return net.relu(y) + y


def in_place_into_the_other(net, x):
    z = x * 2
    z.add_(net.conv(x))
    return z


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (in_place_on_the_input, ["none"]),
        (read_twice, ["none"]),
        (in_place_into_the_other, ["none"]),
        (lambda net, x: net.conv(x) + x[:, :, :1, :1], ["none"]),
        (lambda net, x: net.conv(x) + 1, ["none"]),
        (lambda net, x: torch.add(net.conv(x), x, alpha=2), ["none"]),
        (lambda net, x: F.leaky_relu(net.conv(x)), ["none"]),
    ],
)
def test_what_cannot_be_proved_is_left(run, expected):
    traced, error = rewritten(run)
    assert forms(traced) == expected
    assert error < 1e-6


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Conv2d(4, 4, 2, padding="same"),
    ],
)
def test_layers_that_compute_something_else_stay(layer):
    traced, _ = rewritten(lambda net, x: net.second(x))
    model = nn.Sequential(layer).eval()
    traced = rewrite(fx.symbolic_trace(model), (torch.randn(1, 4, 6, 6),), {})
    assert engine_convolutions(traced) == []


def test_a_hook_keeps_its_layer():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    traced = rewrite(fx.symbolic_trace(model), (torch.randn(1, 4, 6, 6),), {})
    assert engine_convolutions(traced) == []


def test_batch_norm_in_training_is_not_folded():
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)).eval()
    model[1].train()
    traced = rewrite(fx.symbolic_trace(model), (torch.randn(2, 4, 6, 6),), {})
    assert forms(traced) == ["none"]


def test_the_models_own_tensors_are_not_written_to():
    model = randomised(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(True)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rewrite(fx.symbolic_trace(model), (torch.randn(2, 4, 6, 6),), {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("resnet18", {"bias_relu": 9, "add_bias_relu": 8, "bias": 3}),
        # Ten residuals; ReLU in six blocks and eight gates; the rest is followed by Hardswish, or
        # by nothing.
        ("mobilenet_v3_large", {"bias": 33, "bias_relu": 19, "add_bias": 10}),
        ("unet", {"bias_relu": 18, "bias": 1}),
    ],
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.sampled(every=4)
def test_networks_keep_their_results(name, fused, last):
    workload = load_workload(name, batch=1)
    model, (x,) = randomised(workload.model), workload.inputs
    side = 188 if name == "unet" else 64  # the least that its windows fit into
    x = x[..., :side, :side].contiguous()
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        own = model(x)
        traced = rewrite(fx.symbolic_trace(model), (x,), {})
        found = traced(x)
        expected = model.double()(x.double())
    error = (found.double() - expected).norm() / expected.norm()
    assert error < max(5e-6, 2 * (own.double() - expected).norm() / expected.norm())
    convolutions = engine_convolutions(traced)
    assert {c.problem.layout for c in convolutions} == {"last" if last else "first"}
    found = forms(traced)
    assert {form: found.count(form) for form in found} == fused


def normed(inputs, outputs, kernel=3, groups=1):
    padding = kernel // 2
    layer = nn.Conv2d(inputs, outputs, kernel, padding=padding, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def vgg_block():
    """Like VGG with batch norm: convolutions with bias and in-place ReLU."""
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True)]
    layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.MaxPool2d(2))


class Inverted(nn.Module):
    """Like EfficientNet: expand, depthwise, gate, project, add."""

    def __init__(self):
        super().__init__()
        self.expand, self.filter = normed(4, 16, 1), normed(16, 16, 3, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 2, 1), nn.Conv2d(2, 16, 1)
        self.project = normed(16, 4, 1)
        self.activation = nn.SiLU(inplace=True)

    def forward(self, x):
        y = self.activation(self.filter(self.activation(self.expand(x))))
        gate = self.excite(self.activation(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        return self.project(torch.sigmoid(gate) * y) + x


@pytest.mark.parametrize(
    ("block", "fused", "left"),
    [
        (vgg_block, ["bias_relu", "bias_relu"], {nn.MaxPool2d: 1}),
        (Inverted, ["bias"] * 4 + ["add_bias"], {nn.SiLU: 3}),
    ],
    ids=["vgg", "efficientnet"],
)
def test_blocks_fuse_all_but_what_no_precompiled_engine_does(block, fused, left):
    model, x = randomised(block()), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        expected = model(x)
        traced = rewrite(fx.symbolic_trace(model), (x,), {})
        torch.testing.assert_close(traced(x), expected, rtol=1e-4, atol=1e-5)
    assert forms(traced) == fused
    called = [traced.get_submodule(n.target) for n in traced.graph.nodes if n.op == "call_module"]
    kinds = [type(module) for module in called]
    assert {kind: kinds.count(kind) for kind in (nn.SiLU, nn.MaxPool2d) if kind in kinds} == left
    assert nn.BatchNorm2d not in kinds


def densenet_layer(channels):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 8, 1, bias=False)
            self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)

        def forward(self, x):
            y = self.conv1(F.relu(self.norm1(x), inplace=True))
            y = self.conv2(F.relu(self.norm2(y), inplace=True))
            return torch.cat([x, y], 1)

    return Layer()


def test_dense_blocks_fold_the_norm_between_their_convolutions():
    model = randomised(nn.Sequential(densenet_layer(4), densenet_layer(8)))
    x = torch.randn(1, 4, 8, 8)
    traced = rewrite(fx.symbolic_trace(model), (x,), {})
    assert forms(traced) == ["bias_relu", "none"] * 2
    with torch.no_grad():
        torch.testing.assert_close(traced(x), model(x), rtol=1e-4, atol=1e-5)
