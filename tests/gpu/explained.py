"""Workloads that provoke one finding each; loaded from this file as users' own factories are."""

from __future__ import annotations

import torch
from torch import nn


class Reading(nn.Module):
    """Looks at a value after every product, so that the host waits for each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(1024))

    def forward(self, x):
        for _ in range(100):
            x = x @ self.weight
            if x[0, 0].item() > 1e9:
                break
        return x


def reading():
    return Reading().eval(), torch.ones(1024, 1024)


class Feeding(nn.Module):
    """Copies its batch from memory of the host that is not pinned."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 16, 3)
        self.batch = torch.randn(64, 3, 224, 224)

    def forward(self, x):
        return self.layer(self.batch.to(x.device, non_blocking=True))


def feeding():
    return Feeding().eval(), torch.ones(1)


def channels_first():
    """Convolutions in half precision on images that come as NCHW."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(8)]
    images = torch.randn(32, 64, 56, 56, dtype=torch.float16)
    return nn.Sequential(*layers).half().eval(), images


class Churning(nn.Module):
    """Sees another image size in every call, under cuDNN's benchmark mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(16, 16, 3)
        self.calls = 0

    def forward(self, x):
        torch.backends.cudnn.benchmark = True
        self.calls += 1
        height, width = 32 + self.calls % 97, 32 + self.calls // 97 % 97
        return self.layer(x.expand(4, 16, height, width).contiguous())


def churning():
    return Churning().eval(), torch.ones(1, 1, 1, 1)
