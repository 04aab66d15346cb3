"""Telemetry recorder: samples the machine in a thread while a measurement runs.

Garbage collections are recorded exactly, through `gc.callbacks`. All other telemetry is sampled at
ticks, so an event is located only between two ticks. Counters are cumulative, so late or missing
ticks make the time of an event less exact but lose no event.

A tick of the recorder holds the GIL for part of its duration and so delays a host-bound iteration.
To limit the overhead, expensive channels are read in turns, and the CPU time of all ticks is
capped.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from steadytorch.device import host
from steadytorch.device.channels import Channel, open_channels, ticks_between
from steadytorch.device.facts import parse_device
from steadytorch.device.observe import Readings
from steadytorch.device.recording import COUNTERS, LEVELS, Recording
from steadytorch.device.thread_time import ThreadTime
from steadytorch.errors import UsageError

MAX_TICKS = 8192
"""Two minutes at 15 ms; when full, every second tick is dropped. At most 1 MB of memory."""
MAX_COLLECTIONS = 8192
"""When full, the shortest collections are dropped until half of the space is free."""
MAX_CPU_SHARE = 0.005
"""Maximum CPU use of the recorder unless told otherwise; costlier ticks become rarer."""
PATIENCE_S = 10.0  # a driver call that hangs must not hang the measurement


class Tape:
    """Table of samples with a bounded number of rows; when full, every second row is dropped.

    Args:
        limit: maximum number of rows.
    """

    def __init__(self, limit: int = MAX_TICKS) -> None:
        self.at_ns = array("q")
        self.stride = 1
        self._limit = limit
        self._columns: dict[str, array[int]] = {}
        self._latest: dict[str, int] = {}

    def add(self, at_ns: int, row: dict[str, int]) -> None:
        """Add a row. The first row defines the columns; omitted columns repeat their last value."""
        if not self.at_ns:
            self._columns = {name: array("q") for name in row}
        if len(self.at_ns) >= self._limit:
            self.at_ns = self.at_ns[::2]
            self._columns = {name: column[::2] for name, column in self._columns.items()}
            self.stride *= 2
        self._latest |= row
        self.at_ns.append(at_ns)
        for name, column in self._columns.items():
            column.append(self._latest[name])

    def drop(self, names: tuple[str, ...]) -> None:
        """Remove columns."""
        for name in names:
            self._columns.pop(name, None)
            self._latest.pop(name, None)

    def columns(self) -> dict[str, tuple[int, ...]]:
        """All columns by name; counters start at zero in the first row."""
        return {
            name: tuple(value - column[0] for value in column)
            if name in COUNTERS
            else tuple(column)
            for name, column in self._columns.items()
        }


class GcWatch:
    """Records the garbage collections of all threads while it is installed.

    `count` and `total_ns` cover all collections; `events` has the long ones.

    Args:
        clock: returns ns on the time base of the samples.
        limit: maximum number of collections kept.
    """

    def __init__(self, clock: Callable[[], int], limit: int = MAX_COLLECTIONS) -> None:
        self.events: list[tuple[int, int, int]] = []
        self.count = self.total_ns = 0
        self.least_ns = 0
        self._clock = clock
        self._limit = limit
        self._started: int | None = None

    def install(self) -> None:
        """Register the callback."""
        gc.callbacks.append(self._hear)

    def remove(self) -> None:
        """Unregister the callback; other callbacks stay."""
        if self._hear in gc.callbacks:
            gc.callbacks.remove(self._hear)

    def _hear(self, phase: str, info: dict[str, int]) -> None:
        now = self._clock()
        if phase == "start":
            self._started = now
            return
        if self._started is None:  # installed during a collection
            return
        took, start = now - self._started, self._started
        self._started = None
        self.count += 1
        self.total_ns += took
        if took < self.least_ns:
            return
        self.events.append((start, took, info["generation"]))
        if len(self.events) >= self._limit:
            self._thin()

    def _thin(self) -> None:
        while len(self.events) > self._limit // 2:
            self.least_ns = 2 * self.least_ns or 1000
            self.events = [event for event in self.events if event[1] >= self.least_ns]


class Recorder:
    """Context manager that samples the machine; `recording` holds the result afterwards.

    An unobservable channel does not raise; its reason is stored in `Recording.unknown`. Enter the
    context in the measured thread, directly around the measurement.

    Example:
        with Recorder("cuda") as recorder:
            periods, host_ns = sampler.periods(step, 1000)
        causes = attribute(starts_ns, periods, outliers, recorder.recording, host_ns)

    Args:
        device: "cpu", "cuda" or "cuda:i".
        interval_s: time between ticks, in seconds.
        cpu_share: maximum CPU use, as a share of one core; costlier ticks become rarer.
        free_s: CPU time that ticks may take before that maximum applies, in s.
        clock: returns ns on the time base of the samples.
        library: replacement for nvidia-ml-py; None imports it.
        root: root of the file system to read.

    Raises:
        UsageError: `device` is malformed, or the interval is not positive.
    """

    def __init__(
        self,
        device: str,
        interval_s: float = 0.015,
        cpu_share: float = MAX_CPU_SHARE,
        *,
        free_s: float = 0.0,
        clock: Callable[[], int] = time.perf_counter_ns,
        library: Any = None,
        root: Path = host.ROOT,
    ) -> None:
        self._kind, _ = parse_device(device)
        if not 0 < interval_s <= threading.TIMEOUT_MAX:
            raise UsageError(f"a recorder's interval must be positive, not {interval_s!r} s")
        self._device, self._interval_s, self._clock = device, interval_s, clock
        self._most_cpu_share, self._free_ns = cpu_share, free_s * 1e9
        self._library, self._root = library, root
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        """The finished recording.

        Raises:
            UsageError: The `with` block has not ended yet.
        """
        if self._recording is None:
            raise UsageError("the recording is available only after the `with` block has ended")
        return self._recording

    def __enter__(self) -> Recorder:
        self._recording = None
        self._tape, self._readings = Tape(), Readings()
        self._pause_s, self._cpu_share = self._interval_s, 0.0
        self._ticks = self._ticking_ns = 0
        self._watched = threading.get_native_id()
        self._ready = threading.Event()
        # Held while the body runs. Waiting on a lock is one call; waiting on an event takes the
        # GIL several times, which delays the measured thread.
        self._running = threading.Lock()
        self._running.acquire()
        self._collections = GcWatch(self._clock)
        # A daemon, so that a hung driver call cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="steadytorch-recorder", daemon=True)
        self._thread.start()
        try:
            self._ready.wait(PATIENCE_S)
            self._collections.install()
        except BaseException:  # interrupted: `__exit__` will not be called
            self._running.release()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._collections.remove()
        self._running.release()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._tape, self._readings = Tape(), Readings()
            hung = f"a call into the driver or the system did not return in {PATIENCE_S:g} s"
            self._readings.refuse((*COUNTERS, *LEVELS), hung)
        self._recording = self._result()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                channels = open_channels(
                    self._device,
                    self._watched,
                    stack,
                    self._readings,
                    library=self._library,
                    root=self._root,
                )
                self._tick(channels, None)
                self._ready.set()
                self._follow(channels, stack.enter_context(ThreadTime()))
                for channel in channels:
                    self._discredit(channel.doubts())
        finally:
            self._ready.set()

    def _follow(self, channels: list[Channel], cpu: ThreadTime) -> None:
        """Take ticks until the `with` block ends, then one last tick."""
        began_ns, began_cpu_ns = self._clock(), cpu.ns()
        number = 0
        while not self._running.acquire(timeout=self._pause_s):
            number += 1
            self._tick(channels, number)
            spent_ns = cpu.ns() - began_cpu_ns
            elapsed_ns = self._clock() - began_ns
            counted_ns = max(0.0, spent_ns - self._free_ns)
            due_s = (counted_ns / self._most_cpu_share - elapsed_ns) * 1e-9
            pause_s = max(self._interval_s * self._tape.stride, due_s)
            self._pause_s = min(pause_s, threading.TIMEOUT_MAX)
        self._tick(channels, None)
        elapsed_ns = self._clock() - began_ns
        if elapsed_ns > 0:
            self._cpu_share = (cpu.ns() - began_cpu_ns) / elapsed_ns

    def _tick(self, channels: list[Channel], number: int | None) -> None:
        """Read the channels that are due; all of them if `number` is None (first and last tick)."""
        at_ns, watch = self._clock(), self._collections
        row = {"collections": watch.count, "collecting_ns": watch.total_ns}
        for turn, channel in enumerate(tuple(channels)):
            if number is not None and (number + turn) % ticks_between(channel):
                continue
            try:
                row.update(zip(channel.fields, channel.read(), strict=True))
            except Exception as error:  # as with any reading; see `Readings.read`
                channels.remove(channel)
                self._readings.refuse(channel.fields, error)
                self._tape.drop(channel.fields)
        self._tape.add(at_ns, row)
        self._ticks += 1
        self._ticking_ns += self._clock() - at_ns

    def _discredit(self, doubts: dict[str, str]) -> None:
        for field, reason in doubts.items():
            self._readings.refuse((field,), reason)
            self._tape.drop((field,))

    def _result(self) -> Recording:
        watch = self._collections
        starts, durations, generations = (
            zip(*watch.events, strict=True) if watch.events else ((),) * 3
        )
        return Recording(
            device=self._kind,
            interval_ns=round(max(self._pause_s, self._interval_s * self._tape.stride) * 1e9),
            at_ns=tuple(self._tape.at_ns),
            gc_start_ns=starts,
            gc_duration_ns=durations,
            gc_generation=generations,
            gc_dropped=watch.count - len(durations),
            gc_dropped_ns=watch.total_ns - sum(durations),
            gc_least_ns=watch.least_ns,
            cpus=os.cpu_count(),
            tick_ns=self._ticking_ns // max(1, self._ticks),
            cpu_share=self._cpu_share,
            unknown=self._readings.unknown,
            **self._tape.columns(),
        )
