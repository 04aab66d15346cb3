import sys
from pathlib import Path

import pytest

from steadytorch.process.fork_server import ForkServer
from steadytorch.process.worker import Worker


@pytest.fixture(params=["interpreter", "fork server"])
def start(request, tmp_path, monkeypatch):
    """Starts workers that serve tests/process/handlers.py, either way, and ends them all."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    started, servers = [], []

    def launch(environment=None, **options):
        if request.param == "fork server" and "interpreter" not in options:
            if not servers:
                servers.append(ForkServer(tmp_path, environment))
            options["server"] = servers[0]
        worker = Worker("handlers:Handler", tmp_path, f"w{len(started)}", environment, **options)
        started.append(worker)
        return worker

    yield launch
    for worker in started:
        worker.kill()
    for server in servers:
        server.close()
