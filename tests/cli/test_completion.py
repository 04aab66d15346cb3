from __future__ import annotations

import os
from types import SimpleNamespace

import click
import pytest
from click.shell_completion import ShellComplete

from steadytorch.cli import steady
from steadytorch.plan.store import Store

from ..report.conftest import plan
from .test_options import COMMANDS, _command


@pytest.fixture
def complete(folder):
    """Completes the last word; returns the values."""

    def run(*words):
        *before, incomplete = words
        found = ShellComplete(steady, {}, "steady", "_STEADY_COMPLETE")
        return [(e.type, e.value) for e in found.get_completions(before, incomplete)]

    return run


def _plain(*values):
    return [("plain", value) for value in values]


@pytest.mark.parametrize("command", ["tune", "measure", "conv", "gate", "compare", "explain"])
def test_bundled_workloads_and_files_of_factories_are_offered(complete, folder, command):
    (folder / "resources.py").touch()
    (folder / "results.txt").touch()
    (folder / "results").mkdir()
    expected = _plain("resnet18", "resnet50", "resources.py", "results/")
    assert complete(command, "res") == expected


def test_files_in_folders_are_offered(complete, folder):
    (folder / "src").mkdir()
    (folder / "src" / "work.py").touch()
    (folder / "src" / ".hidden.py").touch()
    assert complete("tune", "src/") == _plain("src/work.py")
    assert complete("tune", "sr") == [("dir", "sr")]
    assert complete("tune", "no/such/") == []


@pytest.mark.parametrize("command", ["compare", "explain"])
def test_saved_results_and_traces_are_offered_where_they_are_read(complete, folder, command):
    for name in ("step.json", "step.json.gz", "step.txt"):
        (folder / name).touch()
    assert complete(command, "st") == _plain("step.json", "step.json.gz")
    assert complete("tune", "st") == []


def test_the_workload_of_verify_is_completed(complete):
    assert complete("plans", "verify", "--workload", "gp") == _plain("gpt2")


@pytest.mark.parametrize("words", [["show"], ["rm"], ["verify"], ["export", "f"], ["push", "u"]])
def test_plan_ids_are_offered_from_the_store_that_is_named(complete, folder, words):
    made = plan()
    Store(folder / "plans").put(made.key, made)
    assert complete("plans", *words, "--store", "plans", "") == _plain(made.id)
    assert complete("plans", *words, "--store", "plans", made.id[:3]) == _plain(made.id)
    assert complete("plans", *words, "--store", "plans", "x") == []
    assert complete("plans", *words, "") == []


def test_every_argument_named_workload_is_completed():
    for words in COMMANDS:
        for each in _command(words).params:
            if isinstance(each, click.Argument) and "WORKLOAD" in (each.metavar or ""):
                assert each._custom_shell_complete is not None, words


@pytest.mark.parametrize("words", ["steady tune res", "steady plans show "])
def test_completion_does_not_load_pytorch(steady_process, folder, words):
    (folder / "torch.py").write_text("raise RuntimeError('PyTorch was loaded')")
    asked = {"_STEADY_COMPLETE": "bash_complete", "COMP_WORDS": words}
    own = SimpleNamespace(**{**asked, "COMP_CWORD": str(words.count(" "))})
    ended = steady_process(env={**os.environ, **vars(own)})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ("plain,resnet18" in ended.stdout) == ("tune" in words)
