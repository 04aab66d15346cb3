"""Separable convolutions and Linears: layers to fuse, and what was fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.kernels.activated_linear import activated_linear
from steadytorch.kernels.depthwise_conv import depthwise_conv2d
from steadytorch.kernels.pointwise_conv import pointwise_conv2d
from steadytorch.kernels.small_channel_conv import thin_conv2d
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.workload import Workload

SEPARABLE = FusedKernels(FusedKernels.Parameters(separable=True))
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def stochastic_depth(input, p, mode, training=True):
    """Mimics torchvision's function without needing it; callers wrap it for `torch.fx`."""
    if not training or p == 0.0:
        return input
    return input * torch.empty(input.shape[0], 1, 1, 1).bernoulli_(1 - p)


stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"


class Net(nn.Module):
    """Layers to choose from, for images of six channels; `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.point, self.point2 = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1, bias=False)
        self.deep = nn.Conv2d(6, 6, 3, 2, 2, 2, groups=6)
        self.strided, self.padded = nn.Conv2d(6, 6, 1, 2), nn.Conv2d(6, 6, 1, padding=1)
        self.grouped = nn.Conv2d(6, 6, 3, 1, 1, groups=3)
        self.multiplied = nn.Conv2d(6, 12, 3, 1, 1, groups=6)
        self.mirrored = nn.Conv2d(6, 6, 3, 1, 1, groups=6, padding_mode="reflect")
        self.same_size = nn.Conv2d(6, 6, 3, padding="same", groups=6)
        self.norm, self.same = nn.BatchNorm2d(6), nn.Identity()
        self.relu, self.relu_, self.silu = nn.ReLU(), nn.ReLU(True), nn.SiLU()
        self.gelu, self.dropout, self.mish = nn.GELU(), nn.Dropout(0.5), nn.Mish()
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.one = nn.Conv2d(6, 1, 1)
        self.wide, self.back = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.row = nn.Parameter(torch.randn(1, 6, 1, 1))
        self.run = forward
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        y = self.excite(self.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return torch.sigmoid(y)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return self.run(self, x) * scale


def made(forward: Any, *, batch: int = 2) -> Workload:
    torch.manual_seed(0)
    return Workload(Net(forward).double().eval(), torch.randn(batch, 6, 8, 8).double())


def fused_nodes(model: Any) -> list[torch.fx.Node]:
    operators = (pointwise_conv2d, depthwise_conv2d, thin_conv2d, activated_linear)
    return [node for node in model.graph.nodes if node.target in operators]


def shown(model: Any) -> list[str]:
    """Each fused layer of a graph in a few words."""
    found = []
    for node in fused_nodes(model):
        if node.target is activated_linear:
            found.append(f"linear {node.args[3]}")
            continue
        if node.target is not pointwise_conv2d:
            name = node.target.__name__.removesuffix("_conv2d")
            found.append(" ".join([name, node.args[6]]).strip())
            continue
        *_, activation, gate, other = node.args
        with_gate, with_sum = "gate" * (gate is not None), "sum" * (other is not None)
        words = ["pointwise", with_gate, activation, with_sum]
        found.append(" ".join(word for word in words if word))
    return found


def fused(workload: Workload) -> list[str]:
    """Checks results against the model and returns what is fused."""
    with torch.no_grad(), SEPARABLE.applied(workload) as rewritten:
        inputs = [x.clone() for x in workload.inputs]
        found = rewritten.model(*inputs)
        torch.testing.assert_close(found, workload.model(*workload.inputs), **CLOSE)
        rewritten.model.graph.lint()
        return shown(rewritten.model)
