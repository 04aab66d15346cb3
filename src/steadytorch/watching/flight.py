"""Records steps in a short ring buffer, and keeps the slowest and the steps before them.

Which of the kept steps count as slow is decided at the end, when all steps are known.

This module imports only the standard library: the recorder starts before the script's imports.
"""

from __future__ import annotations

import threading
import time
import weakref
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from operator import itemgetter
from typing import Any, NamedTuple

LEAD = 8
"""Number of steps kept before each slow step, for comparison with the slow step."""
MOST_EVENTS = 4096
"""Maximum number of events recorded per step, which take 48 KiB."""
SPARE = 100
"""Spare slots for slow steps, because only the end shows which steps are warm-up."""
FIRST_LIMIT = 20
"""Steps after which the limit for overdue steps is first computed."""
JUDGED_BY = 1000
"""Number of latest steps from which the limit for overdue steps is computed."""
GROWTH = 1.3
"""The limit for overdue steps is recomputed when the step count has grown by this factor."""
MODULE_SHARE = 0.005
"""Maximum time for recording module calls, as a share of step time; above this limit, fewer levels
of nested calls are recorded."""
MOST_SHARE = 0.01
"""Maximum total recording time, as a share of step time; above it, some steps are not recorded."""
_HEAD_START_NS = 5_000_000
"""Recording time in ns that is always allowed, so that the first steps are recorded."""
DEEPEST = 32
"""Maximum number of nested levels at which module calls are recorded."""

MOST_MODULES = 65_536
"""Maximum number of modules recorded by name, because scripts may create new ones in each step."""
MOST_SAMPLES = 4096
"""Maximum number of stack samples kept: 40 s at one sample per 10 ms."""

LEAVE, FULL, FIRST_MODULE = -1, -2, 64
"""Codes of events: a module call ends; nothing more was recorded in this step. Codes from 0 mark
the start of a slice, codes from `FIRST_MODULE` the start of a module call."""
_REPEATS, _CALLS = 10, 100
COLD = 2.0
"""Ratio of an event's cost in a script to its cost in a tight loop with warm caches. In steps of
2.5 ms, 26 events and the end of the step took 30 us; the tight loop predicted 12 us."""
_UNRECORDED, _NESTED, _OUTERMOST = range(3)


class Sample(NamedTuple):
    """One stack sample: the lines that the watched thread and other threads were running.

    Attributes:
        at_ns: time on `time.perf_counter_ns`.
        phase: the slice, as an index into `clock.SLICES`.
        place: the line, as an index into `StackSampler.names`; -1 if none is the user's.
        others: name and line of each other thread that is in the user's code.
    """

    at_ns: int
    phase: int
    place: int
    others: tuple[tuple[str, int], ...]


class StepTape(NamedTuple):
    """The events of one step.

    Attributes:
        number: index of the step, from 0.
        start_ns: start of the step.
        end_ns: end of the step.
        at_ns: time of each event.
        codes: code of each event; see `FIRST_MODULE`.
    """

    number: int
    start_ns: int
    end_ns: int
    at_ns: array[int]
    codes: array[int]


@dataclass(frozen=True)
class SlowTape:
    """The recorded events of a slow step and of the steps before it.

    Attributes:
        steps: the tapes, the slow step last.
        samples: samples of the threads during these steps; none if the step was not overdue.
    """

    steps: tuple[StepTape, ...]
    samples: tuple[Sample, ...]

    def of_slow(self) -> list[Sample]:
        """The stack samples taken during the slow step."""
        return [each for each in self.samples if each.at_ns >= self.steps[-1].start_ns]


class FlightRecorder:
    """Records steps and keeps the slowest ones so far.

    Args:
        keep: number of slow steps to keep.
        now: returns ns on the clock of the steps.
        cpu: returns the CPU time of the thread in ns, in which waits for a core do not count.

    Attributes:
        limit: maps the latest durations to the duration above which a running step is overdue.
        samples: latest stack samples.
        profiling: whether the script's own profiler is running.
        events: events so far.
        spent_ns: CPU time spent between steps.
        recorded: number of steps recorded.
        profiled: steps left out because the script's own profiler ran.
        on: whether the current step is recorded.
        depth: levels of nested module calls that are recorded.
    """

    def __init__(
        self,
        keep: int,
        now: Callable[[], int] = time.perf_counter_ns,
        cpu: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.keep = keep
        self.limit: Callable[[Any], float] | None = None
        self.samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self.profiling: Callable[[], bool] = bool
        self.events = self.spent_ns = self.recorded = self.profiled = 0
        self.depth = DEEPEST
        self._now, self._cpu = now, cpu
        self._thread = threading.get_ident()
        self._event_ns = self._step_ns = 0.0
        self._profiled = False
        self._open: list[int] = []
        self._modules: dict[int, tuple[int, Any]] = {}
        self._names: list[tuple[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Forget all steps, because the unit of steps has changed, such as to optimizer steps."""
        self._slow: list[tuple[int, int, SlowTape]] = []
        self._last: deque[StepTape] = deque(maxlen=LEAD + 1)
        self._limit_ns, self._next = 0.0, FIRST_LIMIT
        self._calls = self._span_ns = self.recorded = 0
        self._elapsed_ns = self._cost_ns = 0.0
        self._at, self._codes = array("q"), array("i")
        self.on, self._began_ns = True, self._now()

    # -- events ---------------------------------------------------------------------------------

    def slice(self, at_ns: int, code: int) -> None:
        """Record the start of a slice, such as forward or backward.

        Args:
            at_ns: the time.
            code: index into `clock.SLICES`.
        """
        if not self.on:
            return
        if len(self._at) < MOST_EVENTS:
            self._at.append(at_ns)
            self._codes.append(code)
        elif self._codes[-1] != FULL:
            self._at.append(at_ns)
            self._codes.append(FULL)

    def enter(self, module: Any, outermost: bool = False) -> bool:
        """Record a module call, unless it is nested too deeply or runs in another thread.

        Returns:
            Whether the caller must call `leave`.
        """
        if threading.get_ident() != self._thread:
            return outermost
        if outermost:  # an interrupt may have skipped the end of an earlier call
            self._open.clear()
        if not self.on or len(self._open) >= self.depth or len(self._at) >= MOST_EVENTS:
            if outermost:
                self._open.append(_UNRECORDED)
            return outermost
        known = self._modules.get(id(module))
        self._codes.append(known[0] if known is not None else self._register(module))
        self._at.append(self._now())
        self._open.append(_OUTERMOST if outermost else _NESTED)
        self._calls += 1
        return True

    def leave(self) -> bool:
        """Record the end of the module call that `enter` recorded last.

        Returns:
            Whether the module call was the outermost one.
        """
        kind = self._open.pop() if self._open else _UNRECORDED
        if kind != _UNRECORDED:
            self._codes.append(LEAVE)
            self._at.append(self._now())
        return kind != _NESTED

    def reset(self) -> None:
        """Forget open module calls after an exception skipped their `leave` calls."""
        self._open.clear()

    def ignore(self) -> None:
        """Ignore calls from all threads from now on; used in forked child processes."""
        self._thread = 0

    def _register(self, module: Any) -> int:
        """Assign an event code to a module until its deletion, because Python reuses object ids."""
        key = id(module)
        if len(self._names) >= MOST_MODULES:
            return FIRST_MODULE + MOST_MODULES
        reference = weakref.ref(module, lambda _: self._modules.pop(key, None))
        code = FIRST_MODULE + len(self._names)
        self._modules[key] = code, reference
        self._names.append((type(module).__name__, reference))
        return code

    # -- steps ----------------------------------------------------------------------------------

    def begin(self, at_ns: int, code: int) -> None:
        """Begin a step."""
        self._began_ns = at_ns
        if self.on:
            self._at, self._codes = array("q", (at_ns,)), array("i", (code,))

    def finish(self, durations_ns: Sequence[int], start_ns: int, end_ns: int) -> bool:
        """End a step, and keep it if it is among the slowest.

        Args:
            durations_ns: durations of all steps, with this step's duration at the end.
            start_ns: start of this step.
            end_ns: end of this step.

        Returns:
            Whether recording took so long that the next step should begin only after this call.
        """
        took_ns = durations_ns[-1]
        recorded = self.on and len(self._at) == len(self._codes)  # an interrupt may come between
        if recorded:
            self._count(took_ns)
        self._elapsed_ns += took_ns
        self.on = self._cost_ns <= MOST_SHARE * self._elapsed_ns + _HEAD_START_NS
        before, self._profiled = self._profiled, self.profiling()
        if before or self._profiled:
            self.profiled += 1
            return False
        index = len(durations_ns) - 1
        if recorded:
            self._last.append(StepTape(index, start_ns, end_ns, self._at, self._codes))
        due = self.limit is not None and index + 1 >= self._next
        held, slow = recorded and not self._is_outdone(took_ns), took_ns > self._limit_ns
        if not due and not (held and slow):
            if held:
                self._hold(index, took_ns, ())
            return False
        began = self._cpu()
        if due and self.limit is not None:
            self._limit_ns = self.limit(durations_ns[-JUDGED_BY:])
            self._next = int(GROWTH * self._next) + 1
        if held:
            self._hold(index, took_ns, self._samples_since(self._last[0].start_ns) if slow else ())
        spent_ns = self._cpu() - began
        self.spent_ns += spent_ns
        self._cost_ns += spent_ns
        return True

    def is_overdue(self, now: int) -> bool:
        """Whether the running step exceeds the limit for slow steps; callable from any thread."""
        return 0 < self._limit_ns < now - self._began_ns

    def _count(self, took_ns: int) -> None:
        """Add a step's recording cost; record fewer levels of module calls if it is too high."""
        self.recorded += 1
        self.events += len(self._at)
        self._cost_ns += len(self._at) * self._event_ns + self._step_ns
        self._span_ns += took_ns
        if self._calls * 2 * self._event_ns > MODULE_SHARE * self._span_ns:
            self.depth = max(1, min(self.depth, self._deepest()) - 1)
            self._calls = self._span_ns = 0

    def _is_outdone(self, took_ns: int) -> bool:
        """Whether the recorder is full of steps that took at least `took_ns`."""
        return len(self._slow) >= self.keep + SPARE and self._slow[0][0] >= took_ns

    def _hold(self, index: int, took_ns: int, samples: tuple[Sample, ...]) -> None:
        entry = took_ns, index, SlowTape(tuple(self._last), samples)
        full = len(self._slow) >= self.keep + SPARE
        (heapreplace if full else heappush)(self._slow, entry)

    def _samples_since(self, at_ns: int) -> tuple[Sample, ...]:
        samples = list(self.samples)  # one call, so that the sampler cannot add meanwhile
        return tuple(samples[bisect_left(samples, at_ns, key=itemgetter(0)) :])

    def _deepest(self) -> int:
        """Deepest nesting of module calls recorded in the last step."""
        level = deepest = 0
        for code in self._codes:
            level += (code >= FIRST_MODULE) - (code == LEAVE)
            deepest = max(deepest, level)
        return deepest

    # -- afterwards -----------------------------------------------------------------------------

    def held(self) -> dict[int, SlowTape]:
        """The recordings of the kept steps, by step number."""
        return {index: tape for _, index, tape in self._slow}

    def module_names(self) -> list[str]:
        """Class name and path of each module, indexed by event code minus `FIRST_MODULE`.

        The last name stands for all modules beyond `MOST_MODULES`.
        """
        paths: dict[int, str] = {}
        alive = [reference() for _, reference in self._names]
        for module in alive:  # outer modules are called first
            if module is not None and id(module) not in paths:
                paths |= {id(each): name for name, each in module.named_modules()} | paths
        names = [
            f"{name} {paths[id(module)]}".rstrip() if module is not None else name
            for (name, _), module in zip(self._names, alive, strict=True)
        ]
        return [*names, "another module"]

    def cost_ns(self) -> float:
        """Total time that recording took, in ns."""
        return self.events * self._event_ns + self.recorded * self._step_ns + self.spent_ns

    def measure_cost(self) -> None:
        """Measure the time for recording an event, and the time for ending a step."""
        trial, durations = FlightRecorder(1 - SPARE, self._now, self._cpu), array("q", (1,))
        for _ in range(2):
            trial.finish(durations, 0, 1)

        def call() -> None:
            trial.enter(durations)
            trial.leave()

        def step() -> None:
            trial.begin(0, 0)
            trial.finish(durations, 0, 1)

        self._event_ns = COLD * self._least_ns(call) / 2
        self._step_ns = COLD * self._least_ns(step)

    def _least_ns(self, call: Callable[[], None]) -> float:
        """Shortest time of a call over several repetitions, in ns."""
        found = []
        for _ in range(_REPEATS):
            began = self._now()
            for _ in range(_CALLS):
                call()
            found.append(self._now() - began)
        return min(found) / _CALLS
