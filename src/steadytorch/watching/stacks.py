"""Samples which line of the user's code the watched thread is running, many times a second."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import time
from array import array
from collections import deque
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, is_not, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from steadytorch.device.thread_time import ThreadTime
from steadytorch.watching.clock import StepClock
from steadytorch.watching.flight import Sample
from steadytorch.watching.process import OURS, core_wait_ns

if TYPE_CHECKING:
    from steadytorch.watching.process import ProcessSampler

INTERVAL_S = 0.05
MAX_CPU_SHARE = 0.001
"""Maximum CPU use of sampling, as a share of one core; costlier samples become rarer."""
FREE_NS = 10_000_000
"""CPU time in ns of samples that are always taken at full rate, for runs of a few seconds."""
FLIGHT_INTERVAL_S = 0.025
FLIGHT_CPU_SHARE = 0.005
"""Maximum CPU use with a flight recorder, which needs samples of single steps."""
OVERDUE_INTERVAL_S = 0.01
"""Time in seconds between samples of a step that exceeds the limit for slow steps."""
EXTRA_NS, EXTRA_SHARE = 100_000_000, 0.002
"""Maximum extra CPU time for detecting and sampling overdue steps: a fixed time in ns, plus a share
of the elapsed time."""
MOST_SAMPLES = 65_536
"""Maximum number of samples; when full, every second one is dropped and the interval doubles."""
SWITCH_S = 0.0005
"""Switch interval of the interpreter, and so the longest wait for its lock, while the script has no
other Python thread. With the usual 5 ms, most samples would be taken where the watched thread next
releases the lock, in a wait or an operator, and its Python code would look idle. Between threads of
the script it would change who runs when."""
PROMPT_NS = 1_000_000
"""Lateness above which a sample waited for the interpreter's lock; waits for a core are excluded,
and timers are late by less. If the wait is shorter than the switch interval, the watched thread
ran on until it released the lock by itself, so the sampled line does not count."""
DEEPEST = 200
"""Maximum number of frames searched for a line of the user's code."""
Line = tuple[str, str, int | None]
"""File, qualified name of the function, and number of a line; None for code without a line."""
_LINE = attrgetter("f_code.co_filename", "f_code.co_qualname", "f_lineno")
_IS_FRAME = partial(is_not, None)
_WRAPPERS = frozenset(
    {
        *("_call_impl", "_wrapped_call_impl", "_no_grad_wrapper", "decorate_context"),
        *("_fn", "inner", "wrapped", "wrapper"),
    }
)
"""PyTorch functions that only call another function with a more informative name."""
_ROUTINE = tuple(
    f"torch/{name}.py"
    for name in ("amp/grad_scaler", "nn/functional", "nn/utils/clip_grad", "optim/lr_scheduler")
)
"""Files of PyTorch whose functions belong to a step, although no module or optimizer runs them."""
_OURS = str(Path(__file__).parent.parent / "x")[:-1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")})


class StackSampler:
    """Samples the stack of the thread that created it, from a separate thread.

    Args:
        clock: the clock of the sampled thread. If it has a flight recorder, other threads are
            sampled too, and slow steps are sampled more often.
        process: sampler of the process, run with each sample; None to sample only the thread.
        interval_s: time between samples, in seconds; None for the default.

    Attributes:
        at_ns: time of each sample on `time.perf_counter_ns`.
        phases: slice at the time of each sample, as an index into `clock.SLICES`.
        places: index into `names`, or -1 where no line is the user's.
        names: lines, as `train.py:57 main, in save`.
        functions: the function of each line, in the same order.
        routine: whether each line is in a loss, in clipping or in a learning rate's schedule.
        process: the process sampler, or None.
        cpu_ns: CPU time spent on sampling.
    """

    def __init__(
        self,
        clock: StepClock,
        process: ProcessSampler | None = None,
        interval_s: float | None = None,
    ) -> None:
        self.at_ns, self.phases, self.places = array("q"), array("b"), array("l")
        self.names: list[str] = []
        self.functions: list[str] = []
        self.routine: list[bool] = []
        self.process = process
        self.cpu_ns = 0
        self._clock, self._flight = clock, clock.flight
        usual_s = INTERVAL_S if clock.flight is None else FLIGHT_INTERVAL_S
        self._interval_s = usual_s if interval_s is None else interval_s
        self._cpu_share = MAX_CPU_SHARE if clock.flight is None else FLIGHT_CPU_SHARE
        self._watched = threading.get_ident()
        self._known: dict[tuple[Line, str], int] = {}
        self._users: dict[str, bool] = {}
        self._stop = threading.Lock()
        self._switch = SwitchInterval()

    def start(self) -> None:
        """Start sampling."""
        self._stop.acquire()
        self._thread = threading.Thread(target=self._run, name="steadytorch-stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.release()
        self._thread.join(1.0)
        self._switch.restore()
        if self.process is not None:
            self.process.stop()

    def forget(self) -> None:
        """Restore the switch interval in a forked child, which has no sampler thread."""
        self._switch.restore()

    def _run(self) -> None:
        with ThreadTime() as cpu:
            self._follow(cpu)

    def _follow(self, cpu: ThreadTime) -> None:
        began_ns, pause_s = time.perf_counter_ns(), self._interval_s
        due_ns = started_ns = extra_ns = 0  # the first sample takes milliseconds: not counted
        own = threading.get_native_id()
        asked_ns, short, waited_ns = began_ns, False, core_wait_ns(own)
        while not self._stop.acquire(timeout=pause_s):
            now, before_ns = time.perf_counter_ns(), self.cpu_ns
            regular = now >= due_ns
            overdue = self._flight is not None and self._flight.is_overdue(now)
            if regular or overdue:
                prompt = short
                if not short:
                    late_ns = now - asked_ns - pause_s * 1e9 - (core_wait_ns(own) - waited_ns)
                    prompt = not PROMPT_NS < late_ns < sys.getswitchinterval() * 1e9
                self._sample(now, regular, prompt=prompt)
            self.cpu_ns = cpu.ns()
            started_ns = started_ns or self.cpu_ns
            extra_ns += 0 if regular else self.cpu_ns - before_ns
            if regular:
                spent_ns = max(0, self.cpu_ns - started_ns - extra_ns - FREE_NS)
                due_ns = max(now + self._interval_s * 1e9, began_ns + spent_ns / self._cpu_share)
            short = self._switch.shorten(alone=is_alone())
            asked_ns, waited_ns = time.perf_counter_ns(), 0 if short else core_wait_ns(own)
            pause_s = max(0.001, (due_ns - asked_ns) * 1e-9)
            if self._flight is not None:
                pause_s = min(pause_s, FLIGHT_INTERVAL_S)  # to see a slow step early
            if overdue and extra_ns < EXTRA_NS + EXTRA_SHARE * (now - began_ns):
                pause_s = min(pause_s, OVERDUE_INTERVAL_S)

    def _sample(self, now: int, regular: bool, *, prompt: bool) -> None:
        """Take a sample.

        Args:
            now: the time.
            regular: whether the sample counts towards the time shares of lines.
            prompt: whether the sample was taken on time, so that its line counts.
        """
        phase = self._clock.phase
        place = self._place(stack_of(self._watched))
        if self._flight is not None:
            self._flight.samples.append(Sample(now, phase, place, self._others()))
        if not regular:
            return
        self.at_ns.append(now)
        self.phases.append(phase)
        self.places.append(place if prompt else -1)
        if len(self.at_ns) >= MOST_SAMPLES:
            self.at_ns, self.phases = self.at_ns[::2], self.phases[::2]
            self.places = self.places[::2]
            self._interval_s *= 2
        if self.process is not None:
            self.process.look(self._line)

    def _line(self, thread: int) -> str:
        place = self._place(stack_of(thread))
        return "" if place < 0 else self.names[place]

    def _others(self) -> tuple[tuple[str, int], ...]:
        """Name and line of each other thread that is running the user's code."""
        ours = self._watched, threading.get_ident()
        places = (
            (thread.name, self._place(stack_of(thread.ident)))
            for thread in threading.enumerate()
            if thread.ident is not None and thread.ident not in ours
        )
        return tuple((name, place) for name, place in places if place >= 0)

    def _place(self, stack: list[Line]) -> int:
        called, library = "", ""
        for line in stack:
            file, qualified, _ = line
            if self._is_users(file):
                key = (line, called)
                if key not in self._known:
                    self._known[key] = len(self.names)
                    self.names.append(_named(line, called))
                    self.functions.append(f"{file}:{_function(qualified)}")
                    self.routine.append(library.endswith(_ROUTINE))
                return self._known[key]
            if not file.startswith(_OURS):
                name, library = qualified.rpartition(".")[2], file
                called = called if called and name in _WRAPPERS else name
        return -1

    def _is_users(self, file: str) -> bool:
        known = self._users.get(file)
        if known is None:
            known = self._users[file] = is_users(file)
        return known


class SwitchInterval:
    """Shortens the interpreter's switch interval while the script has only one Python thread.

    A switch interval that the script sets itself is kept.
    """

    def __init__(self) -> None:
        self._found_s: float | None = None

    def shorten(self, *, alone: bool) -> bool:
        """Shorten the switch interval if `alone`, else restore it; return whether it is short.

        Args:
            alone: whether the script has no Python thread beside the watched one.
        """
        if not alone:
            self.restore()
        elif self._found_s is None and sys.getswitchinterval() > SWITCH_S:
            self._found_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
        return sys.getswitchinterval() <= SWITCH_S

    def restore(self) -> None:
        """Restore the original switch interval."""
        if self._found_s is not None and abs(sys.getswitchinterval() - SWITCH_S) < 1e-6:
            sys.setswitchinterval(self._found_s)
        self._found_s = None


def is_alone() -> bool:
    """Whether the script has only one Python thread, not counting steadytorch's threads."""
    return sum(not each.name.startswith(OURS) for each in threading.enumerate()) <= 1


def is_users(file: str) -> bool:
    """Whether a file is user code, not part of Python, an installed package or steadytorch."""
    return not (
        file.startswith(("<", _OURS, *_LIBRARIES)) or "site-packages" in file or "torch/nn" in file
    ) or file.startswith("<ipython-input")


def _function(qualified: str) -> str:
    """Qualified name without trailing parts such as `<lambda>`, `<listcomp>` or `<locals>`."""
    parts = qualified.split(".")
    while len(parts) > 1 and parts[-1].startswith("<"):
        parts.pop()
    return ".".join(parts)


def _named(line: Line, called: str) -> str:
    file, qualified, number = line
    inner = f", in {called}" if called else ""
    name = _function(qualified).rpartition(".")[2]
    within = "" if name == "<module>" else f" {name}"
    return f"{Path(file).name}{'' if number is None else f':{number}'}{within}{inner}"


def stack_of(thread: int) -> list[Line]:
    """File, function and line of each frame in another thread's stack, innermost first.

    In Python 3.11, creating a frame object may start a garbage collection. Garbage collection
    callbacks let the other thread continue, and the frame object then points to freed memory
    (CPython issue 97002). The garbage collector is therefore disabled while frames are read. A
    single call in C disables the collector, reads the frames and enables the collector again, so no
    other thread sees it disabled.

    Args:
        thread: identity of the thread, as `threading.get_ident` returns it.
    """
    found: list[Line] = []
    enabled: list[bool] = []
    first = map(methodcaller("get", thread), map(call, (sys._current_frames,)))
    frames = accumulate(chain(first, repeat("f_back", DEEPEST)), getattr)
    restore = map({True: gc.enable, False: gc.isenabled}.__getitem__, enabled)
    steps = (
        partial(enabled.extend, map(call, (gc.isenabled,))),
        gc.disable,
        partial(found.extend, map(_LINE, takewhile(_IS_FRAME, frames))),
        partial(deque(maxlen=0).extend, map(call, restore)),
    )
    try:
        deque(map(call, steps), maxlen=0)
    except MemoryError:
        if enabled == [True]:
            gc.enable()
    return found
