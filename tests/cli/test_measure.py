from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steadytorch.bench import measure as module
from steadytorch.bench.bench_worker import SetUp
from steadytorch.bench.measure import HostBlock, MeasureResult, ProcessMeasurement
from steadytorch.errors import UsageError
from steadytorch.measure.measurement import summarize
from steadytorch.measure.sampler import WarmUp

from .conftest import only_line

FAILING = """
import time
import torch
from torch import nn

class Failing(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.call:
            raise RuntimeError("the data ended\\x1b[2J")
        time.sleep(0.001)
        return x

def late():
    return Failing(1000).eval(), torch.ones(8)

def at_once():
    return Failing(1).eval(), torch.ones(8)
"""


@pytest.fixture
def factories(folder):
    (folder / "failing.py").write_text(FAILING)
    return folder


def _result(**fields):
    period = summarize([12_000_000 + 1000 * (i % 37) for i in range(400)])
    process = ProcessMeasurement(
        period=period,
        latency=None,
        set_up=SetUp(0.1, WarmUp(1, 3, 1, 1), 1 << 20),
        resolved=True,
        host=HostBlock(1.0, 1.0, 0, 0, None, None, None, 0.0),
        device=None,
        unknown={},
    )
    return MeasureResult.of((process,), "process", period.median_ns, None, None, **fields)


@pytest.fixture
def taken(monkeypatch):
    """Puts a scripted result in the place of measuring; returns what was asked for."""
    asked = []

    def script(**fields):
        def measure(workload, **arguments):
            asked.append((workload, arguments))
            return _result(**fields)

        monkeypatch.setattr(module, "measure", measure)
        return asked

    return script


def test_a_measurement_from_end_to_end(steady, folder):
    ended = steady(
        *("measure", "tiny.py:small@inference_mode", "--budget", "1s", "--batch", "3"),
        *("--json", "out.json"),
    )
    assert (ended.code, ended.err) == (0, "")
    assert "tiny.py:small@inference_mode: " in ended.out
    assert "claim: process" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100
    found = json.loads((folder / "out.json").read_text())
    assert (found["kind"], found["workload"]) == ("measure", "tiny.py:small@inference_mode")
    assert len(found["samples_ns"]) >= 10
    assert found["samples_ns"] == found["processes"][0]["period"]["samples_ns"]
    assert (found["failed"], found["interrupted"]) == (None, False)


@pytest.mark.slow
def test_a_workload_that_raises_late_ends_with_1_and_keeps_its_samples(steady, factories):
    ended = steady("measure", "failing.py:late", "--json", "out.json", "--quiet")
    assert (ended.code, ended.out) == (1, "")
    said = "the workload failed while timed: RuntimeError: the data ended?[2J"
    assert only_line(ended.err) == said
    found = json.loads((factories / "out.json").read_text())
    calls = found["processes"][0]["set_up"]["warm_up"]["calls"]
    assert len(found["samples_ns"]) == 1000 - 2 - calls >= 400
    assert found["failed"] == "RuntimeError: the data ended?[2J"


def test_a_workload_that_raises_at_once_ends_with_2(steady, factories):
    ended = steady("measure", "failing.py:at_once", "--json", "out.json", "--quiet")
    assert (ended.code, ended.out) == (2, "")
    said = "the workload fails: RuntimeError: the data ended\\x1b[2J"
    assert only_line(ended.err) == said
    assert not (factories / "out.json").exists()


# -- scripted -----------------------------------------------------------------------------------


def test_options_reach_the_measurement(steady, taken):
    asked = taken()
    ended = steady(
        *("measure", "tiny.py:small@channels_last", "--batch", "5", "--device", "cpu"),
        *("--processes", "3", "--budget", "2m"),
    )
    assert ended.code == 0
    ((workload, arguments),) = asked
    assert workload.inputs[0].shape == (5, 64)
    assert [str(spec) for spec in arguments["candidate"]] == ["channels_last"]
    assert (arguments["processes"], arguments["budget"]) == (3, "2m")
    assert arguments["device"] == "cpu"


def test_an_interrupted_measurement_ends_with_130(steady, folder, taken):
    taken(interrupted=True)
    ended = steady("measure", "tiny.py:small", "--json", "out.json")
    assert ended.code == 130
    assert only_line(ended.err) == "interrupted; earlier measurements are above"
    assert json.loads((folder / "out.json").read_text())["interrupted"] is True
    assert "12.02 ms" in ended.out


@pytest.mark.parametrize("budget", ["soon", "0s", "-3m", ""])
def test_a_wrong_budget_is_one_line(steady, budget):
    ended = steady("measure", "tiny.py:small", "--budget", budget)
    assert ended.code == UsageError.exit_code
    assert f"{budget!r} is not a time" in only_line(ended.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_ends_with_3(steady):
    ended = steady("measure", "tiny.py:small", "--device", "cuda")
    assert (ended.code, ended.out) == (3, "")
    assert "cuda" in only_line(ended.err).lower()


def test_hostile_names_are_shown_as_text(steady, folder, taken):
    taken()
    (folder / "[red]\x1b[2J.py").write_text((folder / "tiny.py").read_text())
    ended = steady("measure", "[red]\x1b[2J.py:small")
    assert ended.code == 0
    assert "[red]\\x1b[2J.py:small" in ended.out
    assert "\x1b" not in ended.out


def test_a_hostile_name_that_is_wrong_is_shown_as_text(steady):
    ended = steady("measure", "nothing\x1b[2J.py:small")
    assert ended.code == 2
    assert "\\x1b[2J" in only_line(ended.err)


@pytest.mark.slow
def test_who_reads_no_further_gets_the_file_all_the_same(folder):
    """As `steady measure ... | head -1`; 1 would be the answer of a gate."""
    words = ["measure", "tiny.py:small", "--budget", "200ms", "--json", "out.json"]
    with subprocess.Popen(
        [sys.executable, "-m", "steadytorch", *words], stdout=subprocess.PIPE, cwd=folder
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 0
    assert json.loads((folder / "out.json").read_text())["samples_ns"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line_and_no_failed_gate(folder):
    words = ["measure", "tiny.py:small", "--budget", "200ms"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "steadytorch", *words],
            stdout=full, stderr=subprocess.PIPE, cwd=folder, text=True, check=False,
        )  # fmt: skip
    assert (ended.returncode, only_line(ended.stderr)) == (
        2,
        "the output cannot be written: No space left on device",
    )


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--seed", "99999999999999999999"], "seed 99999999999999999999 does not fit"),
        (["--input", "99999999999999999999x3"], "input '99999999999999999999x3' cannot be created"),
        (["--batch", "99999999999"], "a batch of 99999999999 cannot be created"),
    ],
)
def test_numbers_that_are_too_large_are_one_line(steady, option, said):
    ended = steady("measure", "resnet18", *option)
    assert ended.code == 2
    assert said in only_line(ended.err)
