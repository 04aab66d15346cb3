"""Shares step times between the ranks of a torchrun job."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

DEADLINE_S = 10.0
"""Maximum time that rank 0 waits for the other ranks' times after its own steps have ended."""
MOST_RANKS = 1024
Times = dict[str, tuple[float, float]]
_watches = itertools.count()


class Job:
    """Shares each rank's mean slice times through torchrun's key-value store.

    Only rank 0 waits for other ranks, and only at the end. A process without torchrun is a job of
    one rank.

    Args:
        environment: environment variables of the process.

    Attributes:
        rank: this process's rank; 0 without torchrun.
        size: number of ranks; 1 without torchrun.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.size = int(environment.get("WORLD_SIZE", "1")) if by_agent else 1
        self.rank = int(environment.get("RANK", "0")) if self.size > 1 else 0
        run = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"steadytorch/watch/{run}/{next(_watches)}"

    def exchange(self, mine: Times) -> tuple[dict[int, Times], str]:
        """Publish this rank's slice times; rank 0 collects the other ranks' slice times.

        Args:
            mine: mean time of each slice, and its standard error, in ns.

        Returns:
            On rank 0, the times by rank and a remark on missing ranks; empty on other ranks.
        """
        if self.size == 1 or self.size > MOST_RANKS:
            return {}, ""
        try:
            return self._exchange(dict(mine))
        except Exception as error:  # the store may have ended with its agent
            from steadytorch.errors import one_line

            return {}, f"Ranks are not compared: {one_line(error)}."

    def _exchange(self, mine: Times) -> tuple[dict[int, Times], str]:
        store = self._store()
        store.set(self._key(self.rank), json.dumps(mine))
        if self.rank:
            return {}, ""
        found, until = {0: mine}, time.monotonic() + DEADLINE_S
        for rank in range(1, self.size):
            while not store.check([self._key(rank)]):
                if time.monotonic() > until:
                    break
                time.sleep(0.02)
            else:
                found[rank] = _times(store.get(self._key(rank)))
        missing = [str(rank) for rank in range(self.size) if rank not in found]
        if not missing:
            return found, ""
        return found, f"No times within {DEADLINE_S:.0f} s from rank {', '.join(missing[:8])}."

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _store(self) -> Any:
        from datetime import timedelta

        from torch.distributed import TCPStore

        return TCPStore(
            self._environment["MASTER_ADDR"],
            int(self._environment["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=DEADLINE_S),
        )


def _times(content: bytes) -> Times:
    return {str(name): (float(m), float(error)) for name, (m, error) in json.loads(content).items()}
