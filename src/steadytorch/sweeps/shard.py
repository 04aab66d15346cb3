"""Determines where a sweep worker starts in its list, from an option or the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from steadytorch.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The part of a sweep's item list at which a worker starts.

    Attributes:
        index: of the part, from 0.
        count: number of parts; None if unknown.
    """

    index: int
    count: int | None = None

    def order(self, items: Sequence[T]) -> list[T]:
        """Returns the items from the start of this shard to the end, then the items before it."""
        if not items:
            return []
        parts = len(items) if self.count is None else self.count
        start = self.index % parts * len(items) // parts
        return [*items[start:], *items[:start]]


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """Parses `auto`, or `K/N` with K from 1 to N.

    `auto` takes the index from a SLURM job array, a Kubernetes indexed job or a `torchrun` rank,
    and otherwise starts at the first item.

    Args:
        text: the option.
        environment: environment variables of this process.

    Raises:
        UsageError: `text` has another form.
    """
    if text == "auto":
        return _from_environment(environment)
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"shard {text!r} is neither auto nor K/N, such as 1/4 to 4/4")
    return Shard(int(match[1]) - 1, int(match[2]))


def _from_environment(environment: Mapping[str, str]) -> Shard:
    def number(name: str, least: int) -> int | None:
        text = environment.get(name, "")
        # SLURM's numbers of 32 bits have ten digits at most.
        return int(text) if re.fullmatch(r"\d{1,10}", text) and int(text) >= least else None

    task, count = number("SLURM_ARRAY_TASK_ID", 0), number("SLURM_ARRAY_TASK_COUNT", 1)
    if task is not None:
        first, step = number("SLURM_ARRAY_TASK_MIN", 0), number("SLURM_ARRAY_TASK_STEP", 1)
        return Shard(max(0, task - (first or 0)) // (step or 1), count)
    completion = number("JOB_COMPLETION_INDEX", 0)
    if completion is not None:  # Kubernetes does not say how many there are
        return Shard(completion)
    rank, size = number("RANK", 0), number("WORLD_SIZE", 1)
    if rank is not None and size is not None:
        return Shard(rank, size)
    return Shard(0, 1)
