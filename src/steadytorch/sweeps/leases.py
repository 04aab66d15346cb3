"""Leases: files in a shared folder that record which worker has claimed which item of a sweep.

A lease file is created exclusively, so only one worker can create it. The worker that holds a lease
touches the lease file at intervals, as a heartbeat. A lease is dead if its modification time stays
unchanged for the timeout, on the monotonic clock of the observing worker. Timestamps from different
clocks are never compared, so clock differences and clock jumps do no harm.

The n-th lease of an item, counted from 0, is the file `ITEM.n.lease`. A worker takes over a dead
lease by creating the lease file with the next number. A takeover renames and removes no files, so
two workers cannot both take over the same lease.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple

from steadytorch.errors import UsageError
from steadytorch.plan.files import create
from steadytorch.results.saved import content_of

TIMEOUT_S = 30.0
"""Default timeout in seconds."""
BEATS = 6
"""Heartbeats per timeout."""
POLLS = 15
"""Looks per timeout at the leases of others."""

_NAME = re.compile(r"([0-9a-f]+)\.(\d{1,9})\.lease")


class Held(NamedTuple):
    """The newest lease of an item: its number, counted from 0, and its file."""

    number: int
    path: Path


class Lease:
    """A claim on one item of a sweep, held while its `with` block runs.

    A background thread sends heartbeats inside the `with` block. Leaving the block releases the
    lease.
    """

    def __init__(self, path: Path, interval_s: float, release: Callable[[], None]) -> None:
        self.path = path
        self._interval_s, self._release = interval_s, release
        self._ended = Event()

    def __enter__(self) -> Lease:
        Thread(target=self._beat, name="steadytorch-lease", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._release()

    def _beat(self) -> None:
        while not self._ended.wait(self._interval_s):
            # The file is gone where another worker has finished the item.
            with suppress(OSError):
                os.utime(self.path)  # the time of the file system, not of this host


class _Watched(NamedTuple):
    """The last observed state of a lease, and how long the lease has not changed."""

    seen: tuple[int, ...]
    at_s: float
    unchanged_s: float


class Leases:
    """The leases in one folder.

    Args:
        folder: the shared folder.
        worker: name of this worker, for messages of others.
        timeout_s: seconds without a heartbeat after which a lease is dead.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._worker, self._timeout_s = folder, worker, timeout_s
        self._clock = clock
        self._watched: dict[str, _Watched] = {}

    @property
    def poll_s(self) -> float:
        """Seconds between two checks of other workers' leases."""
        return self._timeout_s / POLLS

    def held(self, names: Iterable[str] | None = None) -> dict[str, Held]:
        """Returns the newest lease of each claimed item, dead or alive.

        Args:
            names: the files in the folder; None to list them.
        """
        found: dict[str, Held] = {}
        for name in os.listdir(self._folder) if names is None else names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            item, number = match[1], int(match[2])
            if item not in found or found[item].number < number:
                found[item] = Held(number, self._folder / name)
        return found

    def claim(self, item: str, held: Held | None) -> Lease | None:
        """Claims an item that is free or whose lease is dead.

        Args:
            item: hexadecimal digits.
            held: its newest lease; None if it has none.

        Returns:
            The lease, or None if another worker holds one.

        Raises:
            OSError: the folder is not writable.
        """
        if held is not None and not self._is_dead(item, held):
            return None
        number = 0 if held is None else held.number + 1
        path = self._folder / f"{item}.{number}.lease"
        try:
            create(path, self._worker.encode())
        except FileExistsError:
            return None
        self._watched.pop(item, None)
        return Lease(path, self._timeout_s / BEATS, lambda: self._release(item, number))

    def holder(self, held: Held) -> str:
        """Returns the worker that created a lease; empty if the file is unreadable or empty."""
        try:
            return content_of(held.path).decode("utf-8", "replace")
        except UsageError:
            return ""

    def _is_dead(self, item: str, held: Held) -> bool:
        """Checks a lease once; a lease counts as dead only after several checks without change."""
        try:
            status = _status(held.path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # released meanwhile
                return False
            raise
        seen = (held.number, status.st_ino, status.st_mtime_ns)
        now, before = self._clock(), self._watched.get(item)
        if before is None or before.seen != seen:
            self._watched[item] = _Watched(seen, now, 0.0)
            return False
        # If this process was suspended, the holder may have been as well.
        passed = min(now - before.at_s, 2 * self.poll_s)
        unchanged = before.unchanged_s + passed
        self._watched[item] = _Watched(seen, now, unchanged)
        return unchanged >= self._timeout_s

    def _release(self, item: str, number: int) -> None:
        """Removes the released lease and all earlier leases of the item."""
        for each in range(number, -1, -1):
            with suppress(OSError):
                os.unlink(self._folder / f"{item}.{each}.lease")


def _status(path: Path) -> os.stat_result:
    """Returns the status of a lease file.

    The file is opened first, because opening makes network file systems drop cached times.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
