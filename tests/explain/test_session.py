from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.errors import UsageError
from steadytorch.explain import capture as capturing
from steadytorch.explain import session
from steadytorch.explain.session import explain
from steadytorch.ledger.ledger import CPU_SLICES
from steadytorch.rates.regime import REGIMES
from steadytorch.results.explain import Explanation
from steadytorch.results.machine import DeviceFacts
from steadytorch.rules import REGISTRY
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

from ..traces.recorded import on_cpu

TRACES = Path(__file__).parents[3] / "shared" / "traces"
real_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the real traces")


def workload(name):
    return load_workload(f"{Path(__file__).with_name('workloads.py')}:{name}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield explain(workload("tiny"), device="cpu", budget="1.5s", steps=4)


@pytest.fixture
def own_trace(tmp_path):
    """A trace that PyTorch's profiler wrote, of three marked steps."""
    path = tmp_path / "own.json"
    path.write_bytes(on_cpu())
    return path


# -- a workload ---------------------------------------------------------------------------------


def test_a_workload_is_explained_step_by_step(tiny):
    assert tiny.source == "capture"
    assert tiny.regime in REGIMES
    assert [step.index for step in tiny.steps] in ([3, 4, 5], [3, 4, 5, 6])
    for step in tiny.steps:
        assert step.slices_ns.keys() == set(CPU_SLICES)
        assert sum(step.slices_ns.values()) == step.total_ns
    assert tiny.gpu is None
    assert math.isclose(sum(tiny.variance_shares.values()), 1.0)


def test_the_unprofiled_measurement_is_part_of_it(tiny):
    assert len(tiny.measured.samples_ns) >= 10
    assert tiny.distortion > 0
    assert tiny.environment.device == "cpu"
    assert (tiny.failed, tiny.interrupted) == (None, False)


def test_operators_are_held_against_the_limits(tiny):
    names = {line.name for line in tiny.roofline.lines}
    assert "aten::addmm" in names
    assert tiny.roofline.share_of_limit > 0


def test_every_rule_has_found_or_could_tell_or_abstained(tiny):
    said = [abstention.rule for abstention in tiny.abstained]
    assert len(said) == len(set(said))
    assert set(said) | {finding.id for finding in tiny.findings} <= set(REGISTRY)


def test_findings_come_by_what_they_recover(tiny):
    ranks = [(finding.information, -finding.recoverable_ns[1]) for finding in tiny.findings]
    assert ranks == sorted(ranks)


def test_the_whole_survives_json(tiny):
    text = msgspec.json.encode(tiny)
    assert msgspec.json.encode(msgspec.json.decode(text, type=Explanation)) == text


@pytest.mark.slow
def test_a_workload_that_cannot_be_profiled_is_explained_by_its_samples():
    found = explain(workload("shy"), device="cpu", budget="0.8s")
    assert (found.steps, found.regime, found.roofline) == ((), "unclassified", None)
    assert found.measured is not None
    reasons = {abstention.rule: abstention.why for abstention in found.abstained}
    assert "not while you watch" in reasons["profile"]
    assert "launch-bound" in reasons


@pytest.mark.parametrize(
    ("version", "device", "rate", "training", "warned"),
    [
        ("2.13.0+cu130", "cuda", 0.1, True, True),
        ("2.13.0+cu130", "cuda", 0.0, True, False),
        ("2.13.0+cu130", "cuda", 0.1, False, False),
        ("2.13.0+cpu", "cpu", 0.1, True, False),
        ("2.12.1+cu130", "cuda", 0.1, True, False),
    ],
)
def test_dropout_that_pytorch_corrupts_when_compiled_is_told(
    monkeypatch, version, device, rate, training, warned
):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate)).train(training)
    given = Workload.training(model, torch.ones(1, 2), torch.sum, torch.optim.SGD)
    facts = DeviceFacts(device=device, torch=version)
    seen = SimpleNamespace(
        **dict.fromkeys(("trace", "series", "rates", "distortion", "failed")),
        measured=SimpleNamespace(period=None),
        notes={},
        gaps=(),
        interrupted=False,
    )
    monkeypatch.setattr(session, "load_facts", lambda device: facts)
    monkeypatch.setattr(capturing, "capture", lambda *args, **options: seen)
    remarks = explain(given, device="cpu").remarks
    assert any("198333" in remark for remark in remarks) is warned


@pytest.mark.slow
def test_an_interrupt_keeps_the_measurement():
    def interrupt(message):
        if message == "profiling":
            raise KeyboardInterrupt

    found = explain(workload("tiny"), device="cpu", budget="0.8s", progress=interrupt)
    assert found.interrupted
    assert found.measured is not None
    assert found.steps == ()


# -- a trace file -------------------------------------------------------------------------------


def test_a_trace_file_is_explained_without_a_run(own_trace):
    told = []
    found = explain(str(own_trace), progress=told.append)
    assert told == ["reading own.json"]
    assert (found.source, found.environment.device) == ("own.json", "cpu")
    assert len(found.steps) == 3
    assert (found.measured, found.distortion, found.notes) == (None, None, {})
    assert "cpu-contention" in {abstention.rule for abstention in found.abstained}


def test_a_trace_is_read_without_pytorch(own_trace):
    program = (
        "import sys\nfrom steadytorch.explain.session import explain\n"
        "found = explain(sys.argv[1])\n"
        "print(len(found.steps), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(own_trace)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3", "False"]


@real_traces
@pytest.mark.parametrize(
    ("name", "regime", "must_find", "must_not_lead"),
    [
        ("h100_bert_small", "launch-bound", {"launch-bound"}, set()),
        ("h100_owlv2", "input-bound", {"input-pipeline"}, {"synchronisation"}),
        (
            "kineto_v100_resnet50_workers0",
            "input-bound",
            {"input-pipeline", "tensor-cores-unused"},
            {"synchronisation"},
        ),
        ("v100_resnet_ns_resolution", "kernel-bound", {"queue-full"}, {"launch-bound"}),
    ],
)
def test_real_traces_show_what_was_published(name, regime, must_find, must_not_lead):
    found = explain(TRACES / f"{name}.json.gz")
    assert found.regime == regime
    ids = [finding.id for finding in found.findings]
    assert must_find <= set(ids)
    assert not must_not_lead & set(ids[:1])
    for step in found.steps:
        assert sum(step.slices_ns.values()) == step.total_ns


@real_traces
def test_a_trace_says_what_ran_it():
    facts = explain(TRACES / "kineto_v100_resnet50_workers0.json.gz").environment
    assert (facts.device, facts.name) == ("cuda", "Tesla V100-DGXS-32GB")
    assert facts.compute_capability == "7.0"
    assert facts.unknown["torch"] == "not in the trace"


# -- wrong requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "cannot profile 0 steps: give 1 to 1,000"),
        ({"steps": 1001}, "cannot profile 1001 steps"),
        ({"budget": "soon"}, "'soon' is not a time"),
        ({"pause": "-1s"}, "'-1s' is not a time"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments, said):
    with pytest.raises(UsageError, match=said):
        explain(workload("tiny"), **arguments)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b'{"traceEvents": 3}'])
def test_what_is_no_trace_is_a_usage_error(tmp_path, content):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.json"):
        explain(path)


def test_devices_with_odd_facts_are_no_fault(tmp_path, own_trace):
    odd = json.loads(own_trace.read_text())
    odd["deviceProperties"] = [{"name": 3, "computeMajor": "x", "numSms": -1.5}]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(odd))
    assert explain(path).environment.device == "cpu"
