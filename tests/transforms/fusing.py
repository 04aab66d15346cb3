"""Networks in which there is something to fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.workload import Workload

STEM, SUMS = FusedKernels.Parameters(stem=True), FusedKernels.Parameters(residual=True)


class Net(nn.Module):
    """Layers to choose from; `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.relu_, self.pool = nn.ReLU(), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.same = nn.Identity()
        self.run = forward

    def forward(self, x: torch.Tensor, scale: float | None = None) -> Any:
        return self.run(self, x) if scale is None else self.run(self, x) * scale


def workload(forward: Any = lambda net, x: net.pool(net.relu(net.conv(x)))) -> Workload:
    torch.manual_seed(0)
    return Workload(Net(forward).eval(), torch.randn(2, 3, 9, 9))


class Residual(nn.Module):
    """A stem and two residual blocks with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        for norm in (self.bn1, self.bn2, self.bn3):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(x))
        out += x
        out = self.relu(out)
        return self.relu(self.bn3(self.conv3(out)) + out)


def residual() -> Workload:
    torch.manual_seed(0)
    return Workload(Residual().eval(), torch.randn(2, 3, 33, 40))


def functions(model: Any) -> list[str]:
    return [node.target.__name__ for node in model.graph.nodes if node.op == "call_function"]
