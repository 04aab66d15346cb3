"""The trials of a search: which are alive, which lead, and which may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from steadytorch.errors import UsageError
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import Candidate, describe
from steadytorch.transforms.precision import ALLOWED
from steadytorch.tune.budget import KEEP, SCREEN_BLOCKS, Budget
from steadytorch.tune.select import SearchOptions, block_deadline_s, block_statistic
from steadytorch.tune.setup_scheduler import ProgressListener
from steadytorch.tune.trial import LiveTrial

NEAR = 1.10
"""Only candidates within this factor of the leader's time enter the final race."""


class CandidatePool:
    """All trials of one search. Only one is timed at a time.

    Args:
        options: the user's options.
        budget: sets the block shape and receives the fastest iteration time.
        watcher: receives progress.
        rng: decides the order of blocks.

    Attributes:
        trials: in order of set-up, the baseline first.
    """

    def __init__(
        self, options: SearchOptions, budget: Budget, watcher: ProgressListener, rng: Random
    ) -> None:
        self._options, self._budget, self._watcher, self._rng = options, budget, watcher, rng
        self.trials: list[LiveTrial] = []

    @property
    def baseline(self) -> LiveTrial:
        """The untouched workload."""
        return self.trials[0]

    def join(self, fresh: list[LiveTrial]) -> None:
        """Adds trials; a retry replaces the earlier trial of the same candidate."""
        again = {trial.candidate for trial in fresh}
        self.trials = [t for t in self.trials if t.candidate not in again] + fresh

    def screen(self, fresh: list[LiveTrial]) -> None:
        """Times interleaved blocks of new trials, leaders and baseline, and closes the losers."""
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
        """Seconds to screen these trials together with those alive; 0 if none is set up."""
        known = [trial.screened_ns for trial in self.alive()]
        # Warm-up times taken beside compilers may be many times too long.
        most_ns = self._budget.shape.iteration_ns
        new = [min(t.set_up.warm_up.iteration_ns, most_ns) for t in fresh if t.set_up]
        return self._budget.screening_s([*known, *new]) if new else 0.0

    def timed_block(self, trial: LiveTrial, count: int | None = None) -> float:
        """Times one more block and returns its statistic in ns.

        Raises:
            WorkerFault: the candidate's worker died, now or earlier; the trial is rejected.
            UsageError: the untouched workload's worker died.
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
                    f"the untouched workload failed during timing: {fault.reason}"
                ) from fault
            raise
        self._watcher.tick()
        return block_statistic(self._options, times)

    def arm(self, trial: LiveTrial) -> Callable[[], float]:
        """A function that times one block for a race; a dead worker reports inf."""

        def block() -> float:
            try:
                return self.timed_block(trial)
            except WorkerFault:
                return float("inf")

        return block

    def alive(self) -> list[LiveTrial]:
        """Trials that can still be timed."""
        return [trial for trial in self.trials if trial.ok]

    def allowed(self, trial: LiveTrial) -> bool:
        """Whether the user allows its precision."""
        return trial.precision in ALLOWED[self._options.precision]

    def ranked(self) -> list[LiveTrial]:
        """Timed trials that may be chosen, fastest first."""
        timed = [t for t in self.trials if t.blocks and t.status == "ok" and self.allowed(t)]
        return sorted(timed, key=self._score)

    def leader(self) -> LiveTrial:
        """The fastest trial, or the baseline if none has been timed."""
        ranked = self.ranked()
        return ranked[0] if ranked else self.baseline

    def finalists(self) -> list[LiveTrial]:
        """Candidates of the final race, fastest first, without the baseline."""
        ranked = [t for t in self.ranked() if t.worker.alive and t is not self.baseline]
        if not ranked:
            return []
        fastest = self._score(ranked[0])
        return [t for t in ranked[:KEEP] if self._score(t) <= NEAR * fastest]

    def known(self, candidate: Candidate) -> bool:
        """Whether the candidate already has a trial."""
        return any(t.candidate == candidate for t in self.trials)

    def _score(self, trial: LiveTrial) -> float:
        if self._options.objective != "p99":
            return trial.screened_ns
        return trial.measured(self._options.metric).p90_ns
