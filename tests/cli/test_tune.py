"""The server that `steady tune` starts before it loads the workload: when, and that it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadytorch.tune import search_server
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.loading import load_workload

NOTING = """
import time
from pathlib import Path

import psutil
import torch
from torch import nn

def note():
    # A process has no command line for a moment while it starts.
    words, end = [""], time.monotonic() + 5
    while not all(words) and time.monotonic() < end:
        words = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    Path("servers").write_text(str(sum("fork_server_main" in each for each in words)))

def small():
    note()
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.ones(2, 64)

def raising():
    note()
    raise RuntimeError("the data are missing")

def interrupted():
    note()
    raise KeyboardInterrupt
"""


@pytest.fixture
def noting(folder, monkeypatch, nothing_left):
    """Factories that count the fork servers that run beside them, on two cores or more."""
    (folder / "noting.py").write_text(NOTING)
    monkeypatch.setattr(search_server, "usable_logical_cores", lambda: 2)


def _servers() -> int:
    """The number of fork servers that ran while the workload was loaded."""
    return int(Path("servers").read_text())


def test_a_stored_plan_is_replayed_and_the_server_ends(steady, noting, keep_unmeasured):
    loaded = load_workload("noting.py:small")
    keep_unmeasured(Session(loaded, SearchOptions(), "cpu", "plans"), ())
    ended = steady("tune", "noting.py:small", "--store", "plans", "--device", "cpu")
    assert (ended.code, ended.err) == (0, "")
    assert "Stored plan" in ended.out
    assert _servers() == 1


@pytest.mark.parametrize(("factory", "code"), [("raising", 2), ("interrupted", 130)])
def test_the_server_ends_if_the_workload_is_not_loaded(steady, noting, factory, code):
    assert steady("tune", f"noting.py:{factory}", "--store", "plans").code == code
    assert _servers() == 1


@pytest.mark.parametrize("words", [("--device", "tpu"), ("--tolerance", "2"), ("--budget", "no")])
def test_wrong_options_leave_no_server(steady, noting, words):
    assert steady("tune", "noting.py:small", "--store", "plans", *words).code == 2


@pytest.mark.parametrize("words", [("--mode", "strict"), ("--devices", "cuda:7")])
def test_no_server_is_started_where_none_could_be_used(steady, noting, words):
    assert steady("tune", "noting.py:small", "--store", "plans", *words).code in (2, 3)
    assert _servers() == 0
