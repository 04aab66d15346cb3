from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "sweeping.py"

if "sweeping" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("sweeping", FILE)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["sweeping"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sweeping"])


@pytest.fixture
def start(tmp_path):
    """Starts a worker of `sweeping.py` on the folder `sweep`; kills what is left at the end."""
    started = []

    def run(count=24, seconds=0.02, timeout=1.0, shard="auto"):
        words = [tmp_path / "sweep", count, seconds, timeout, shard]
        started.append(subprocess.Popen([sys.executable, FILE, *map(str, words)]))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
