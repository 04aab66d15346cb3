"""Background jobs in a thread of this process, interrupted when the main thread ends."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread, main_thread
from typing import Any

_POLL_S = 0.1
_GRACE_S = 5.0  # a job that is stuck in a system call must not keep the process alive

_log = logging.getLogger("steadytorch")


class JobQueue:
    """Runs jobs one after another in a thread that ends when the queue is empty.

    When the main thread ends, SystemExit is raised in the running job and the waiting jobs are
    dropped. A plain daemon thread is not enough: the process aborts if the interpreter shuts down
    while the thread is inside PyTorch's C++ code.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Event]] = SimpleQueue()
        self._lock = Lock()
        self._is_running = False

    def start(self, job: Callable[[], Any]) -> Event:
        """Queues a job and returns an event that is set when the job has ended."""
        done = Event()
        with self._lock:
            self._waiting.put((job, done))
            if not self._is_running:
                self._is_running = True
                thread = Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                Thread(target=_end_with_main, args=(thread,), name=f"{self._name}-end").start()
        return done

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._waiting.empty():
                    self._is_running = False
                    return
                job, done = self._waiting.get()
            try:
                job()
            except BaseException as error:  # the next jobs must still run
                if not main_thread().is_alive():
                    return
                _log.warning("a job of %s failed: %s", self._name, type(error).__name__)
            finally:
                done.set()


def _end_with_main(thread: Thread) -> None:
    """Waits for `thread`; interrupts it when the main thread has ended.

    Runs in a non-daemon thread, so that interpreter shutdown waits up to `_GRACE_S` seconds for
    `thread`.
    """
    while main_thread().is_alive():
        thread.join(_POLL_S)
        if not thread.is_alive():
            return
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    thread.join(_GRACE_S)
