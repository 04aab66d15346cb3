"""Divides a thread's running time into steps, and each step into slices such as `forward`.

This module imports only the standard library, because the clock starts before the script's imports.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from math import inf
from statistics import mean, stdev
from threading import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steadytorch.watching.flight import FlightRecorder

SLICES = (
    "input_wait",
    "copies",
    "forward",
    "backward",
    "optimizer",
    "synchronisation",
    "evaluation",
    "collection",
    "rest",
)
"""Slices of a watched step, in host time; they add up to the step.

- `input_wait`: a loader prepared the next batch, or was waited for.
- `copies`: `.to()` and `.cuda()` of tensors, on a machine with a GPU.
- `forward`: calls of modules with gradients enabled.
- `backward`: the autograd engine ran.
- `optimizer`: the optimizer's step, and zeroing of gradients.
- `synchronisation`: `.item()`, `.cpu()` and similar calls, on a machine with a GPU.
- `evaluation`: calls of modules with gradients disabled.
- `collection`: Python's garbage collector ran, inside any of these.
- `rest`: everything else, which is the script's own code."""
INPUT, COPIES, FORWARD, BACKWARD, OPTIMIZER, SYNCHRONISATION, EVALUATION, COLLECTION, REST = range(
    len(SLICES)
)

MODULE, LOADER, OPTIMIZING, ITERATION = range(4)
"""Events that end a step, from the weakest sign of a step to the strongest."""
UNITS = ("model calls", "batches", "optimizer steps", "iterations")
"""Names of steps, by the event that ends them."""
MOST_STEPS = 1_000_000
"""Maximum number of steps timed, which take 88 MB; later steps are only counted."""

MOST_COMPARED = 10_000
"""Maximum number of steps used to compare the ranks of a job."""
BATCHES = 8
"""Number of batch means from which the standard error is computed."""


def standard_error(times: Sequence[float]) -> float:
    """Standard error of a mean by batch means, because consecutive step times are correlated.

    For example, a core that is slow for a second lengthens dozens of steps. If correlated steps
    counted as independent, a rank could seem late by chance. Source: Law, "Simulation Modeling and
    Analysis", method of batch means.

    Args:
        times: durations of consecutive steps.

    Returns:
        The error in the unit of the times; inf with fewer than two times. The error is never below
        that of independent times, which is returned if batches have fewer than two times.
    """
    if len(times) < 2:
        return inf
    least = stdev(times) / len(times) ** 0.5
    size = len(times) // BATCHES
    if size < 2:
        return least
    means = [mean(times[at : at + size]) for at in range(0, BATCHES * size, size)]
    return max(least, stdev(means) / BATCHES**0.5)


class StepClock:
    """Times steps and slices in the thread that created it; ignores calls from other threads.

    Args:
        now: returns ns.
        on_first_step: called when the first step begins; the call's time belongs to no step.
        flight: flight recorder of the steps; None to record no steps.

    Attributes:
        flight: the flight recorder, or None.
        phase: the current slice, as an index into `SLICES`.
        unit: what ends a step, as an index into `UNITS`.
        steps: number of finished steps of that unit.
        discarded: steps of a weaker unit, found before a stronger one appeared.
        untimed: steps after the first `MOST_STEPS`.
        events: transitions so far, used to estimate the cost of watching.
        checks: module calls so far, nested ones included, used for the same estimate.
        starts_ns: start of each step on `time.perf_counter_ns`.
        durations_ns: duration of each step.
        slices_ns: time of each slice, one array per entry of `SLICES`.
    """

    def __init__(
        self,
        now: Callable[[], int] = time.perf_counter_ns,
        on_first_step: Callable[[], None] = lambda: None,
        flight: FlightRecorder | None = None,
    ) -> None:
        self.flight = flight
        self.phase, self.unit = REST, MODULE
        self.discarded = self.untimed = self.events = self.checks = 0
        self.starts_ns, self.durations_ns = array("q"), array("q")
        self.slices_ns = [array("q") for _ in SLICES]
        self._now, self._on_first_step = now, on_first_step
        self._thread = get_ident()
        self._outer: list[int] = []
        self._totals = [0] * len(SLICES)
        self._mark = now()
        self._began: int | None = None
        self._leader: object = None
        self._seen: set[object] = set()
        self._told = self._finishing = False

    @property
    def steps(self) -> int:
        """Number of finished steps that were timed."""
        return len(self.durations_ns)

    def late_means_ns(self) -> dict[str, tuple[float, float]]:
        """Mean time of each slice and its standard error, in ns; empty without steps.

        Covers the later half of the steps, limited to the last `MOST_COMPARED` steps.
        """
        first = max(self.steps // 2, self.steps - MOST_COMPARED)
        late = [column[first:] for column in self.slices_ns]
        return {
            name: (mean(column), standard_error(column))
            for name, column in zip(SLICES, late, strict=True)
            if column
        }

    def begin(self, phase: int) -> bool:
        """Enter a slice; return False if another slice is active, or in another thread.

        Other slices may nest in the optimizer's slice, because some trainers run the whole step in
        the optimizer's closure.
        """
        current = self.phase
        if current != REST and (current != OPTIMIZER or phase == OPTIMIZER):
            return False
        if get_ident() != self._thread:
            return False
        now = self._now()  # `_charge`, without a call: begin and end run often, in cold caches
        self._totals[current] += now - self._mark
        self._mark = now
        self.events += 1
        self._outer.append(current)
        self.phase = phase
        if self.flight is not None:
            self.flight.slice(now, phase)
        return True

    def interrupt(self, phase: int) -> bool:
        """Enter a slice inside any other; return False while a step ends, or in another thread."""
        if self._finishing or get_ident() != self._thread:
            return False
        self._charge()
        self._outer.append(self.phase)
        self.phase = phase
        return True

    def resume(self) -> None:
        """Leave the slice that `interrupt` entered."""
        self._charge()
        self.phase = self._outer.pop() if self._outer else REST

    def end(self) -> None:
        """Leave the slice that the last successful `begin` entered."""
        now = self._now()
        self._totals[self.phase] += now - self._mark
        self._mark = now
        self.events += 1
        self.phase = self._outer.pop() if self._outer else REST
        if self.flight is not None:
            self.flight.slice(now, self.phase)

    def reset(self) -> None:
        """Leave all slices after an exception skipped their `end` calls."""
        self._charge()
        self.phase = REST
        self._outer.clear()
        if self.flight is not None:
            self.flight.slice(self._mark, REST)
            self.flight.reset()

    def pause(self) -> None:
        """Exclude the time until the next step boundary from all steps, as an epoch has ended."""
        self._began = None

    def ignore(self) -> None:
        """Ignore calls from all threads from now on; used in forked child processes."""
        self._thread = 0
        if self.flight is not None:
            self.flight.ignore()

    def boundary(self, unit: int, who: object) -> None:
        """End the current step, if the caller is the leader.

        The first optimizer, module or loader seen is the leader, and only the leader ends steps.
        Another object becomes the leader after two calls without a call of the leader in between.
        A second optimizer that runs in each step therefore never becomes the leader.

        Args:
            unit: event that ends the step, such as `OPTIMIZING`; events weaker than one already
                seen are ignored.
            who: identity of the optimizer, module or loader.
        """
        if unit < self.unit or get_ident() != self._thread:
            return
        if unit > self.unit:
            self._promote(unit)
        if who != self._leader and self._leader is not None and who not in self._seen:
            self._seen.add(who)
            return
        self._leader = who
        self._seen.clear()
        self._charge()
        self._finish()

    def _promote(self, unit: int) -> None:
        self.discarded += self.steps
        for column in (self.starts_ns, self.durations_ns, *self.slices_ns):
            del column[:]
        self.unit, self._leader, self._began = unit, None, None
        self._seen.clear()
        if self.flight is not None:
            self.flight.clear()

    def _finish(self) -> None:
        self._finishing = True
        if self._began is not None:
            if self.steps < MOST_STEPS:
                self.starts_ns.append(self._began)
                self.durations_ns.append(self._mark - self._began)
                for column, total in zip(self.slices_ns, self._totals, strict=True):
                    column.append(total)
                self._keep(self._began)
            else:
                self.untimed += 1
        elif not self._told:
            self._told = True
            self._on_first_step()
            self._mark = self._now()
        self._began = self._mark
        self._totals = [0] * len(SLICES)
        self._finishing = False
        if self.flight is not None:
            self.flight.begin(self._mark, self.phase)

    def _keep(self, began_ns: int) -> None:
        """Pass the step to the flight recorder; exclude a long recording time from all steps."""
        if self.flight is not None and self.flight.finish(self.durations_ns, began_ns, self._mark):
            self._mark = self._now()

    def _charge(self) -> None:
        """Add the time since the last transition to the current slice."""
        now = self._now()
        self._totals[self.phase] += now - self._mark
        self._mark = now
        self.events += 1
