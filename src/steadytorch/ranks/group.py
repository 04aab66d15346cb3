"""The ranks of an initialised process group, which agree on plans."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import nn

from steadytorch.errors import UsageError

DEADLINE = "STEADYTORCH_RANKS_DEADLINE"
"""Environment variable: seconds without a sign of life after which ranks run untouched."""
DEADLINE_S = 60.0
_PREFIX = "steadytorch/ranks"

_counters: dict[str, Iterator[int]] = {}
_lock = Lock()


@dataclass(frozen=True)
class Ranks:
    """The position of this process among the ranks of a process group.

    Attributes:
        rank: rank of this process in the group; 0 leads.
        size: number of ranks, 2 or more.
        store: the process group's key-value store.
        name: prefix of the group's keys, equal on all its ranks.
        deadline_s: seconds without a sign of life after which ranks run untouched.
    """

    rank: int
    size: int
    store: Any
    name: str = _PREFIX
    deadline_s: float = DEADLINE_S

    def next_prefix(self) -> str:
        """Store prefix of the next agreement; all ranks make their agreements in the same order."""
        with _lock:
            return f"{self.name}/{next(_counters.setdefault(self.name, itertools.count()))}"


def ranks_of(group: Any = None, agree: bool = True) -> Ranks | None:
    """The ranks of a process group; None without other ranks, or if `agree` is False.

    Args:
        group: a `torch.distributed` process group; None for the default group.
        agree: False opts out.

    Raises:
        UsageError: this process is not in `group`, or the deadline is not a positive number.
    """
    import torch.distributed as dist

    if not agree or not dist.is_available() or not dist.is_initialized():
        return None
    size = dist.get_world_size(group)
    if size < 0:
        raise UsageError("this process is not in the given group: pass agree=False on its rank")
    if size == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    name = _PREFIX
    if group is not None:
        members = ",".join(map(str, dist.get_process_group_ranks(group)))
        name = f"{_PREFIX}/{hashlib.sha256(members.encode()).hexdigest()[:16]}"
    deadline_s = deadline_from_environment()
    return Ranks(dist.get_rank(group), size, _get_default_store(), name, deadline_s)


def collective_in(model: nn.Module) -> str | None:
    """Why a plan must not run inside a model: it contains DDP or FSDP; None if neither is found."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        found = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
        place = f" at {name}" if name else ""
        if sharded := found - {"DistributedDataParallel"}:
            return (
                f"the model contains {min(sharded)}{place}, which gathers and frees parameters "
                "inside the step: plans do not serve FSDP"
            )
        if found:
            return (
                f"the model contains {min(found)}{place}, whose collectives a plan may reorder: "
                "apply the plan to the inner module, then wrap the result"
            )
    return None


def deadline_from_environment() -> float:
    """The deadline in seconds from the environment variable named in `DEADLINE`, 60 by default.

    Raises:
        UsageError: the variable is not a positive number.
    """
    text = os.environ.get(DEADLINE, "")
    try:
        seconds = float(text) if text else DEADLINE_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{DEADLINE} must be seconds above 0, got {text!r:.60}")
    return seconds
