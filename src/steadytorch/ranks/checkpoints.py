"""Ends a plan on all ranks at the same training step when one rank finds a fault.

Each rank calls `Checkpoints.at` once per step. Every `EVERY` steps a rank passes a checkpoint: it
increments a counter, then waits until all ranks have passed the previous checkpoint. Ranks are
therefore never more than two checkpoints apart. A rank that must end the plan publishes the step at
which all ranks end it: the third checkpoint after its own. When the step is published, no rank has
passed the second checkpoint after the publishing rank's. Each rank looks for a published step at
every checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Literal

from steadytorch.errors import SteadyError, one_line
from steadytorch.ranks.group import Ranks
from steadytorch.ranks.messages import Ending, decode, encode

EVERY = 16
"""Steps between two checkpoints. One takes three round trips to the store."""
AHEAD = 3
"""Checkpoints from a fault to the step at which all ranks end the plan."""
_POLL_S, _SLOWEST_POLL_S = 0.0005, 0.02

Kind = Literal["plan", "graphs"]

log = logging.getLogger("steadytorch")


class Checkpoints:
    """Counts the steps of one rank, and synchronises with the other ranks at checkpoints.

    If the store is lost, or a rank is missing at the deadline, this rank continues without further
    checkpoints.

    Args:
        ranks: this process and its group.
        prefix: prefix of the keys; equal on all ranks, and not used by an earlier run.
        store: the store, for tests; None for that of the group.
        every: steps between two checkpoints; equal on all ranks.

    Attributes:
        step: number of steps begun.
        lost: why this rank no longer hears of the others; None if it does.
    """

    def __init__(self, ranks: Ranks, prefix: str, store: Any = None, every: int = EVERY) -> None:
        from torch.distributed import PrefixStore

        self._ranks, self._every = ranks, every
        self._store = PrefixStore(prefix, ranks.store if store is None else store)
        self._ending: Ending | None = None
        self._round = 0
        self.step = 0
        self.lost: str | None = None

    def at(self, reason: str | None = None, kind: Kind = "plan") -> Ending | None:
        """Begins a training step; call `at` on every rank, once per step.

        Args:
            reason: why this rank must end the plan; None if it need not.
            kind: what it must end, the plan or its graphs.

        Returns:
            What all ranks end with this step, and why; None at all other steps.
        """
        self.step += 1
        if reason is not None and self._ending is None and self.lost is None:
            self._guarded(lambda: self._publish(reason, kind))
        if self.step % self._every == 0 and self.lost is None:
            self._guarded(self._pass)
        ending = self._ending
        if ending is None or self.step < ending.step:
            return None
        self._ending, self._round = None, self._round + 1
        return ending

    def _publish(self, reason: str, kind: Kind) -> None:
        step = (self.step // self._every + AHEAD) * self._every
        asked = Ending(step=step, rank=self._ranks.rank, reason=reason[:500], kind=kind)
        self._store.compare_set(self._name, "", encode(asked))
        self._read()

    def _pass(self) -> None:
        number = self.step // self._every
        self._store.add(f"passed/{number}", 1)
        pause, end = _POLL_S, time.monotonic() + self._ranks.deadline_s
        while number > 1 and self._store.add(f"passed/{number - 1}", 0) < self._ranks.size:
            if time.monotonic() > end:
                raise SteadyError(f"a rank was missing for {self._ranks.deadline_s:g} s")
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_S, 2 * pause)
        if self._ending is None and self._store.check([self._name]):
            self._read()
        if self._ranks.rank == 0 and number > AHEAD:
            with suppress(RuntimeError, NotImplementedError):  # some stores cannot delete
                self._store.delete_key(f"passed/{number - AHEAD}")

    @property
    def _name(self) -> str:
        return f"ending/{self._round}"

    def _read(self) -> None:
        self._ending = decode(self._store.get(self._name), Ending)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs store access in a separate thread, because a call to a stopped store may hang."""
        failed: list[BaseException] = []
        done = Event()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        Thread(target=run, name="steadytorch-checkpoint", daemon=True).start()
        if not done.wait(self._ranks.deadline_s + 1.0):
            failed.append(SteadyError(f"no answer within {self._ranks.deadline_s:g} s"))
        if failed:
            self.lost = one_line(failed[0])
            log.warning("this rank no longer hears of faults on other ranks: %s", self.lost)
