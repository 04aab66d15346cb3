"""Starts workers in milliseconds by forking a server process that has imported the modules.

Without a fork server, every worker spends seconds on importing PyTorch and its compiler. Forked
workers share the modules that the server has imported. Forked workers also share the server's
address space layout, so measurements of variation between processes use fresh interpreters instead.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from steadytorch.process.interpreter import Interpreter

LOG = "fork-server.log"
MESSAGE_BYTES = 1 << 16
"""Longest message in either direction."""
_POLL_S, _REPORT_S = 0.005, 2.0


class Fork(msgspec.Struct, frozen=True):
    """A request to fork a worker; the connection and the log are passed as file descriptors.

    Attributes:
        number: stands for the worker in reports.
        arguments: see `child.serve`: the handler, the directory, and modules to import before the
            fork.
    """

    number: int
    arguments: list[str]


class Report(msgspec.Struct, frozen=True):
    """A report that a worker was started or has ended.

    Attributes:
        number: of the request.
        pid: its process id, which is also its process group; None if it ended.
        status: its exit status, negative for a signal; None if it was started.
    """

    number: int
    pid: int | None = None
    status: int | None = None


encode = msgspec.msgpack.Encoder().encode
decode_fork = msgspec.msgpack.Decoder(Fork).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


class ForkServer:
    """The parent side of a fork server.

    If forking is unsafe, because an imported module started a thread or initialised CUDA, the
    server starts fresh interpreters instead.

    Args:
        directory: folder for its log.
        environment: extra environment variables of the server and its workers.
        imports: modules to import at once, before the first request; failures are ignored.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._workers: list[ForkedProcess] = []
        with (directory / LOG).open("wb") as log, theirs:
            self._process = Interpreter.own().start(
                "steadytorch.process.fork_server_main", theirs.fileno(), imports, log, environment
            )
        self._channel.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether the fork server runs and can start workers."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    def fork(self, arguments: Sequence[str], connection: int, log: int) -> ForkedProcess:
        """Requests a worker and returns without waiting for its start.

        Args:
            arguments: see `Fork`.
            connection: file descriptor of the worker's end of the connection.
            log: file descriptor of its log.

        Raises:
            OSError: the server has ended.
        """
        worker = ForkedProcess(self, len(self._workers))
        request = encode(Fork(worker.number, list(arguments)))
        self._workers.append(worker)  # first: an interrupt may follow the request at once
        self._channel.setblocking(True)
        try:
            socket.send_fds(self._channel, [request], [connection, log])
        finally:
            self._channel.setblocking(False)
        return worker

    def update(self) -> None:
        """Reads the server's pending reports and updates the state of the workers."""
        with contextlib.suppress(OSError):  # none is left, or the server has ended
            while message := self._channel.recv(MESSAGE_BYTES):
                report = _decode_report(message)
                worker = self._workers[report.number]
                worker.pid = report.pid if worker.pid is None else worker.pid
                worker.status = report.status

    def pause(self) -> None:
        """Suspends the server process, and with it all imports, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes a paused server."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kills the fork server; Linux then kills all workers of the server."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


class ForkedProcess:
    """A forked worker, with the subset of the `subprocess.Popen` interface that `Worker` needs.

    Attributes:
        number: stands for it in messages.
        pid: its process id; None until it was started.
        status: its exit status, negative for a signal; None until it was reported.
    """

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self.number = server, number
        self.pid: int | None = None
        self.status: int | None = None

    def poll(self) -> int | None:
        """The worker's exit status; None before the worker's start and while the worker runs.

        If the worker has just ended, waits up to 2 s for the server's report.
        """
        self._server.update()
        until = time.monotonic() + _REPORT_S
        while self.status is None and self._has_ended() and time.monotonic() < until:
            self._server.resume()  # a paused server reports nothing
            time.sleep(_POLL_S)
            self._server.update()
        if self.status is None and not self._server.alive:
            return -signal.SIGKILL
        return self.status

    def _has_ended(self) -> bool:
        """Whether the worker has ended according to `/proc`."""
        if self.pid is None or not self._server.alive:
            return False
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return True
        return fields.split()[0] in ("Z", "X")

    def wait(self, timeout: float) -> int:
        """Waits for the worker to end; returns at once if the worker was never started.

        Raises:
            subprocess.TimeoutExpired: the worker still runs.
        """
        until = time.monotonic() + timeout
        while (status := self.poll()) is None and self.pid is not None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(_POLL_S)
        return 0 if status is None else status

    def hold(self) -> None:
        """Prevents the fork server from starting this worker until `release`."""
        self._server.pause()

    def release(self) -> None:
        """Lets the fork server start this worker again after `hold`."""
        self._server.resume()
