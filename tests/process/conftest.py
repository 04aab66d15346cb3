import sys
from pathlib import Path

import pytest

from steadytorch.process.worker import Worker


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts workers that serve tests/process/handlers.py, and ends them all."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    started = []

    def launch(**options):
        worker = Worker("handlers:Handler", tmp_path, f"w{len(started)}", **options)
        started.append(worker)
        return worker

    yield launch
    for worker in started:
        worker.kill()
