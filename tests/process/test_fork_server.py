"""What fork servers add to workers; that they answer and die like others is in test_worker.py."""

import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from steadytorch.process.fork_server import LOG, ForkServer
from steadytorch.process.worker import Fault, Worker, WorkerFault

DEADLINE_S = 60


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A fork server that finds tests/process/handlers.py and modules in tmp_path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent), str(tmp_path)])
    with closing(ForkServer(tmp_path)) as server:
        yield server


@pytest.fixture
def initial(tmp_path, monkeypatch):
    """Starts a fork server with initial imports; it finds the same modules as `server`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent), str(tmp_path)])
    with ExitStack() as started:
        yield lambda *names: started.enter_context(closing(ForkServer(tmp_path, imports=names)))


def _worker(server, directory, name="w", imports=()):
    return Worker("handlers:Handler", directory, name, imports=imports, server=server)


def _parent(worker):
    worker.call("echo", DEADLINE_S, value=1)
    return psutil.Process(worker.pid).ppid()


def _soon(condition):
    until = time.monotonic() + 20
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def _has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _module(directory, name, text):
    (directory / f"{name}.py").write_text(text)
    return name


def test_workers_share_one_import(server, tmp_path):
    stamp = tmp_path / "imported"
    slow = _module(tmp_path, "slow", f"open({str(stamp)!r}, 'a').write('once ')\n")
    for number in range(3):
        worker = _worker(server, tmp_path, f"w{number}", [slow])
        assert worker.call("imported", DEADLINE_S, names=[slow]) == [slow]
    assert stamp.read_text() == "once "


def _main_module(worker):
    return worker.call("main_module", DEADLINE_S)


def test_initial_imports_begin_without_a_request(initial, tmp_path):
    stamp = tmp_path / "imported"
    early = _module(tmp_path, "early", f"open({str(stamp)!r}, 'a').write('once ')\n")
    server = initial("broken_or_missing", early)
    assert _soon(stamp.exists)
    worker = _worker(server, tmp_path)
    assert worker.call("imported", DEADLINE_S, names=[early]) == [early]
    assert _main_module(worker).endswith("fork_server_main.py")
    assert stamp.read_text() == "once "


def test_after_initial_imports_that_forks_would_not_survive_fresh_interpreters_start(
    initial, tmp_path
):
    stamp = tmp_path / "imported"
    text = f"from threading import Timer\nTimer(99, print).start()\nopen({str(stamp)!r}, 'w')\n"
    server = initial(_module(tmp_path, "early", text))
    assert _soon(stamp.exists)
    assert _main_module(_worker(server, tmp_path)).endswith("child.py")


def test_a_request_does_not_wait_for_initial_imports(initial, tmp_path):
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    server = initial(_module(tmp_path, "early", wait))
    server.pause()  # before its interpreter has started
    worker = _worker(server, tmp_path)
    server.resume()
    assert worker.call("imported", DEADLINE_S, names=["early"]) == []
    gate.touch()


def test_a_worker_that_needs_less_does_not_wait_for_the_imports_of_another(server, tmp_path):
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    _worker(server, tmp_path, "first").call("echo", DEADLINE_S, value=1)
    server.pause()
    late = _worker(server, tmp_path, "late", [_module(tmp_path, "heavy", wait)])
    quick = _worker(server, tmp_path, "quick")
    server.resume()
    assert quick.call("echo", DEADLINE_S, value=2) == 2
    gate.touch()
    assert late.call("imported", DEADLINE_S, names=["heavy"]) == ["heavy"]


@pytest.mark.parametrize(
    ("text", "forks"),
    [
        ("", True),
        ("from threading import Timer\nTimer(99, print).start()", False),
        ("import torch\ntorch.cuda._is_in_bad_fork = lambda: True", False),
        (
            "import torch, __main__\n__main__._PROBE_S = 1.0\n"  # waited out in the server
            "torch.set_num_threads(2)\ntorch.ones(1 << 20).add_(1)",
            False,
        ),
    ],
    ids=["harmless", "a thread", "CUDA", "a pool of OpenMP threads"],
)
def test_after_an_import_that_forks_would_not_survive_fresh_interpreters_start(
    server, tmp_path, text, forks
):
    name = _module(tmp_path, "imported_first", text)
    worker = _worker(server, tmp_path, "first", [name])
    assert worker.call("imported", DEADLINE_S, names=[name]) == [name]
    assert _parent(worker) == server.pid
    main = worker.call("main_module", DEADLINE_S)
    assert main.endswith("fork_server_main.py" if forks else "child.py")


def test_a_server_that_was_killed_takes_its_workers_with_it_and_says_so(server, tmp_path):
    worker = _worker(server, tmp_path)
    worker.call("echo", DEADLINE_S, value=1)
    worker.send("hangs")
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(WorkerFault) as caught:
        worker.receive(DEADLINE_S)
    assert (caught.value.fault, caught.value.reason) == (Fault.SIGNAL, "killed (SIGKILL)")
    assert not worker.alive


def test_without_a_living_server_an_interpreter_starts(server, tmp_path):
    os.kill(server.pid, signal.SIGKILL)
    assert _soon(lambda: not server.alive)
    worker = _worker(server, tmp_path)
    assert worker.call("main_module", DEADLINE_S).endswith("child.py")
    worker.kill()


def test_closing_a_server_ends_its_workers(server, tmp_path):
    worker = _worker(server, tmp_path)
    worker.call("echo", DEADLINE_S, value=1)
    pid = worker.pid
    server.close()
    assert _soon(lambda: _has_ended(pid))


def test_a_worker_paused_before_it_was_started_starts_when_it_is_resumed(server, tmp_path):
    _worker(server, tmp_path, "first").call("echo", DEADLINE_S, value=1)
    server.pause()
    worker = _worker(server, tmp_path)
    worker.pause()
    worker.send("echo", value=2)
    time.sleep(0.3)
    assert (worker.pid, worker.ready(), worker.alive) == (None, False, True)
    worker.resume()
    assert worker.receive(DEADLINE_S) == 2


def test_a_worker_that_was_not_paused_may_be_resumed(server, tmp_path):
    worker = _worker(server, tmp_path)
    worker.send("echo", value=2)
    worker.resume()
    time.sleep(0.01)
    assert worker.overdue(0.005)
    assert worker.receive(DEADLINE_S) == 2


def test_a_crash_beside_a_paused_server_is_reported_as_one(server, tmp_path):
    worker = _worker(server, tmp_path)
    worker.call("echo", DEADLINE_S, value=1)
    server.pause()
    with pytest.raises(WorkerFault) as caught:
        worker.call("segfaults", DEADLINE_S)
    assert caught.value.reason.startswith("segmentation fault (SIGSEGV) in segfaults, handlers.py")


def test_a_worker_killed_before_it_was_started_leaves_no_process(server, tmp_path):
    _worker(server, tmp_path, "first").call("echo", DEADLINE_S, value=1)
    server.pause()
    worker = _worker(server, tmp_path)
    began = time.monotonic()
    worker.kill()
    assert time.monotonic() - began < 1.5
    assert not worker.alive
    server.resume()
    own = psutil.Process(server.pid)
    assert _soon(lambda: len(own.children()) == 1)  # the first one


def test_workers_have_their_own_logs_and_sessions(server, tmp_path):
    workers = [_worker(server, tmp_path, name) for name in ("a", "b")]
    for worker in workers:
        worker.call("chatter", DEADLINE_S)
        assert os.getsid(worker.pid) == worker.pid
    assert all("to stderr" in worker.log_tail() for worker in workers)
    assert (tmp_path / LOG).read_text() == ""


def test_ctrl_c_in_the_servers_group_ends_nothing(server, tmp_path):
    worker = _worker(server, tmp_path)
    worker.call("echo", DEADLINE_S, value=1)
    os.kill(server.pid, signal.SIGINT)
    assert _worker(server, tmp_path, "next").call("echo", DEADLINE_S, value=3) == 3


def test_many_workers_start_and_end_and_each_reports_its_own_status(server, tmp_path):
    workers = [_worker(server, tmp_path, f"w{number}") for number in range(24)]
    for number, worker in enumerate(workers):
        worker.send("exits", status=number)
    reasons = []
    for worker in workers:
        with pytest.raises(WorkerFault) as caught:
            worker.receive(DEADLINE_S)
        reasons.append(caught.value.reason)
    assert reasons == [f"process exited with status {number}" for number in range(24)]
    own = psutil.Process(server.pid)
    assert own.num_fds() < 20


def test_a_worker_that_was_killed_is_not_alive_a_moment_longer(server, tmp_path):
    for number in range(20):
        worker = _worker(server, tmp_path, f"w{number}")
        worker.call("echo", DEADLINE_S, value=1)
        server.pause()
        os.kill(worker.pid, signal.SIGKILL)
        _soon(lambda pid=worker.pid: _has_ended(pid))
        assert not worker.alive


def test_an_interrupt_after_a_request_leaves_a_server_that_can_be_asked(
    server, tmp_path, monkeypatch
):
    with closing(_worker(server, tmp_path)) as first:
        first.call("echo", DEADLINE_S, value=1)
    send = socket.send_fds

    def interrupted(*arguments):
        send(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "send_fds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _worker(server, tmp_path, "interrupted")
    monkeypatch.undo()
    assert _soon(lambda: server.update() or server._workers[-1].pid is not None)
