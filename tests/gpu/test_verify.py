"""Verification in a worker whose workload is on a GPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.bench.bench_worker import save_payload
from steadytorch.transforms import ambient
from steadytorch.tune.tuning_worker import TuningHandler
from steadytorch.verification.verdict import Verification
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Mixed(nn.Module):
    """Returns one output on the GPU and one on the CPU."""

    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        found = self.linear(x)
        return {"scores": found, "best": found.argmax(-1).cpu(), "least": found.amin().cpu()}


@pytest.fixture
def handler(tmp_path):
    def loaded(model, inputs):
        save_payload(Workload(model.eval(), inputs), tmp_path)
        handler = TuningHandler(tmp_path)
        handler.load("cuda", ambient())
        handler.reference(0)
        handler.set_up([])
        return handler

    return loaded


def test_outputs_may_be_on_the_cpu(handler):
    found = msgspec.convert(handler(Mixed(), torch.randn(8, 64)).verify(), Verification)
    assert found.fault is None
    assert found.error.relative_l2 < 1e-4


def test_a_wrong_output_on_the_cpu_is_found(handler):
    worker = handler(Mixed(), torch.randn(8, 64))
    own = worker.model
    worker.model = lambda x: own(x) | {"least": own(x)["least"] * 1.5}
    found = msgspec.convert(worker.verify(), Verification)
    assert found.error.relative_l2 == pytest.approx(0.5, rel=0.01)


def test_an_output_on_another_device_is_rejected(handler):
    worker = handler(Mixed(), torch.randn(8, 64))
    own = worker.model
    worker.model = lambda x: own(x) | {"scores": own(x)["scores"].cpu()}
    assert "is on cpu, expected cuda" in msgspec.convert(worker.verify(), Verification).fault


def test_a_worker_gives_back_the_memory_of_verification(handler):
    worker = handler(Mixed(4096), torch.randn(8192, 4096))
    output = 8192 * 4096 * 4
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    worker.verify()
    assert torch.cuda.memory_reserved() <= held + output
    # The arguments, as given and as copied, the outputs, their reference in float64, and two
    # results of the call.
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() < 10 * output
