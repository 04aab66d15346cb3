from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from steadytorch import Workload
from steadytorch.ambient import flags
from steadytorch.bench.bench_worker import save_payload
from steadytorch.explain import explain_worker
from steadytorch.explain.explain_worker import ExplainHandler
from steadytorch.transforms import ambient

PROFILE = """
import sys
from pathlib import Path
from steadytorch.explain.explain_worker import ExplainHandler
from steadytorch.transforms import ambient

handler = ExplainHandler(Path(sys.argv[1]))
handler.load("cpu", ambient())
handler.set_up([])
handler.profile(1, 0.1)
sys.exit(" ".join({"torch._dynamo", "torch._inductor"} & set(sys.modules)) or 0)
"""
SWITCHED = {"name": "cudnn_benchmark", "parameters": []}


@pytest.fixture
def handler(tmp_path, monkeypatch):
    """A worker's handler in this process, as if convolutions had run on a GPU."""
    monkeypatch.setattr(explain_worker, "has_convolved", lambda: True)
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


def test_profiling_does_not_load_the_compiler_and_says_what_was_recorded(tmp_path):
    save_payload(Workload(nn.Linear(4, 4), torch.ones(2, 4)), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROFILE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / explain_worker.TRACE_FILE).read_text())
    assert {name: trace[name] for name in explain_worker.SWITCHES} == dict.fromkeys(
        explain_worker.SWITCHES, 1
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_profiles_what_pytorchs_own_profiler_would(device, monkeypatch):
    both = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.autograd.profiler, "_supported_activities", lambda: both)
    activities = both if device == "cuda" else {ProfilerActivity.CPU}
    theirs = profile(activities=activities, **dict.fromkeys(explain_worker.SWITCHES, True))
    monkeypatch.setattr(torch.autograd.profiler.profile, "_prepare_trace", lambda self: None)
    theirs.prepare_trace()
    ours = vars(explain_worker.profile_of(device))
    assert ours["kineto_activities"] == activities
    differing = {name for name, value in vars(theirs.profiler).items() if value != ours[name]}
    assert differing <= {"experimental_config", "_stats"}
