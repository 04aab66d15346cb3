"""The parent side of a worker process: starts it, sends requests, and reports how it died."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from multiprocessing import connection
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from steadytorch.process.fork_server import ForkedProcess, ForkServer
from steadytorch.process.interpreter import Interpreter
from steadytorch.process.messages import RemoteException, Request, decode_reply, encode

_CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""Signals for which `faulthandler`, enabled in workers, prints the Python stack."""
_CRASHED = re.compile(rb"^Fatal Python error: ", re.MULTILINE)
_CURRENT = b"\nCurrent thread 0x"
"""Precedes the crashed thread if all threads are printed."""
_INNERMOST = re.compile(rb'^  File "([^"\n]+)", line (\d+) in (.+)$', re.MULTILINE)
_TAIL_BYTES = 1 << 16
"""Bytes read from the end of a log, which may hold any output; a stack is shorter."""
_GRACE_S = 2.0
_POLL_S = 0.25


class Fault(StrEnum):
    """The ways in which a request can fail."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out of memory"
    SIGNAL = "signal"
    EXIT = "exit"
    DEADLINE = "deadline"


class WorkerFault(Exception):  # noqa: N818 - a value of the protocol, not a misuse
    """A failed request.

    Attributes:
        fault: the kind of failure.
        reason: one clause for a table, such as "segmentation fault (SIGSEGV)", with the Python line
            that crashed if known.
        detail: traceback or the end of the worker's output, for a log.
        raised: the exception in the worker, if any.
    """

    def __init__(
        self, fault: Fault, reason: str, detail: str = "", raised: RemoteException | None = None
    ) -> None:
        super().__init__(reason)
        self.fault, self.reason, self.detail, self.raised = fault, reason, detail, raised


class Worker:
    """A worker process, which answers requests in order.

    A fault other than an exception raised by the handler ends the worker process.

    Args:
        handler: import path of the handler class, `package.module:Class`. The worker creates it at
            the first request, with `directory` as the only argument.
        directory: private folder shared with the worker; also holds its log.
        name: distinguishes its log from those of other workers.
        environment: extra environment variables of the worker.
        memory_limit_bytes: resident memory above which the worker is killed.
        imports: modules to import before the first request; failures are ignored.
        interpreter: what runs the worker; None for this process's interpreter and import path. It
            must find this package.
        server: forks the worker, while it is alive; None to start an interpreter.
    """

    def __init__(
        self,
        handler: str,
        directory: Path,
        name: str,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
        imports: Sequence[str] = (),
        interpreter: Interpreter | None = None,
        server: ForkServer | None = None,
    ) -> None:
        self.name = name
        self._memory_limit = memory_limit_bytes
        self._log = directory / f"{name}.log"
        self._pending_since: float | None = None
        self._gone, self._owner = False, os.getpid()
        self._paused_at: float | None = None
        ours, theirs = socket.socketpair()
        self._connection = connection.Connection(ours.detach())
        arguments = [handler, str(directory), *imports]
        with self._log.open("wb") as log, theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._connection.close)
            self._process = _started(
                arguments,
                theirs.fileno(),
                log,
                environment,
                interpreter or Interpreter.own(),
                server,
            )
            on_failure.pop_all()
        atexit.register(self.kill)  # a daemon thread may never reach `close`

    @property
    def alive(self) -> bool:
        """Whether the worker can take another request."""
        return not self._connection.closed and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The worker's process id and process group id; None until a fork server has started it."""
        self._process.poll()
        return self._process.pid

    def send(self, method: str, **arguments: Any) -> None:
        """Send a request without waiting; fetch the answer with `receive`."""
        self._pending_since = time.monotonic()
        with contextlib.suppress(OSError):  # a dead worker is reported by receive
            self._connection.send_bytes(encode(Request(method, arguments)))

    def receive(self, deadline_s: float) -> Any:
        """Wait for the answer to the pending request.

        Args:
            deadline_s: seconds since the request, not from now.

        Raises:
            WorkerFault: the worker raised, died, or took too long; unless it raised, the process
                has ended.
        """
        start = self._pending_since if self._pending_since is not None else time.monotonic()
        try:
            while not self._connection.poll(_POLL_S):
                if time.monotonic() - start > deadline_s:
                    self.kill()
                    raise WorkerFault(
                        Fault.DEADLINE,
                        f"no answer within {deadline_s:.0f} s, killed",
                        self.log_tail(),
                    )
                self._check_memory()
            reply = decode_reply(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error
        finally:
            self._pending_since = None
        if reply.raised is None:
            return reply.result
        raised = reply.raised
        first_line = raised.message.splitlines()[0] if raised.message else ""
        fault = Fault.OUT_OF_MEMORY if raised.out_of_memory else Fault.RAISED
        reason = (
            "out of memory"
            if raised.out_of_memory
            else f"{raised.type}: {first_line}".strip(": ")[:300]
        )
        raise WorkerFault(fault, reason, raised.traceback, raised)

    def call(self, method: str, deadline_s: float, **arguments: Any) -> Any:
        """Send a request and wait for its answer."""
        self.send(method, **arguments)
        return self.receive(deadline_s)

    def ready(self) -> bool:
        """Whether `receive` would return or raise without waiting."""
        try:
            return self._connection.closed or self._connection.poll(0)
        except OSError:
            return True

    def overdue(self, deadline_s: float) -> bool:
        """Whether the pending request is past `deadline_s`, or the worker over its memory limit."""
        if self._pending_since is None:
            return False
        limit = self._memory_limit
        over = limit is not None and self._resident_bytes() > limit
        return over or time.monotonic() - self._pending_since > deadline_s

    def pause(self) -> None:
        """Stop the worker's process group until `resume`; deadlines do not count paused time."""
        self._paused_at = time.monotonic()
        if isinstance(self._process, ForkedProcess) and self.pid is None:
            self._process.hold()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the worker if it is paused."""
        if self._paused_at is None:
            return
        paused_s, self._paused_at = time.monotonic() - self._paused_at, None
        if isinstance(self._process, ForkedProcess):
            self._process.release()
        self._signal(signal.SIGCONT)
        if self._pending_since is not None:
            self._pending_since += paused_s

    def _signal(self, number: int) -> None:
        if not self._gone and (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def close(self) -> None:
        """Ask the worker to exit, then kill the rest of its process group."""
        if self.alive and self._pending_since is None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(encode(Request("close")))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the worker's whole process group at once, stopped processes included.

        Repeated calls do nothing, because the group id may be reused. Calls in a forked child of
        the parent do nothing.
        """
        if self._gone or os.getpid() != self._owner:
            return
        self._signal(signal.SIGKILL)
        self._gone = True
        atexit.unregister(self.kill)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # stuck in a driver: leave it to the system
            self._process.wait(_GRACE_S)
        self._connection.close()

    def log_tail(self, limit: int = 2000) -> str:
        """Return the end of the worker's output."""
        try:
            return self._tail(limit).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _tail(self, size: int) -> bytes:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - size))
            return log.read()

    def _crashed_in(self) -> str:
        """Return the Python line that crashed, as a clause for messages; empty if unknown."""
        try:
            log = self._tail(_TAIL_BYTES)
        except OSError:
            return ""
        crashes = [crash.end() for crash in _CRASHED.finditer(log)]
        stack = log[crashes[-1] :] if crashes else b""
        found = _INNERMOST.search(stack, max(0, stack.find(_CURRENT)))
        if found is None:
            return ""
        path, line, function = (part.decode("utf-8", "replace") for part in found.groups())
        return f" in {function}, {os.path.basename(path)}:{line}"

    def _resident_bytes(self) -> int:
        if (pid := self.pid) is None:
            return 0
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            return sum(member.memory_info().rss for member in family)
        except psutil.Error:
            return 0

    def _check_memory(self) -> None:
        if self._memory_limit is not None and self._resident_bytes() > self._memory_limit:
            self.kill()
            limit = self._memory_limit / 2**30
            raise WorkerFault(
                Fault.OUT_OF_MEMORY,
                f"out of memory: exceeded {limit:.1f} GiB of host memory, killed",
                self.log_tail(),
            )

    def _death(self) -> WorkerFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        status = self._process.poll()
        self.kill()
        if status is not None and status < 0:
            names = {each.value: each.name for each in signal.Signals}  # lacks most real-time ones
            words = signal.strsignal(-status) or "signal"
            reason = f"{words.lower()} ({names.get(-status, -status)})"
            if -status in _CRASHES:
                reason = f"{reason}{self._crashed_in()}"[:300]
            return WorkerFault(Fault.SIGNAL, reason, self.log_tail())
        return WorkerFault(Fault.EXIT, f"process exited with status {status}", self.log_tail())


def _started(
    arguments: Sequence[str],
    descriptor: int,
    log: BinaryIO,
    environment: Mapping[str, str] | None,
    interpreter: Interpreter,
    server: ForkServer | None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a worker process: forked by `server` if alive, else in a fresh interpreter."""
    if server is not None:
        with contextlib.suppress(OSError):  # it has ended
            return server.fork(arguments, descriptor, log.fileno())
    return interpreter.start("steadytorch.process.child", descriptor, arguments, log, environment)


def wait_any(workers: Sequence[Worker], timeout_s: float) -> list[Worker]:
    """Return the workers that have answered or died, waiting up to `timeout_s` for the first."""
    finished = [worker for worker in workers if worker.ready()]
    if finished:
        return finished
    open_ones = {worker._connection: worker for worker in workers}
    return [open_ones[c] for c in connection.wait(list(open_ones), timeout_s)]  # type: ignore[index]
