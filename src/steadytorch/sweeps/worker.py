"""A worker of a sweep: claims items, runs them, and writes each result once."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from steadytorch.caches import make_private
from steadytorch.errors import UsageError
from steadytorch.plan.files import check_writable, why, write_whole
from steadytorch.results.saved import content_of
from steadytorch.results.sweep import SweepRow
from steadytorch.sweeps.leases import TIMEOUT_S, Held, Leases

LEASE_TIMEOUT = "STEADYTORCH_SWEEP_LEASE"
"""Environment variable: seconds without a heartbeat after which a lease is taken over."""
_RESULT = ".json"


class Item(NamedTuple):
    """One workload of a list.

    Attributes:
        id: hexadecimal digest of everything that makes its result.
        text: its line, without the comment.
        options: name of each option to its value.
    """

    id: str
    text: str
    options: dict[str, Any]


def this_worker() -> str:
    """Returns the name of this process, as `host:pid`."""
    return f"{socket.gethostname()}:{os.getpid()}"


def lease_timeout_s() -> float:
    """Returns the lease timeout in seconds, from `STEADYTORCH_SWEEP_LEASE` if set.

    Raises:
        UsageError: the environment variable is not a time from 0.1 s to a day.
    """
    text = os.environ.get(LEASE_TIMEOUT) or str(TIMEOUT_S)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400.0:
        raise UsageError(f"{LEASE_TIMEOUT}={text!r:.60} is not a number of seconds, such as 30")
    return value


class SweepFolder:
    """The shared folder of a sweep, with one lease and one result file per item.

    Several sweeps may use the same folder, and each sweep handles only items of its own list.

    Args:
        path: the folder.
        items: of the list, in order, each id once.
        timeout_s: timeout of leases in seconds.
        worker: name of this worker; None for `this_worker`.
    """

    def __init__(
        self,
        path: Path,
        items: Sequence[Item],
        timeout_s: float = TIMEOUT_S,
        worker: str | None = None,
    ) -> None:
        self.path, self.items = path, list(items)
        self.worker = worker or this_worker()
        self.leases = Leases(path, self.worker, timeout_s)
        self._known: dict[str, SweepRow] = {}

    def check(self) -> None:
        """Checks that the sweep folder is writable; creates the folder if it is missing.

        Raises:
            UsageError: it is not.
        """
        try:
            make_private(self.path)
            check_writable(self.path / "probe")
        except (OSError, ValueError) as error:
            raise _unusable(self.path, error) from None

    def result(self, item: Item) -> SweepRow | None:
        """Returns the result of an item; None if no result exists or the result file is damaged."""
        found = self._known.get(item.id)
        if found is None:
            try:
                content = content_of(self._result_path(item))
                found = msgspec.json.decode(content, type=SweepRow)
            except (UsageError, msgspec.DecodeError, UnicodeError, RecursionError):
                return None
            if found.status not in ("done", "failed"):
                return None
            self._known[item.id] = found
        return found

    def write(self, item: Item, row: SweepRow) -> SweepRow:
        """Writes an item's result if none exists yet; returns the stored result.

        Raises:
            OSError: it cannot be written.
        """
        data = msgspec.json.encode(row)
        try:
            write_whole(self._result_path(item), data, replace=False)
        except FileExistsError:
            held = self.result(item)
            if held is not None:
                return held
            write_whole(self._result_path(item), data)  # a damaged file
        self._known[item.id] = row
        return row

    def forget_failures(self) -> None:
        """Removes the results of failed items, so that workers run those items again."""
        for item in self.items:
            row = self.result(item)
            if row is not None and row.status == "failed":
                self._result_path(item).unlink(missing_ok=True)
                del self._known[item.id]

    def rows(self) -> tuple[SweepRow, ...]:
        """Returns the state of every item, in the order of the list.

        Raises:
            UsageError: the folder cannot be read.
        """
        try:
            _, held = self._look()
        except FileNotFoundError:
            held = {}
        except OSError as error:
            raise _unusable(self.path, error) from None
        return tuple(
            self.result(item) or self._open(item, held.get(item.id)) for item in self.items
        )

    def _open(self, item: Item, held: Held | None) -> SweepRow:
        if held is None:
            return SweepRow(workload=item.text, status="waiting")
        worker = self.leases.holder(held)
        return SweepRow(workload=item.text, status="running", worker=worker)

    def _look(self) -> tuple[set[str], dict[str, Held]]:
        """Lists the folder once; returns the ids of items with a result file, and the leases."""
        names = os.listdir(self.path)
        ended = {name.removesuffix(_RESULT) for name in names if name.endswith(_RESULT)}
        return ended, self.leases.held(names)

    def _result_path(self, item: Item) -> Path:
        return self.path / f"{item.id}{_RESULT}"

    def work(
        self,
        order: Sequence[Item],
        run: Callable[[Item], SweepRow],
        finished: Callable[[SweepRow], None] = lambda row: None,
        waiting: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Claims and runs items until every item has a result.

        Free items come first. If other workers hold all remaining items, this worker waits for
        results and takes over items with dead leases.

        Args:
            order: the items in the order in which this worker claims them.
            run: makes the row of an item; what it raises ends the work and frees the item.
            finished: called with each row that this worker wrote.
            waiting: called with the number of items left, when only items of others are left.

        Raises:
            UsageError: the folder became unusable.
        """
        try:
            self._work(order, run, finished, waiting)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _work(
        self,
        order: Sequence[Item],
        run: Callable[[Item], SweepRow],
        finished: Callable[[SweepRow], None],
        waiting: Callable[[int], None],
    ) -> None:
        said = 0
        while True:
            ended, held = self._look()
            left = [item for item in order if item.id not in ended or self.result(item) is None]
            if not left:
                return
            free = [item for item in left if item.id not in held]
            if self._worked(free or left, held, run, finished):
                continue
            if not free and len(left) != said:
                said = len(left)
                waiting(said)
            time.sleep(self.leases.poll_s)

    def _worked(
        self,
        items: Sequence[Item],
        held: Mapping[str, Held],
        run: Callable[[Item], SweepRow],
        finished: Callable[[SweepRow], None],
    ) -> bool:
        """Runs the first item that can be claimed; returns False if no item can be claimed."""
        for item in items:
            lease = self.leases.claim(item.id, held.get(item.id))
            if lease is not None:
                with lease:
                    if self.result(item) is None:  # finished between the look and the claim
                        finished(self.write(item, run(item)))
                return True
        return False


def _unusable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"sweep folder {path} cannot be used: {why(error)}; name another one with --sweep"
    )
