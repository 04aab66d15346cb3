"""The trials of a search: which can still be timed, which lead, and which may be chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random

import msgspec

from steadytorch.errors import UsageError
from steadytorch.process.worker import Fault, WorkerFault, wait_any
from steadytorch.results.candidate import Candidate, describe
from steadytorch.transforms.precision import ALLOWED
from steadytorch.tune.budget import (
    KEEP,
    NEAR,
    SCREEN_BLOCKS,
    Budget,
    compiler_options,
)
from steadytorch.tune.select import SearchOptions, block_deadline_s, block_statistic
from steadytorch.tune.setup_scheduler import ProgressListener
from steadytorch.tune.trial import LiveTrial

FEWEST_BLOCKS = 3
"""Blocks after which a candidate may be dropped. If two candidates are equally fast, all three
blocks of the first are slower than those of the second with probability 1/20; by the factor `NEAR`,
far less often."""


class CandidatePool:
    """All trials of one search. Only one trial is timed at a time on each device.

    Blocks of candidates are interleaved with blocks of the untouched workload on the same device.
    To rank candidates across devices, their times are scaled by the untouched workload's time on
    the first device over that on their own device. The reported speedup does not depend on the
    ranking across devices: it is measured on the leader's device.

    Args:
        options: the user's options.
        budget: sets the block shape and receives the fastest iteration time.
        watcher: receives progress.
        rng: decides the order of blocks.
        leave_out: called with a further device, the reason and its live trials when its untouched
            workload fails.
        beside: entered while anything is timed.

    Attributes:
        trials: in order of set-up, the baseline first.
        further: the untouched workload of each further device, by device.
    """

    def __init__(
        self,
        options: SearchOptions,
        budget: Budget,
        watcher: ProgressListener,
        rng: Random,
        leave_out: Callable[[str, str, list[LiveTrial]], None] = lambda device, why, lost: None,
        beside: AbstractContextManager[None] = nullcontext(),  # noqa: B008
    ) -> None:
        self._options, self._budget, self._watcher, self._rng = options, budget, watcher, rng
        self._leave_out, self._beside = leave_out, beside
        self._rngs: dict[str, Random] = {}
        self.trials: list[LiveTrial] = []
        self.further: dict[str, LiveTrial] = {}

    @property
    def baseline(self) -> LiveTrial:
        """The untouched workload."""
        return self.trials[0]

    def join(self, fresh: list[LiveTrial]) -> None:
        """Adds trials; a retry replaces the earlier trial of the same candidate."""
        again = {trial.candidate for trial in fresh}
        self.trials = [t for t in self.trials if t.candidate not in again] + fresh

    def screen(self, fresh: list[LiveTrial], blocks: int = SCREEN_BLOCKS) -> None:
        """Times interleaved blocks of new trials, leaders and baseline, and closes losing trials.

        All devices are timed in parallel, each with its own trials and untouched workload. A
        device's screening ends early once each new trial is clearly slower than a known one.
        """
        with self._beside:
            self._take_blocks(
                {device: self._blocks_on(device, fresh, blocks) for device in self._devices()}
            )
        self._budget.fastest_ns = self.screened_ns(self.leader())
        self._budget.finalists = len(self.finalists())
        for trial in (trial for trial in fresh if trial in self.trials):
            if trial.ok:
                self._watcher.timed(describe(trial.candidate), self.screened_ns(trial))
            else:
                self._watcher.trial(describe(trial.candidate), trial.status, trial.reason or "")
        keep = {id(t) for t in [self.baseline, *self.finalists()]}
        for trial in self.alive():
            if id(trial) not in keep:
                trial.worker.close()

    def _devices(self) -> list[str]:
        return [self.baseline.device, *self.further]

    def _blocks_on(
        self, device: str, fresh: Sequence[LiveTrial], blocks: int
    ) -> Iterator[LiveTrial]:
        """The trials of a device in the order in which their blocks are timed."""
        arms = [trial for trial in self.alive() if trial.device == device]
        rng = self._rng
        if device in self.further:
            if not arms:
                return
            arms.insert(0, self.further[device])
            seed = f"{self._options.seed} {device}"
            rng = self._rngs.setdefault(device, Random(seed))
        new = [trial for trial in arms if trial in fresh]
        known = [trial for trial in arms if trial not in fresh]
        for taken in range(blocks):
            if taken >= FEWEST_BLOCKS and self._are_out(new, known, taken):
                return
            # Timing a worker that died meanwhile finds out why it died.
            yield from (trial for trial in rng.sample(arms, len(arms)) if trial.status == "ok")

    def _are_out(self, new: list[LiveTrial], known: list[LiveTrial], taken: int) -> bool:
        """Whether each new trial's fastest block exceeds a known trial's slowest by factor `NEAR`.

        False if the objective is the 99th percentile, because only one sample of each block then
        counts.
        """
        if self._options.of_tail:
            return False

        def latest(trial: LiveTrial) -> list[float]:
            return [block_statistic(self._options, times) for times in trial.blocks[-taken:]]

        least_ns = min((max(latest(trial)) for trial in known if trial.ok), default=math.inf)
        return all(min(latest(trial)) > NEAR * least_ns for trial in new if trial.ok)

    def _take_blocks(self, orders: dict[str, Iterator[LiveTrial]]) -> None:
        """Times one block after another on each device, with all devices in parallel."""
        deadline_s = block_deadline_s(self._budget.shape)
        running: dict[str, LiveTrial] = {}
        while True:
            for device in [device for device in orders if device not in running]:
                if (trial := next(orders[device], None)) is not None:
                    trial.begin_block(self._options.metric, self._budget.shape.count)
                    running[device] = trial
            if not running:
                return
            if len(running) > 1:
                wait_any([trial.worker for trial in running.values()], 0.25)
            for device, trial in list(running.items()):
                done = trial.worker.ready() or trial.worker.overdue(deadline_s)
                if not (done or len(running) == 1):
                    continue
                del running[device]
                if not self._finished(trial, deadline_s):
                    del orders[device]
            if not running:
                self._watcher.tick()

    def _finished(self, trial: LiveTrial, deadline_s: float) -> bool:
        """Collects the samples of a timed block; False if the device can no longer be used.

        Raises:
            UsageError: the untouched workload's worker died.
        """
        try:
            trial.finish_block(deadline_s)
        except WorkerFault as fault:
            if trial is self.baseline:
                raise self._baseline_died(fault) from fault
            if trial is self.further.get(trial.device):
                self._lose(trial.device, f"the untouched workload failed: {fault.reason}")
                return False
        return True

    def _lose(self, device: str, why: str) -> None:
        """Drops a failed device; its live trials are set up again on other devices."""
        del self.further[device]
        for trial in (lost := [t for t in self.alive() if t.device == device]):
            trial.worker.kill()
        self.trials = [trial for trial in self.trials if trial not in lost]
        self._leave_out(device, why, lost)

    def screened_ns(self, trial: LiveTrial) -> float:
        """Median of a trial's block medians in ns, scaled to the first device; inf if untimed."""
        return trial.screened_ns * self._scale(trial)

    def _scale(self, trial: LiveTrial) -> float:
        untouched = self.further.get(trial.device)
        if untouched is None or not untouched.blocks:
            return 1.0
        return self.baseline.screened_ns / untouched.screened_ns

    def move_to_leader(self) -> None:
        """Makes the untouched workload on the leader's device the baseline."""
        device, before = self.leader().device, self.baseline
        if device in self.further:
            self.trials[0] = self.further.pop(device)
            self.further[before.device] = before

    def screening_s(self, fresh: Sequence[LiveTrial], blocks: int = SCREEN_BLOCKS) -> float:
        """Seconds to screen new trials beside the trials still alive; 0 without new ones.

        Those not yet set up are expected to be as fast as the leader.
        """
        # Warm-up times taken beside compilers may be many times too long.
        most_ns = self._budget.shape.iteration_ns
        leader_ns = self._budget.fastest_ns or most_ns
        needed_s = [0.0]  # by device, as devices are timed at the same time
        for device in self._devices():
            known = [trial.screened_ns for trial in self.alive() if trial.device == device]
            known += [most_ns] if device in self.further else []
            new = [
                min(trial.set_up.warm_up.iteration_ns if trial.set_up else leader_ns, most_ns)
                for trial in fresh
                if trial.device == device
            ]
            needed_s.append(self._budget.screening_s([*known, *new], blocks) if new else 0.0)
        return max(needed_s)

    def timed_block(self, trial: LiveTrial, count: int | None = None) -> float:
        """Times one more block of iterations; returns its median in ns, or its maximum for a tail.

        Raises:
            WorkerFault: the candidate's worker died, now or earlier; the trial is rejected.
            UsageError: the untouched workload's worker died.
        """
        if trial.status != "ok":
            raise WorkerFault(Fault.EXIT, trial.reason or "")
        count = count or self._budget.shape.count
        deadline_s = block_deadline_s(msgspec.structs.replace(self._budget.shape, count=count))
        try:
            with self._beside:
                times = trial.block(self._options.metric, count, deadline_s)
        except WorkerFault as fault:
            if trial is self.baseline:
                raise self._baseline_died(fault) from fault
            raise
        self._watcher.tick()
        return block_statistic(self._options, times)

    def _baseline_died(self, fault: WorkerFault) -> UsageError:
        return UsageError(f"the untouched workload failed during timing: {fault.reason}")

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
        """Whether the user allows the precision class of a trial."""
        return trial.precision in ALLOWED[self._options.precision]

    def ranked(self) -> list[LiveTrial]:
        """Timed trials that may be chosen, fastest first."""
        timed = [t for t in self.trials if t.blocks and t.status == "ok" and self.allowed(t)]
        return sorted(timed, key=self._score)

    def leader(self) -> LiveTrial:
        """The fastest trial, or the baseline if none has been timed."""
        ranked = self.ranked()
        return ranked[0] if ranked else self.baseline

    def near_leader(self) -> list[LiveTrial]:
        """Timed trials within `NEAR` of the fastest, fastest first; they may have been closed."""
        return self._near(self.ranked())

    def _near(self, ranked: list[LiveTrial]) -> list[LiveTrial]:
        return [t for t in ranked if self._score(t) <= NEAR * self._score(ranked[0])]

    def finalists(self) -> list[LiveTrial]:
        """Candidates of the final race, fastest first, without the baseline."""
        ranked = [t for t in self.ranked() if t.worker.alive and t is not self.baseline]
        return self._near(ranked)[:KEEP]

    def racing(self) -> list[LiveTrial]:
        """Finalists on the device of the baseline, and the baseline itself unless far behind."""
        finalists = [t for t in self.finalists() if t.device == self.baseline.device]
        far = finalists and self._score(self.baseline) > NEAR * self._score(finalists[0])
        return finalists if far else [*finalists, self.baseline]

    def setup_s(self, trial: LiveTrial) -> float | None:
        """Set-up seconds with a cold compiler cache: the longest for the same compiler options."""
        if trial.set_up is None:
            return None
        options = compiler_options(trial.candidate)
        same = [t.set_up for t in self.trials if compiler_options(t.candidate) == options]
        alike = [each.setup_s for each in same if each] if options else []
        return max(alike, default=trial.set_up.setup_s)

    def known(self, candidate: Candidate) -> bool:
        """Whether the candidate already has a trial."""
        return any(t.candidate == candidate for t in self.trials)

    def _score(self, trial: LiveTrial) -> float:
        if not self._options.of_tail:
            return self.screened_ns(trial)
        return trial.measured(self._options.metric).p90_ns * self._scale(trial)
