"""The parent's side of a worker process: start it, ask it, and learn how it died."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from steadytorch.process.messages import Raised, Request, decode_reply, encode

_CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""Signals at which `faulthandler`, which workers enable, tells where Python stood."""
_CRASHED = re.compile(rb"^Fatal Python error: ", re.MULTILINE)
_CURRENT = b"\nCurrent thread 0x"
"""Stands before the thread that crashed, where all threads are told of."""
_INNERMOST = re.compile(rb'^  File "([^"\n]+)", line (\d+) in (.+)$', re.MULTILINE)
_TAIL_BYTES = 1 << 16
"""Of a log, which may hold anything that the workload prints; a crash of Python is told in less."""
_GRACE_S = 2.0
_POLL_S = 0.25


class Fault(StrEnum):
    """How a request can fail."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out of memory"
    SIGNAL = "signal"
    EXIT = "exit"
    DEADLINE = "deadline"


class WorkerFault(Exception):  # noqa: N818 - a value of the protocol, not a misuse
    """A request that a worker did not answer with a result.

    Attributes:
        fault: which kind.
        reason: one clause for a table, such as "segmentation fault (SIGSEGV)", and which line of
            Python called what crashed, where that is known.
        detail: traceback or the end of the worker's output, for a log.
        raised: the exception in the worker, where there was one.
    """

    def __init__(
        self, fault: Fault, reason: str, detail: str = "", raised: Raised | None = None
    ) -> None:
        super().__init__(reason)
        self.fault, self.reason, self.detail, self.raised = fault, reason, detail, raised


class Worker:
    """A live worker process. Requests are answered in order; a fault ends the process.

    Args:
        handler: import path of the class that answers, `package.module:Class`; it is made with
            `directory` as its only argument, in the worker, at the first request.
        directory: private folder shared with the worker; its log goes there too.
        name: distinguishes its log from those of other workers.
        environment: variables set in the worker beside the inherited ones.
        memory_limit_bytes: the worker is killed above this much resident memory.
        imports: modules that it imports before it is asked for anything, where it can.
    """

    def __init__(
        self,
        handler: str,
        directory: Path,
        name: str,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._memory_limit = memory_limit_bytes
        self._log = directory / f"{name}.log"
        self._pending_since: float | None = None
        self._gone, self._owner = False, os.getpid()
        ours, theirs = socket.socketpair()
        paths = [os.path.abspath(entry) for entry in sys.path]
        self._connection = connection.Connection(ours.detach())
        with self._log.open("wb") as log, theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._connection.close)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "steadytorch.process.child"),
                    *(str(theirs.fileno()), handler, str(directory), *imports),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the group
            )
            on_failure.pop_all()
        atexit.register(self.kill)  # what it was started for may never end

    @property
    def alive(self) -> bool:
        """Whether it can take another request."""
        return not self._connection.closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    def send(self, method: str, **arguments: Any) -> None:
        """Puts a request; its answer is fetched by `receive`. Never blocks for the answer."""
        self._pending_since = time.monotonic()
        with contextlib.suppress(OSError):  # a dead worker is reported by receive
            self._connection.send_bytes(encode(Request(method, arguments)))

    def receive(self, deadline_s: float) -> Any:
        """Waits for the answer to the pending request.

        Args:
            deadline_s: seconds from the request, not from now.

        Raises:
            WorkerFault: it raised, died, or took too long; the process is gone unless it raised.
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
        """`send` and `receive` in one."""
        self.send(method, **arguments)
        return self.receive(deadline_s)

    def ready(self) -> bool:
        """Whether an answer, or the news of its death, can be received without waiting."""
        try:
            return self._connection.closed or self._connection.poll(0)
        except OSError:
            return True

    def overdue(self, deadline_s: float) -> bool:
        """Whether the pending request is older than `deadline_s` seconds, or memory ran over."""
        if self._pending_since is None:
            return False
        limit = self._memory_limit
        over = limit is not None and self._resident_bytes() > limit
        return over or time.monotonic() - self._pending_since > deadline_s

    def close(self) -> None:
        """Asks it to leave, then makes sure that it and all it started are gone."""
        if self.alive and self._pending_since is None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(encode(Request("close")))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the worker's whole process group at once, stopped processes included.

        Only once: later its number may be that of another group. And not by a fork of the process
        that started it, which ends without it.
        """
        if self._gone or os.getpid() != self._owner:
            return
        self._gone = True
        atexit.unregister(self.kill)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # stuck in a driver: left to the system
            self._process.wait(_GRACE_S)
        self._connection.close()

    def log_tail(self, limit: int = 2000) -> str:
        """The end of what it wrote to its output streams."""
        try:
            return self._tail(limit).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _tail(self, size: int) -> bytes:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - size))
            return log.read()

    def _crashed_in(self) -> str:
        """Which line of Python it crashed in, as a clause; empty where it did not say."""
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
        try:
            process = psutil.Process(self._process.pid)
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
                f"out of memory: passed {limit:.1f} GiB of host memory, killed",
                self.log_tail(),
            )

    def _death(self) -> WorkerFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        status = self._process.poll()
        self.kill()
        if status is not None and status < 0:
            names = {each.value: each.name for each in signal.Signals}  # few of real-time ones
            words = signal.strsignal(-status) or "signal"
            reason = f"{words.lower()} ({names.get(-status, -status)})"
            if -status in _CRASHES:
                reason = f"{reason}{self._crashed_in()}"[:300]
            return WorkerFault(Fault.SIGNAL, reason, self.log_tail())
        return WorkerFault(Fault.EXIT, f"process exited with status {status}", self.log_tail())


def wait_any(workers: Sequence[Worker], timeout_s: float) -> list[Worker]:
    """Waits until at least one of the workers can be received from; returns those that can."""
    finished = [worker for worker in workers if worker.ready()]
    if finished:
        return finished
    open_ones = {worker._connection: worker for worker in workers}
    return [open_ones[c] for c in connection.wait(list(open_ones), timeout_s)]  # type: ignore[index]
