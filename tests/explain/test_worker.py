from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch import Workload
from steadytorch.explain import worker
from steadytorch.explain.worker import ExplainHandler
from steadytorch.transforms import ambient
from steadytorch.transforms.base import flags
from steadytorch.trial.worker import save_payload

SWITCHED = {"name": "cudnn_benchmark", "parameters": []}


@pytest.fixture
def handler(tmp_path, monkeypatch):
    """A worker's handler in this process, as if convolutions had run on a GPU."""
    monkeypatch.setattr(worker, "has_convolved", lambda: True)
    save_payload(Workload(nn.Linear(4, 4), torch.ones(2, 4)), tmp_path)
    made = ExplainHandler(tmp_path)
    made.load("cpu", ambient())
    yield made
    made.close()


def seen(handler):
    notes = handler.notes()
    return notes["cudnn_benchmark"], notes["cudnn_benchmark_late"]


def test_a_switch_that_stays_off_is_off(handler):
    handler.set_up([])
    assert seen(handler) == (False, False)


def test_a_switch_that_was_on_from_the_start_is_not_late(handler):
    with flags((torch.backends.cudnn, "benchmark", True)):
        handler.set_up([])
        assert seen(handler) == (True, False)


def test_a_switch_after_the_warm_up_is_late(handler):
    handler.set_up([])
    with flags((torch.backends.cudnn, "benchmark", True)):
        assert seen(handler) == (True, True)


def test_a_candidate_that_switches_within_its_calls_counts_as_on(handler):
    handler.set_up([SWITCHED])
    assert torch.backends.cudnn.benchmark is False
    assert seen(handler) == (True, False)
