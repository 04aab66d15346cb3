from __future__ import annotations

import subprocess
import sys
import tempfile
from types import SimpleNamespace

import psutil
import pytest

from steadytorch.cli import main

TINY = """
import torch
from torch import nn

def small(batch=2):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    return model, torch.ones(batch, 64)

def raising():
    raise RuntimeError("the data are missing")

def unfit():
    return nn.Linear(64, 8).eval(), torch.ones(2, 63)

def meta():
    return nn.Linear(64, 8).to("meta").eval(), torch.ones(2, 64)

def slow():
    class Slow(nn.Module):
        def forward(self, x):
            import time
            time.sleep(1.5)
            return x
    return Slow().eval(), torch.ones(2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a file of factories in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


@pytest.fixture
def nothing_left(folder, monkeypatch):
    """Fails the test if this process has a child process or a temporary file more at its end."""
    scratch = folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(scratch.iterdir()) == []


@pytest.fixture
def steady(folder, capfd):
    """Runs the command line in this process; returns its exit code, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code, out=out, err=err)

    return run


@pytest.fixture
def steady_process(folder):
    """Runs the command line in a process of its own."""

    def run(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "steadytorch", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
            **options,
        )

    return run


def only_line(text: str) -> str:
    """The one line of an error message."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("steady: ")
    return lines[0].removeprefix("steady: ")
