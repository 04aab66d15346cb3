"""Whole training steps under DistributedDataParallel as CUDA graphs, on all ranks or on none.

A replay issues the same collectives as the eager step, so some ranks may replay while others run
eagerly. Recording needs all ranks: a new graph is compared with the eager step over three steps,
whose collectives all ranks must join. Ranks therefore vote at fixed steps, through the process
group's store, before a recording and after the comparison.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steadytorch.graphs.checks import Snapshot
from steadytorch.graphs.data_parallel import WARM_UP as DDP_WARM_UP
from steadytorch.graphs.recording import first_cause, release_frames
from steadytorch.graphs.step import (
    MOST_ANEW,
    SET,
    WARMING,
    CapturedStep,
    _described,
    _Entry,
    _IndescribableError,
    key_of,
)
from steadytorch.ranks.agreement import Agreement, Ballot, Refusal
from steadytorch.ranks.group import Ranks
from steadytorch.workload.step import EagerStep

MOST_VOTES = 8
"""Maximum failed votes; after that, ranks stop voting and steps run eagerly."""
WAITING = "ranks have not agreed to record this step"
ACCUMULATES = "steps of several micro-batches are not recorded under DDP"


class UniformStep(CapturedStep):
    """A training step that all ranks record as a CUDA graph at the same step, or none does.

    Args:
        step: the step itself, around DDP.
        scope: see `CapturedStep`.
        modules: see `CapturedStep`.
        valid: see `CapturedStep`.
        ranks: this process and its group.
        prefix: prefix of the votes' keys; equal on all ranks.
        layout: how gradients are grouped into buckets.
        stream: the stream on which DDP's reducer was made.
    """

    warm_up = DDP_WARM_UP

    def __init__(
        self,
        step: EagerStep,
        scope: str,
        modules: Sequence[nn.Module],
        valid: Callable[[], str | None],
        *,
        ranks: Ranks,
        prefix: str,
        layout: Callable[[], Mapping[str, str]],
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(step, scope, modules, valid, check=True)
        self._ranks = replace(ranks, name=f"{prefix}/votes")
        self._layout, self._stream = layout, stream
        self._calls, self._next, self._votes, self._rounds = 0, DDP_WARM_UP + 1, 0, 0
        self._agreed = False
        if step.accumulate > 1:
            self._off = ACCUMULATES

    def __call__(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> Tensor:
        """Runs one step; every rank must call it equally often."""
        self._calls += 1
        if self._agreed or self._calls != self._next or self._votes >= MOST_VOTES:
            return super().__call__(inputs, kwargs, targets)
        self._votes += 1
        self._next = self._calls + (DDP_WARM_UP + 1) * 2**self._votes
        return self._voted((inputs, dict(kwargs), targets))

    @property
    def fault(self) -> str | None:
        """Reason why this rank lost its graphs after all ranks recorded; None if it kept them."""
        if not self._agreed or any(map(self._is_complete, self._entries.values())):
            return None
        return f"its graphs were dropped: {self.reason()}"

    def begin_again(self, reason: str) -> None:
        """Drops all graphs until the ranks vote again; call it on all ranks at the same step.

        Args:
            reason: why; given for all later steps if this happens too often.
        """
        self._forget()
        self._rounds += 1
        self._agreed, self._votes = False, 0
        self._next = self._calls + DDP_WARM_UP + 1
        if self._rounds > MOST_ANEW:
            self._off = self._off or reason

    # -- votes ------------------------------------------------------------------------------------

    def _voted(self, given: tuple[Any, ...]) -> Tensor:
        """Records this step if all ranks can, and replays it if all ranks' graphs are correct."""
        entry, problem = self._ready(given)
        ballot = self._ballot(given, problem)
        agreement = Agreement(self._ranks, "the recording of a training step")
        answer: Any = agreement.propose(ballot)
        before: Snapshot | str = WAITING
        if not isinstance(answer, Refusal):
            assert entry is not None
            before = self._rehearsed(entry, given, True, True)
            fault = before if isinstance(before, str) else self._recording_fault(entry, given)
            answer = agreement.finish(fault)
            if answer is not None and fault is None:
                self._recover(entry)
        if isinstance(answer, Refusal):
            return self._eagerly(_told(answer), given)
        assert entry is not None
        assert isinstance(before, Snapshot)
        with self._beside():
            fault = self._disagreement(before, entry, given, True, True)
        agreement = Agreement(self._ranks, "the graph of a training step")
        answer = agreement.propose(ballot._replace(problem=fault))
        if not isinstance(answer, Refusal):
            answer = agreement.finish()
        if isinstance(answer, Refusal):
            return self._refuse(entry, fault or _told(answer), given)
        self._agreed = True
        return self._replayed(entry, given, True, True)

    def _ready(self, given: tuple[Any, ...]) -> tuple[_Entry | None, str | None]:
        """Graphs of this step's signature, and why the step cannot be recorded now, or None."""
        if self._settings is not None and self._settings.changed():
            return None, SET
        if (reason := self._off or self._obstacle(given)) is not None:
            return None, reason
        try:
            entry = self._entries.get(key_of(given))
        except _IndescribableError as error:
            return None, str(error)
        if entry is None or entry.warm_up > 0:
            return None, WARMING
        return entry, entry.refused or self._prepared(entry, True)

    def _ballot(self, given: tuple[Any, ...], problem: str | None) -> Ballot:
        fields = {**self._layout(), "scope": self._scope, "update": str(self._updates())}
        if problem is None:
            fields["shapes"] = str(_without_devices(_described(given)))
        subject = hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()
        return Ballot(subject, fields, subject, problem=problem)

    def _recording_fault(self, entry: _Entry, given: tuple[Any, ...]) -> str | None:
        around = sys.exception()
        try:
            self._record_lacking(entry, given, True, True)
        except Exception as error:
            fault = f"cannot be recorded: {first_cause(error, around)}"
            release_frames(error, around)
            return self._refused(entry, fault)
        return None

    # -- other steps ------------------------------------------------------------------------------

    def _served(self, entry: _Entry, given: tuple[Any, ...]) -> Tensor:
        reason = None if self._is_complete(entry) else WAITING
        reason = reason or self._prepared(entry, True)
        if reason is not None or not self._is_complete(entry):  # `_prepared` may drop graphs
            return self._eagerly(reason or WAITING, given)
        if self._is_stale(entry):
            return self._eagerly(SET, given)
        return self._replayed(entry, given, True, True)

    def _backward(self, given: tuple[Any, ...]) -> Tensor:
        # Never repeated: other ranks would not repeat its collectives.
        return self.step.backward(*given)

    def _is_complete(self, entry: _Entry) -> bool:
        return not entry.lacks_graph(True, True, self._has_update_graph())

    def _run(self, given: tuple[Any, ...]) -> Tensor:
        # On the stream of DDP's reducer, where gradients are accumulated.
        with self._beside():
            return super()._run(given)


def _told(refusal: Refusal) -> str:
    return f"all ranks run eagerly: {refusal.reason}"


def _without_devices(value: Any) -> Any:
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, tuple):
        return tuple(map(_without_devices, value))
    return value
