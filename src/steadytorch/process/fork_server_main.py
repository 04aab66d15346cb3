"""The fork server process: imports the modules that a worker needs, then forks the worker.

Started as `python -P -m steadytorch.process.fork_server_main FD [MODULE ...]`. The server only
imports modules, so that forked workers inherit no threads and no CUDA state.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

from steadytorch.process.child import die_with_parent, serve
from steadytorch.process.fork_server import MESSAGE_BYTES, Fork, Report, decode_fork, encode

_PROBE_S = 5.0
"""Longest time for a forked process to run an operation on several threads."""


class _Server:
    """Forks each worker once its modules are imported, and reports the worker's exit status.

    Args:
        channel: connection to `ForkServer`.
        imports: modules to import while no request waits for others.
    """

    def __init__(self, channel: socket.socket, imports: Sequence[str] = ()) -> None:
        self._channel, self._imports = channel, imports
        self._waiting: list[tuple[Fork, list[int]]] = []
        self._numbers: dict[int, int] = {}
        self._tried: set[str] = set()
        self._forks, self._untried = True, True
        self._wakes, wake = os.pipe()
        for end in (self._wakes, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serves fork requests until the parent closes the channel."""
        while True:
            self._start_ready()
            missing = self._missing()
            timeout_s = 0 if missing else None
            readable, *_ = select.select([self._channel, self._wakes], [], [], timeout_s)
            if self._channel in readable and not self._receive():
                return
            if self._wakes in readable:
                os.read(self._wakes, 4096)
                self._reap()
            if missing and not readable:
                self._import(missing[0])

    def _receive(self) -> bool:
        """Receives one request; returns whether the channel is still open."""
        message, handles, *_ = socket.recv_fds(self._channel, MESSAGE_BYTES, 2)
        if message:
            self._waiting.append((decode_fork(message), handles))
        return bool(message)

    def _missing(self) -> list[str]:
        """Modules not imported yet: those that waiting requests need, then the initial ones."""
        needed = (name for request, _ in self._waiting for name in _modules_of(request))
        return [name for name in (*needed, *self._imports) if name not in self._tried]

    def _import(self, name: str) -> None:
        self._tried.add(name)
        if not self._forks:
            return
        with contextlib.suppress(BaseException):  # the worker reports the error
            importlib.import_module(name)
        self._untried = True

    def _start_ready(self) -> None:
        waiting = []
        for request, handles in self._waiting:
            if self._tried.issuperset(_modules_of(request)):
                self._start(request, *handles)
            else:
                waiting.append((request, handles))
        self._waiting = waiting

    def _start(self, request: Fork, connection: int, log: int) -> None:
        if self._forks and self._untried:
            self._forks, self._untried = _can_fork(), False
        start = self._fork if self._forks else self._spawn
        self._numbers[start(request, connection, log)] = request.number
        os.close(connection)
        os.close(log)

    def _fork(self, request: Fork, connection: int, log: int) -> int:
        server = os.getpid()
        if pid := _fork():
            return pid
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        die_with_parent()
        if os.getppid() != server:
            os._exit(1)
        self._report(Report(request.number, pid=os.getpid()))
        self._channel.close()
        others = {log, self._wakes, *(handle for _, handles in self._waiting for handle in handles)}
        for handle in others - {connection}:
            with contextlib.suppress(OSError):  # of a worker that was started just now
                os.close(handle)
        serve([str(connection), *request.arguments])
        os._exit(0)

    def _spawn(self, request: Fork, connection: int, log: int) -> int:
        """Starts a worker in a fresh interpreter, because forking is unsafe."""
        os.set_inheritable(connection, True)
        command = [sys.executable, "-P", "-m", "steadytorch.process.child", str(connection)]
        pid = os.posix_spawn(
            sys.executable,
            [*command, *request.arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
            setsid=True,
        )
        self._report(Report(request.number, pid=pid))
        return pid

    def _reap(self) -> None:
        for pid, status in _ended():
            if (number := self._numbers.pop(pid, None)) is not None:
                self._report(Report(number, status=os.waitstatus_to_exitcode(status)))

    def _report(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # the parent has gone
            self._channel.send(encode(report))


def _modules_of(request: Fork) -> list[str]:
    """Modules to import before a worker is forked: its handler's module and the requested ones."""
    handler, _, *imports = request.arguments
    return [handler.partition(":")[0], *imports]


def _ended() -> Iterator[tuple[int, int]]:
    """Yields the process id and wait status of each child process that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _fork() -> int:
    with warnings.catch_warnings():
        # NumPy's BLAS has threads, and ends them before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _can_fork() -> bool:
    """Whether forked processes would work, given the modules imported so far.

    BLAS libraries end their threads before a fork. A forked process hangs if the parent has started
    OpenMP threads. A forked process cannot use CUDA if the parent has queried devices. `_computes`
    tests for both problems.
    """
    if threading.active_count() > 1:
        return False
    return "torch" not in sys.modules or _computes()


def _computes() -> bool:
    """Whether a forked process can run a multi-threaded operation and can use CUDA."""
    import torch

    if not (pid := _fork()):
        torch.ones(1 << 20).add_(1.0)
        os._exit(torch.cuda._is_in_bad_fork())
    until = time.monotonic() + _PROBE_S
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main(arguments: list[str]) -> None:
    """Serves fork requests on the inherited file descriptor."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, *imports = arguments
    _Server(socket.socket(fileno=int(descriptor)), imports).run()


if __name__ == "__main__":
    main(sys.argv[1:])
