"""`steady demo` on a recorded search and explanation."""

from __future__ import annotations

import importlib

import pytest

from steadytorch.tune.session import Session

explaining = importlib.import_module("steadytorch.explain.session")
recorded = importlib.import_module("tests.report.recorded")


@pytest.fixture
def scripted(monkeypatch):
    """Puts the recorded results in the place of profiling and searching."""
    monkeypatch.setattr(explaining, "explain", lambda *_, **__: recorded.EXPLAINED)
    monkeypatch.setattr(Session, "search", lambda self, watcher: recorded.found())


def test_the_story_takes_at_most_45_lines_of_80_columns_without_a_terminal(steady, scripted):
    ended = steady("demo", "--device", "cpu")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) <= 45, ended.out
    assert max(map(len, lines)) <= 80, ended.out
    for words in ("1. Where does its time go?", "2. What makes it faster?", "Plan: ", "Replay: "):
        assert words in ended.out


def test_all_shows_every_candidate(steady, scripted):
    ended = steady("demo", "--device", "cpu", "--all")
    assert ended.code == 0
    assert "transform_19" in ended.out.replace("\n", "")
