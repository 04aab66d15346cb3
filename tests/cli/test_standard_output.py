"""`-` in the place of a file: the document alone on standard output, all else on standard error."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from steadytorch.cli import COMMANDS, options
from steadytorch.errors import PlanError

from .conftest import only_line

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TALKING = """
import ctypes, os, torch

def talking():
    print("a factory may print")
    os.write(1, b"and so may what it calls\\n")
    return torch.neg, torch.ones(2)
"""


@pytest.fixture
def talking(folder):
    (folder / "talking.py").write_text(TALKING)
    return folder


def test_every_json_option_can_name_standard_output():
    found = 0
    for name in COMMANDS:
        command = getattr(import_module(f"steadytorch.cli.{name}"), name)
        taken = [each for each in command.params if "--json" in each.opts]
        found += len(taken)
        assert all(each.type.allow_dash for each in taken)
        assert all(each.callback is options.check_writable for each in taken)
    assert found == 10


def test_the_document_stands_alone_on_standard_output(steady, talking):
    words = ["measure", "talking.py:talking", "--budget", "0.1s", "--device", "cpu"]
    ended = steady(*words, "--json", "-")
    assert ended.code == 0
    assert json.loads(ended.out)["kind"] == "measure"
    assert "a factory may print" in ended.err
    assert "and so may what it calls" in ended.err
    assert "median" in ended.err
    assert not (talking / "-").exists()
    after = steady("plans", "list", "--store", "none")
    assert after.out
    assert after.err == ""


def test_a_page_goes_to_standard_output(steady, folder):
    (folder / "result.json").write_bytes(
        (RESULTS / "steady-conv_resnet50-b64-fp16_h200_2026-11-21.json").read_bytes()
    )
    ended = steady("report", "result.json", "--output", "-")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("<!doctype html>")
    assert sorted(each.name for each in folder.iterdir()) == ["result.json", "tiny.py"]


def test_plans_go_to_standard_output(steady, folder, monkeypatch):
    def export(path, ids, store):
        path.write_bytes(b"plans")
        return []

    monkeypatch.setattr("steadytorch.serve.exchange.export_plans", export)
    ended = steady("plans", "export", "-")
    assert (ended.code, ended.out) == (0, "plans")
    assert ended.err == "0 plans in -\n"


def test_a_command_that_fails_leaves_standard_output_empty(steady, folder):
    ended = steady("plans", "export", "-", "--store", "none")
    assert (ended.code, ended.out) == (PlanError.exit_code, "")
    assert "no plans to export" in only_line(ended.err)


def test_two_documents_do_not_fit_on_one_output(steady, folder):
    ended = steady("compare", "a.json", "b.json", "--json", "-", "--markdown", "-")
    assert (ended.code, ended.out) == (2, "")
    assert "another option writes to standard output" in only_line(ended.err)


@pytest.mark.parametrize(
    ("redirect", "code"), [(">&-", 2), ("| true", 0)], ids=["closed", "nobody reads"]
)
def test_an_output_that_takes_nothing_is_no_traceback(folder, redirect, code):
    command = f"{sys.executable} -m steadytorch plans export - --store none {redirect}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
