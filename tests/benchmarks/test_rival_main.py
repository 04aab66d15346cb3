"""The benchmark's command: its options, and the files that a run writes."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest
import rival_results

from .rivalry import document, one_workload

PATH = Path(rival_results.__file__).with_name("__main__.py")


@pytest.fixture
def command():
    """The command as a module, which a test may change."""
    spec = importlib.util.spec_from_file_location("rivals_command", PATH)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_run_that_goes_on_past_midnight_writes_one_file(command, monkeypatch, tmp_path):
    days = iter(["2026-11-22T23:58:00+00:00", "2026-11-22T23:59:00+00:00", "2026-11-23T00:01:00"])

    def run(case, args, tell):
        found = document(*one_workload(case.name, -0.1))
        return {**found, "created": command.now()}

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "now", lambda: next(days))
    wanted = ["--device", "cpu", "--only", "resnet50:1", "vit_b_16:1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["rivals", *wanted])
    command.main()
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith("_2026-11-22")
    assert [*rival_results.read(path)["workloads"]] == ["resnet50:1", "vit_b_16:1"]


def test_a_workload_keeps_how_long_it_was_timed(command, monkeypatch):
    monkeypatch.setattr(command, "_rows", lambda *_: [])
    args = argparse.Namespace(device="cpu", processes=0, timing=1.0)
    case = command.CASES["cpu"][0]
    (entry,) = command.run(case, args, lambda _: None)["workloads"].values()
    assert entry["protocol"] == command.PROTOCOL
    assert command.PROTOCOL["dropped_ms"] == 8.0


@pytest.mark.parametrize("text", ["1", "2", "-3", "many", ""])
def test_too_few_processes_for_a_verdict_are_refused_with_what_to_give(command, text):
    with pytest.raises(argparse.ArgumentTypeError, match="give 3 or more, or 0 for none"):
        command.processes(text)


@pytest.mark.parametrize("text", ["0", "3", "12"])
def test_none_or_enough_processes_are_taken(command, text):
    assert command.processes(text) == int(text)
