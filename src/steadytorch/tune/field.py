"""The candidates of a search that live: who may be timed, who leads, who may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from steadytorch.errors import UsageError
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import Candidate
from steadytorch.transforms.precision import ALLOWED
from steadytorch.tune.budget import KEEP, SCREEN_BLOCKS, Budget
from steadytorch.tune.moves import describe
from steadytorch.tune.prepare import Watcher
from steadytorch.tune.select import Options, block_deadline_s, block_statistic
from steadytorch.tune.trial import LiveTrial

NEAR = 1.10
"""Only candidates within this factor of the leader stay for the final race."""


class Field:
    """Every trial of one search; while one is timed, the others wait.

    Args:
        options: what the user asks.
        budget: gives blocks their shape, and is told of the fastest.
        watcher: is told how it goes.
        rng: decides the order of blocks.

    Attributes:
        trials: in the order prepared, the baseline first.
    """

    def __init__(self, options: Options, budget: Budget, watcher: Watcher, rng: Random) -> None:
        self._options, self._budget, self._watcher, self._rng = options, budget, watcher, rng
        self.trials: list[LiveTrial] = []

    @property
    def baseline(self) -> LiveTrial:
        """The untouched workload."""
        return self.trials[0]

    def join(self, fresh: list[LiveTrial]) -> None:
        """Takes newcomers in; one on its second try replaces its first."""
        again = {trial.candidate for trial in fresh}
        self.trials = [t for t in self.trials if t.candidate not in again] + fresh

    def screen(self, fresh: list[LiveTrial]) -> None:
        """A few interleaved blocks of the newcomers, the leaders and the baseline."""
        arms = self.alive()
        for _ in range(SCREEN_BLOCKS):
            for trial in self._rng.sample(arms, len(arms)):
                self.arm(trial)()
        self._budget.fastest_ns = self.leader().screened_ns
        for trial in fresh:
            if trial.ok:
                self._watcher.timed(describe(trial.candidate), trial.screened_ns)
            else:
                self._watcher.trial(describe(trial.candidate), trial.status, trial.reason or "")
        keep = {id(t) for t in [self.baseline, *self.finalists()]}
        for trial in self.alive():
            if id(trial) not in keep:
                trial.worker.close()

    def screening_s(self, fresh: Sequence[LiveTrial]) -> float:
        """Seconds that screening these takes, beside those that live."""
        known = [trial.screened_ns for trial in self.alive()]
        # Warming up beside compilers may have taken many times as long as it does alone.
        most_ns = self._budget.shape.iteration_ns
        new = [min(t.set_up.warm_up.iteration_ns, most_ns) for t in fresh if t.set_up]
        return self._budget.screening_s([*known, *new]) if new else 0.0

    def timed_block(self, trial: LiveTrial, count: int | None = None) -> float:
        """The statistic of one more block.

        Raises:
            WorkerFault: the candidate died, now or before; it is rejected.
            UsageError: the untouched workload died.
        """
        if trial.status != "ok":
            raise WorkerFault(Fault.EXIT, trial.reason or "")
        count = count or self._budget.shape.count
        deadline_s = block_deadline_s(msgspec.structs.replace(self._budget.shape, count=count))
        try:
            times = trial.block(self._options.metric, count, deadline_s)
        except WorkerFault as fault:
            if trial is self.baseline:
                raise UsageError(
                    f"the untouched workload failed while it was timed: {fault.reason}"
                ) from fault
            raise
        self._watcher.tick()
        return block_statistic(self._options, times)

    def arm(self, trial: LiveTrial) -> Callable[[], float]:
        """Blocks of a trial for a race; a dead worker reports inf."""

        def block() -> float:
            try:
                return self.timed_block(trial)
            except WorkerFault:
                return float("inf")

        return block

    def alive(self) -> list[LiveTrial]:
        """Those whose processes live."""
        return [trial for trial in self.trials if trial.ok]

    def allowed(self, trial: LiveTrial) -> bool:
        """Whether its precision is one that the user admits."""
        return trial.precision in ALLOWED[self._options.precision]

    def ranked(self) -> list[LiveTrial]:
        """Every timed candidate that may be chosen, fastest first."""
        timed = [t for t in self.trials if t.blocks and t.status == "ok" and self.allowed(t)]
        return sorted(timed, key=self._score)

    def leader(self) -> LiveTrial:
        """The fastest, or the baseline while there is none."""
        ranked = self.ranked()
        return ranked[0] if ranked else self.baseline

    def finalists(self) -> list[LiveTrial]:
        """The fastest few whose processes live, without the baseline."""
        ranked = [t for t in self.ranked() if t.worker.alive and t is not self.baseline]
        if not ranked:
            return []
        fastest = self._score(ranked[0])
        return [t for t in ranked[:KEEP] if self._score(t) <= NEAR * fastest]

    def known(self, candidate: Candidate) -> bool:
        """Whether it was prepared before."""
        return any(t.candidate == candidate for t in self.trials)

    def _score(self, trial: LiveTrial) -> float:
        if self._options.objective != "p99":
            return trial.screened_ns
        return trial.measured(self._options.metric).p90_ns
