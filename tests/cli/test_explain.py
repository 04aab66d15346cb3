from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.explain import session as module
from steadytorch.results.explain import Explanation

from .conftest import only_line

HOSTILE = "the data ended\x1b[2J"
PROFILED = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, record_function

layer, x = torch.nn.Linear(64, 64), torch.ones(8, 64)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for number in range(3):
        with record_function(f"ProfilerStep#{number}"):
            layer(x)
profiler.export_chrome_trace(sys.argv[1])
"""


@pytest.fixture(scope="module")
def trace_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "steps.json"
    subprocess.run([sys.executable, "-c", PROFILED, str(path)], check=True)
    return path.read_bytes()


@pytest.fixture
def trace(folder, trace_bytes):
    """A trace file in the working directory."""
    path = folder / "steps.json"
    path.write_bytes(trace_bytes)
    return path


@pytest.fixture
def scripted(monkeypatch):
    """Puts a scripted explanation in the place of a run; returns what was asked for."""
    asked = []

    def script(**fields):
        def explain(subject, **arguments):
            asked.append((subject, arguments))
            facts = DeviceFacts(device="cpu", name="AMD EPYC")
            return Explanation(source="x", environment=facts, regime="memory-bound", **fields)

        monkeypatch.setattr(module, "explain", explain)
        return asked

    return script


def test_a_workload_is_explained_from_end_to_end(steady, folder):
    ended = steady(
        *("explain", "tiny.py:small@inference_mode", "--budget", "1s", "--steps", "3"),
        *("--json", "out.json"),
    )
    assert (ended.code, ended.err) == (0, "")
    assert "tiny.py:small@inference_mode: " in ended.out
    for heading in ("Where a step goes", "Top operators", "Variability", "Could not tell"):
        assert heading in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100
    found = json.loads((folder / "out.json").read_text())
    assert (found["kind"], found["workload"]) == ("explain", "tiny.py:small@inference_mode")
    assert found["environment"]["device"] == "cpu"
    assert len(found["steps"]) == 3
    for step in found["steps"]:
        assert sum(step["slices_ns"].values()) == step["total_ns"]
    assert len(found["measured"]["samples_ns"]) >= 10
    assert found["distortion"] > 0


def test_a_trace_is_explained_without_pytorch(steady_process, folder, trace):
    (folder / "torch.py").write_text("raise RuntimeError('PyTorch was loaded')")
    ended = steady_process("explain", "steps.json", "--json", "out.json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "steps.json: " in ended.stdout
    found = json.loads((folder / "out.json").read_text())
    assert (found["kind"], found["workload"]) == ("explain", "steps.json")
    assert len(found["steps"]) == 3
    assert (found["measured"], found["gpu"]) == (None, None)


@pytest.mark.parametrize(
    "words",
    [
        *(["--batch", "3"], ["--input", "2x3"], ["--device", "cpu"], ["--train"]),
        *(["--seed", "1"], ["--budget", "3s"], ["--steps", "3"], ["--pause", "1s"]),
    ],
    ids=lambda words: words[0],
)
def test_what_shapes_a_run_is_refused_for_a_trace(steady, trace, words):
    ended = steady("explain", "steps.json", *words)
    assert ended.code == 2
    said = f"{words[0]} is for workloads: a trace file is read as it is"
    assert only_line(ended.err) == said


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x1f\x8b", b'{"traceEvents": ['])
def test_what_is_no_trace_is_one_line(steady, folder, content):
    if content is not None:
        (folder / "broken.json.gz").write_bytes(content)
    ended = steady("explain", "broken.json.gz", "--json", "out.json", "--quiet")
    assert (ended.code, ended.out) == (2, "")
    assert "broken.json.gz" in only_line(ended.err)
    assert not (folder / "out.json").exists()


@pytest.mark.parametrize(
    ("kind", "command"), [("run", "run"), ("measure", "measure"), ("sweep", "tune --list")]
)
def test_a_result_of_ours_is_named_with_the_command_that_shows_it(steady, folder, kind, command):
    (folder / "a result.json").write_text(json.dumps({"schema": 1, "kind": kind, "steps": []}))
    ended = steady("explain", "a result.json")
    assert (ended.code, only_line(ended.err)) == (
        2,
        f"a result.json is a result of steady {command}: see it with "
        "`steady report 'a result.json'`",
    )


def test_json_of_another_kind_is_no_result_of_ours(steady, folder):
    (folder / "x.json").write_text(json.dumps({"schema": 1, "kind": "else"}))
    assert "not a trace" in only_line(steady("explain", "x.json").err)


def test_options_reach_the_session(steady, scripted):
    asked = scripted()
    ended = steady(
        *("explain", "tiny.py:small@channels_last", "--batch", "5", "--device", "cpu"),
        *("--budget", "2m", "--steps", "7", "--pause", "10ms"),
    )
    assert ended.code == 0
    ((workload, arguments),) = asked
    assert workload.inputs[0].shape == (5, 64)
    assert [str(spec) for spec in arguments["candidate"]] == ["channels_last"]
    assert (arguments["budget"], arguments["steps"]) == ("2m", 7)
    assert (arguments["pause"], arguments["device"]) == ("10ms", "cpu")


def test_an_interrupted_explanation_ends_with_130(steady, folder, scripted):
    scripted(interrupted=True)
    ended = steady("explain", "tiny.py:small", "--json", "out.json")
    assert ended.code == 130
    assert only_line(ended.err) == "interrupted; complete parts are above"
    assert json.loads((folder / "out.json").read_text())["interrupted"] is True


def test_a_workload_that_failed_while_timed_ends_with_1(steady, scripted):
    scripted(failed=HOSTILE)
    ended = steady("explain", "tiny.py:small", "--quiet")
    assert (ended.code, ended.out) == (1, "")
    assert only_line(ended.err) == "the workload failed while timed: the data ended\\x1b[2J"


def test_a_workload_that_cannot_run_ends_with_2(steady, folder):
    ended = steady("explain", "tiny.py:unfit", "--quiet", "--json", "out.json")
    assert (ended.code, ended.out) == (2, "")
    assert only_line(ended.err).startswith("the workload fails: RuntimeError: ")
    assert not (folder / "out.json").exists()


@pytest.mark.parametrize("option", ["--budget", "--pause"])
@pytest.mark.parametrize("time", ["soon", "0s", "-3m"])
def test_a_wrong_time_is_one_line(steady, option, time):
    ended = steady("explain", "tiny.py:small", option, time)
    assert ended.code == UsageError.exit_code
    assert f"{time!r} is not a time" in only_line(ended.err)


def test_a_terminal_that_lacks_characters_gets_others(steady, trace, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    ended = steady("explain", trace)
    assert (ended.code, ended.err) == (0, "")
    assert b"@" in terminal.buffer.getvalue()
