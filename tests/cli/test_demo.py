"""`steady demo` on a recorded search and explanation."""

from __future__ import annotations

import functools
import importlib

import pytest
from rich.console import Console

from steadytorch.cli import options
from steadytorch.tune.session import Session

explaining = importlib.import_module("steadytorch.explain.session")
recorded = importlib.import_module("tests.report.recorded")


@pytest.fixture
def scripted(monkeypatch):
    """Puts the recorded results in the place of profiling and searching."""
    monkeypatch.setattr(explaining, "explain", lambda *_, **__: recorded.EXPLAINED)
    monkeypatch.setattr(Session, "search", lambda self, watcher: recorded.found())


@pytest.mark.parametrize("width", [80, 100])
def test_the_story_takes_at_most_45_lines(steady, scripted, monkeypatch, width):
    narrow = functools.partial(Console, width=width, highlight=False)
    monkeypatch.setattr(options, "console", lambda quiet: narrow(quiet=quiet))
    ended = steady("demo", "--device", "cpu")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) <= 45, ended.out
    for words in ("1. Where does its time go?", "2. What makes it faster?", "Plan: ", "Replay: "):
        assert words in ended.out


def test_all_shows_every_candidate(steady, scripted):
    ended = steady("demo", "--device", "cpu", "--all")
    assert ended.code == 0
    assert "transform_19" in ended.out.replace("\n", "")
