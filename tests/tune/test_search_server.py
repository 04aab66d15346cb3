import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing

import psutil
import pytest
import torch
from torch import nn

from steadytorch import Workload, transforms
from steadytorch.bench.bench_worker import save_payload
from steadytorch.device.host import usable_logical_cores
from steadytorch.process.fork_server import ForkServer
from steadytorch.process.worker import Worker
from steadytorch.tune import search_server
from steadytorch.tune.search_server import HANDLER, SearchServer, started_in_advance
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload import sources

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
PATIENCE_S = 60


@pytest.fixture
def scratch(tmp_path, monkeypatch, no_process_left):
    """The empty folder for temporary files, which must be empty again at the test's end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def start(scratch):
    """Starts servers; pytest changes a variable between a fixture and its test."""
    with ExitStack() as started:
        yield lambda *arguments: started.enter_context(closing(SearchServer(*arguments)))


def _workload():
    return Workload(nn.Linear(4, 4).eval(), torch.ones(2, 4))


# -- the server ---------------------------------------------------------------------------------


def test_it_forks_workers_that_have_its_environment(start):
    server = start(8)
    save_payload(_workload(), server.directory)
    worker = Worker(HANDLER, server.directory, "w", server=server.fork_server)
    worker.call("load", PATIENCE_S, device="cpu", ambient=transforms.ambient())
    forked = psutil.Process(worker.pid)
    assert forked.ppid() == server.fork_server.pid
    assert server.environment.items() <= forked.environ().items()
    worker.kill()


@pytest.mark.parametrize(
    ("cores", "devices", "threads"), [(None, 1, "1"), (2, 1, "2"), (64, 1, "16"), (64, 2, "8")]
)
def test_workers_share_the_cores_and_a_compiler_cache(start, monkeypatch, cores, devices, threads):
    monkeypatch.delenv(THREADS, raising=False)
    server = start(cores, devices)
    assert server.environment == {
        THREADS: threads,
        "TORCHINDUCTOR_CACHE_DIR": str(server.directory / "compiler-cache"),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def test_the_callers_number_of_compile_threads_is_kept(start, monkeypatch):
    monkeypatch.setenv(THREADS, "3")
    assert start(64).environment[THREADS] == "3"


def test_closing_it_twice_ends_it_once(start):
    server = start(8)
    server.close()
    server.close()
    assert not server.fork_server.alive


def test_importing_it_does_not_import_pytorch():
    code = "import sys; from steadytorch.tune import search_server; print('torch' in sys.modules)"
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"False\n"


# -- whether it still fits ----------------------------------------------------------------------


def _cores_change(monkeypatch, folder):
    monkeypatch.setattr(search_server, "allowed_cpus", lambda: frozenset([99]))


CHANGES = {
    "a variable": lambda monkeypatch, folder: monkeypatch.setenv("OMP_NUM_THREADS", "77"),
    "the import path": lambda monkeypatch, folder: monkeypatch.syspath_prepend(folder),
    "the working directory": lambda monkeypatch, folder: monkeypatch.chdir(folder),
    "the cores": _cores_change,
    "the compile threads": lambda monkeypatch, folder: monkeypatch.setenv(THREADS, "77"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_fits_until_a_setting_that_workers_inherit_changes(start, monkeypatch, tmp_path, change):
    server = start(8)
    assert server.fits(8, 1)
    change(monkeypatch, tmp_path)
    assert not server.fits(8, 1)


def test_it_fits_if_a_library_sets_a_variable_that_workers_get_from_the_search(start, monkeypatch):
    server = start(8)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_user")
    assert server.fits(8, 1)


def test_it_fits_its_own_number_of_compile_threads_only(start, monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    server = start(64)
    assert [server.fits(64, 1), server.fits(64, 2), server.fits(8, 1)] == [True, False, False]


def test_it_no_longer_fits_once_it_was_killed(start):
    server = start(8)
    os.kill(server.fork_server.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server.fork_server.pid)], timeout=PATIENCE_S)
    assert not server.fits(8, 1)


# -- in advance ---------------------------------------------------------------------------------


def test_one_that_was_started_in_advance_ends_with_the_block(scratch, monkeypatch):
    monkeypatch.setattr(search_server, "usable_logical_cores", lambda: 2)
    seen = []

    def interrupted():
        with started_in_advance("resnet18") as server:
            seen.append((server, server.fork_server.alive))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    ((server, was_alive),) = seen
    assert (was_alive, server.fork_server.alive) == (True, False)


@pytest.mark.parametrize(
    ("workload", "library"), [("timm:resnet50", ["library"]), ("resnet50", []), ("a.py:made", [])]
)
def test_the_library_of_a_named_workload_is_imported_in_advance(
    scratch, monkeypatch, workload, library
):
    monkeypatch.setattr(search_server, "usable_logical_cores", lambda: 2)
    monkeypatch.setitem(search_server._LIBRARIES, "timm", "library")
    asked = []

    def started(directory, environment, imports):
        asked.extend(imports)
        return ForkServer(directory, environment)

    monkeypatch.setattr(search_server, "ForkServer", started)
    with started_in_advance(workload):
        pass
    assert asked == [HANDLER.partition(":")[0], *library]


def test_each_source_of_named_workloads_has_a_library_to_import_in_advance():
    assert set(search_server._LIBRARIES) == set(sources.PREFIXES)


def test_a_single_core_gets_none_in_advance(scratch, monkeypatch):
    monkeypatch.setattr(search_server, "usable_logical_cores", lambda: 1)
    with started_in_advance("resnet18") as server:
        assert server is None


def test_without_a_place_for_its_folder_there_is_none_in_advance(tmp_path, monkeypatch):
    monkeypatch.setattr(search_server, "usable_logical_cores", lambda: 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with started_in_advance("resnet18") as server:
        assert server is None


# -- in a search --------------------------------------------------------------------------------


class _Begun(Exception):  # noqa: N818 - ends a search where its scheduler is made
    pass


@pytest.fixture
def begun(monkeypatch):
    """The process ids of the fork servers that run as a search makes its scheduler."""
    found = []

    def scheduler(*arguments, **options):
        found.append([child.pid for child in psutil.Process().children()])
        raise _Begun

    monkeypatch.setattr(sys.modules[Session.__module__], "SetupScheduler", scheduler)
    return found


def _session(tmp_path, server=None):
    return Session(_workload(), SearchOptions(), "cpu", tmp_path / "plans", server=server)


def test_a_search_uses_the_server_it_was_given_and_closes_it(start, begun, tmp_path):
    server = start(usable_logical_cores())
    with pytest.raises(_Begun):
        _session(tmp_path, server).search()
    assert begun == [[server.fork_server.pid]]
    assert not server.fork_server.alive


def test_the_next_search_starts_its_own(start, begun, tmp_path):
    server = start(usable_logical_cores())
    session = _session(tmp_path, server)
    for _ in range(2):
        with pytest.raises(_Begun):
            session.search()
    (first,), (second,) = begun
    assert first == server.fork_server.pid != second


def test_a_server_that_no_longer_fits_is_replaced(start, begun, tmp_path, monkeypatch):
    server = start(usable_logical_cores())
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    with pytest.raises(_Begun):
        _session(tmp_path, server).search()
    ((other,),) = begun
    assert other != server.fork_server.pid
