"""One option in a process, here in that of the test."""

from __future__ import annotations

import torch
from rival_worker import RivalHandler
from torch import nn

from steadytorch import Workload
from steadytorch.bench.bench_worker import save_payload
from steadytorch.transforms import ambient


def test_an_option_is_set_up_and_timed_block_by_block(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval()
    save_payload(Workload(model, (torch.randn(8, 64),)), tmp_path)
    handler = RivalHandler(tmp_path)
    handler.load("cpu", ambient())
    assert handler.prepare("eager", None) > 0
    assert len(handler.block("period", 5)) == 5
    assert len(handler.clocks()) == 5
