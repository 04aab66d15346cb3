"""Triton programs compiled in threads, before the call that needs them.

Most of a compilation is outside of Python, where threads run side by side. What a thread made is
handed over by Triton's own key, so that a call either takes it, waits for it, or compiles.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from functools import cache
from typing import Any

import torch

from steadytorch.device.host import allowed_cpus, cpu_quota
from steadytorch.device.observe import NotObservable

Key = tuple[int, str]

_started: dict[Key, Future[Any]] = {}
"""What threads have made, or are to make, by device and Triton's key; None if that failed.

What was compiled is loaded once, on the device of its first launch, and so is not for two.
"""
_lock = threading.Lock()
_own = threading.local()


def begin(
    program: Any,
    dtype: torch.dtype,
    tensors: int,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    """Has a thread compile a program for the current device, unless that was done or is under way.

    Args:
        program: what `triton.jit` made.
        dtype: of all tensors, which are to begin at multiples of 16 bytes.
        tensors: how many there are, before the other arguments.
        arguments: those that a call will give; what is compiled depends on their values.
        options: of Triton's, by name.

    Raises:
        Exception: whatever Triton makes of such arguments. Failures to compile are left to the
            call, which compiles again.
    """
    _spare_filters()
    with _mode(_start):
        program.warmup(*[dtype] * tensors, *arguments, grid=(1, 1, 1), **options)


def call(
    program: Any, grid: tuple[int, int, int], given: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """`program[grid](*given, **options)`, which takes what a thread makes of the same program."""
    with ExitStack() as stack:
        if _started:
            with suppress(RuntimeError):  # the caller has a mode of Triton's in force: it decides
                stack.enter_context(_mode(_take))
        return program[grid](*given, **options)


def _mode(submit: Callable[..., Any]) -> Any:
    """A context in which Triton asks `submit` for what it has not compiled yet."""
    from triton import AsyncCompileMode
    from triton.runtime import driver

    device = driver.active.get_current_device()
    mode: Any = AsyncCompileMode(None)  # pyright: ignore[reportArgumentType] - nothing is submitted
    # Later versions hand over one more function, for what a failure leaves behind.
    mode.submit = lambda key, make, finish, *_: submit((device, key), make, finish)
    return mode


def _start(key: Key, make: Callable[[], Any], finish: Callable[[Any], None]) -> None:
    with _lock:
        if key in _started:
            return
        future = _started[key] = Future()
        turns = _turns()
    # No daemon: one that returns from Triton while the interpreter ends would take the process
    # down. What has begun is waited for then, what has not is left.
    threading.Thread(target=_run, args=(turns, future, make), name="steadytorch-compile").start()


def _take(key: Key, make: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
    future = _started.get(key)
    # One that still waits for its turn is not waited for.
    made = None if future is None or future.cancel() else future.result()
    if made is None:
        made = make()
    finish(made)
    return made


def _run(turns: threading.BoundedSemaphore, future: Future[Any], make: Callable[[], Any]) -> None:
    with turns:
        if not threading.main_thread().is_alive() or not future.set_running_or_notify_cancel():
            return
        made = None
        try:
            _own.is_compiling = True
            made = make()
        except Exception:
            pass
        finally:
            future.set_result(made)


@cache
def _turns() -> threading.BoundedSemaphore:
    """One for each core that this process may use."""
    cores = float(len(allowed_cpus()))
    with suppress(NotObservable):
        cores = min(cores, cpu_quota() or cores)
    return threading.BoundedSemaphore(max(1, int(cores)))


class _Warnings:
    """The module `warnings`, but for filters, which are one list for all threads.

    Triton's `catch_warnings` would put back the list that it has found, whatever other threads have
    set meanwhile, or leave its own for good where they put back what they have found. It is about
    deprecations of Python that no program here meets.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def catch_warnings(self, *given: Any, **named: Any) -> Any:
        is_ours = getattr(_own, "is_compiling", False)
        return nullcontext() if is_ours else warnings.catch_warnings(*given, **named)

    def simplefilter(self, *given: Any, **named: Any) -> None:
        if not getattr(_own, "is_compiling", False):
            warnings.simplefilter(*given, **named)


@cache
def _spare_filters() -> None:
    """Keeps Triton from changing filters in the threads that are made here; only in those."""
    from triton.compiler import code_generator

    front: Any = code_generator
    front.warnings = _Warnings()
