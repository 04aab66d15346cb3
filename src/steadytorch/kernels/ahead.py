"""Ahead-of-time compilation of Triton kernels in background threads.

Most of a Triton compilation runs without the GIL, so compilations in threads run in parallel.
Compiled kernels are cached under Triton's own key. A kernel launch uses the finished kernel, waits
for a running compilation, or compiles the kernel itself.
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

COMPILATIONS: dict[Key, Future[Any]] = {}
"""Compilations by device and Triton's key; a future's result is None if it failed.

The device is part of the key because a compiled kernel is loaded once, on its first device.
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
    """Start compiling a kernel for the current device in a thread, unless already started.

    Args:
        program: a function decorated with `triton.jit`.
        dtype: dtype of all tensors, which must be aligned to 16 bytes.
        tensors: number of tensors; they precede the other arguments.
        arguments: the other arguments of the later call; their values affect specialisation.
        options: Triton launch options, by name.

    Raises:
        Exception: Triton rejects the arguments. A compilation error is not raised here; the later
            call compiles again and raises it.
    """
    _spare_filters()
    with _mode(_start):
        program.warmup(*[dtype] * tensors, *arguments, grid=(1, 1, 1), **options)


def call(
    program: Any, grid: tuple[int, int, int], given: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Call `program[grid](*given, **options)`, with the kernel that a thread compiled, if any."""
    with ExitStack() as stack:
        if COMPILATIONS:
            with suppress(RuntimeError):  # the caller's own AsyncCompileMode has precedence
                stack.enter_context(_mode(_take))
        return program[grid](*given, **options)


def _mode(submit: Callable[..., Any]) -> Any:
    """Context in which Triton passes each needed compilation to `submit`."""
    from triton import AsyncCompileMode
    from triton.runtime import driver

    device = driver.active.get_current_device()
    mode: Any = AsyncCompileMode(None)  # pyright: ignore[reportArgumentType] - nothing is submitted
    # Later Triton versions pass one more function, for cleanup after a failure.
    mode.submit = lambda key, make, finish, *_: submit((device, key), make, finish)
    return mode


def _start(key: Key, make: Callable[[], Any], finish: Callable[[Any], None]) -> None:
    with _lock:
        if key in COMPILATIONS:
            return
        future = COMPILATIONS[key] = Future()
        turns = compile_slots()
    # Not a daemon: a daemon thread that returns from Triton during interpreter shutdown crashes the
    # process. At shutdown, running compilations are awaited and pending ones are skipped.
    threading.Thread(target=_run, args=(turns, future, make), name="steadytorch-compile").start()


def _take(key: Key, make: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
    future = COMPILATIONS.get(key)
    # `cancel` succeeds while the compilation is queued; then this call compiles itself.
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
def compile_slots() -> threading.BoundedSemaphore:
    """Semaphore with one slot per core that this process may use."""
    cores = float(len(allowed_cpus()))
    with suppress(NotObservable):
        cores = min(cores, cpu_quota() or cores)
    return threading.BoundedSemaphore(max(1, int(cores)))


class _Warnings:
    """Proxy of the module `warnings` that keeps compile threads from changing warning filters.

    All threads share one list of warning filters. If Triton's `catch_warnings` overlaps with
    another thread's, each may restore the other's list. Triton uses `catch_warnings` to silence
    Python deprecations that the kernels here never trigger.
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
    """Stop Triton from changing warning filters in our compile threads."""
    from triton.compiler import code_generator

    front: Any = code_generator
    front.warnings = _Warnings()
