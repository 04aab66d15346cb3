"""The search: baseline, candidates as they become ready, a final race, and a fresh confirmation.

Compilations take longest and usually win, so they begin first, beside the untouched workload.
Set-ups overlap, but while one worker is timed, all other workers are paused. As an exception, cuDNN
engines are measured while set-ups run; the chosen engines are then timed like any other candidate.
The reported speedup comes from pairs of blocks timed after the winner was chosen.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

import msgspec
import numpy as np

from steadytorch import transforms
from steadytorch.errors import UsageError
from steadytorch.findings.finding import Finding
from steadytorch.measure.measurement import Measurement
from steadytorch.measure.race import LOOKS, TIE, compare, race
from steadytorch.plan.record import CompilerChoices, Speedup, Trial
from steadytorch.process.neighbour import Neighbour
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import Candidate, TransformSpec, describe
from steadytorch.transforms import compiles
from steadytorch.tune.budget import SCREEN_BLOCKS, Budget
from steadytorch.tune.candidate_pool import FEWEST_BLOCKS, CandidatePool
from steadytorch.tune.candidates import (
    CandidateSource,
    engine_prefix,
    unpadded,
)
from steadytorch.tune.prospects import ENOUGH, HORIZON_S, LEAST, Prospects
from steadytorch.tune.result import (
    TuneResult,
    break_even_calls,
    reference_text,
    speedup_of,
    untouched_speedup,
)
from steadytorch.tune.select import CLAIM, CONTENDED, SearchOptions, block_shape, choose
from steadytorch.tune.setup_scheduler import ProgressListener, SetupScheduler
from steadytorch.tune.trial import LiveTrial
from steadytorch.tune.tuning_worker import UNCLASSIFIED
from steadytorch.verification.verdict import UNREPEATABLE
from steadytorch.workload.workload import Workload

ENGINES = "cudnn_engines"
ENGINES_S = 40.0
ENGINES_SHARE = 0.3
"""Limits for choosing engines: in seconds, and as a share of the exploration time."""
GUESSED_SHORT = 2.0
"""A compilation may take this multiple of the first guess at it (see `budget`)."""
UNKNOWN = "unclassified"
"""The regime before the untouched workload was measured."""
EXHAUSTED, STOPPED = "budget exhausted", "no gain expected"
RACE_LOSS = TIE / 2
"""Expected loss from choosing the leader at which the final race ends. Two candidates 0.7 % apart
took 60 rounds otherwise, a minute of two noisy cores."""
P99_SAMPLES = 1500
INTERVAL_SAMPLES = 150
OBJECTIVE_S, TAIL_S, INTERVAL_S = 20.0, 5.0, 10.0
"""Most seconds for further samples after the decision. The first is for a 99th percentile that is
the objective, the second for any other, the third for an interval."""


def compiling(slots: int, on_cpu: bool) -> int:
    """Number of candidates that may compile at once, given how many set-ups may overlap.

    For a GPU, compiling mostly runs Python on one core. On 16 cores, four candidates took as long
    at once as one alone: 39 to 43 s for Swin-T, 20 to 22 s for ConvNeXt-T, 19 to 24 s for BERT.
    """
    return max(1, slots // 2 if on_cpu else slots * 3 // 4)


def _layers(workload: Workload) -> int:
    """Number of the model's leaf modules; 0 for a plain callable."""
    modules = [] if workload.module is None else list(workload.module.modules())
    return sum(not module._modules for module in modules)


Chooser = Callable[[Candidate, float], str]
_Final = tuple[Measurement, Measurement, LiveTrial, Speedup]
"""Untouched workload and winner on fresh blocks, the winner, and its speedup."""


class Search:
    """One search over candidates for one workload.

    Args:
        workload: the workload to tune; never run here.
        scheduler: starts and verifies candidates.
        available: all transform variants that apply.
        not_applicable: reason why a variant does not apply, by name.
        options: the user's options.
        watcher: receives progress.
        slots: how many set-ups may overlap.
        choose_engines: maps prefix transforms and seconds to the parameter of `cudnn_engines`;
            called only if that transform applies.
        pads: whether the compiler has padded matrix products of a candidate.
        now: returns seconds on a monotonic clock.
        began: start of the budget on that clock; None for now.
    """

    def __init__(
        self,
        workload: Workload,
        scheduler: SetupScheduler,
        *,
        available: Sequence[TransformSpec],
        not_applicable: dict[str, str],
        options: SearchOptions,
        watcher: ProgressListener,
        slots: int,
        choose_engines: Chooser | None = None,
        pads: Callable[[], bool] = bool,
        now: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self._workload, self._scheduler = workload, scheduler
        self._available, self._not_applicable = tuple(available), not_applicable
        self._options, self._watcher, self._slots = options, watcher, slots
        self._choose_engines = choose_engines
        self._pads, self._compiling = pads, compiling(slots, scheduler.shares_cores)
        self._budget = Budget(options.budget_s, now, _layers(workload), began)
        self._prospects, self._ended, self._beyond = Prospects(), "", ""
        self._rng = Random(options.seed)
        self._neighbour = Neighbour(options.objective == CONTENDED)
        self._pool = CandidatePool(
            options,
            self._budget,
            watcher,
            self._rng,
            self._scheduler.leave_out,
            beside=self._neighbour,
        )
        self._not_tried: dict[str, str] = {}
        self._final: _Final | None = None
        self._compiler = CompilerChoices()
        self._early: list[Candidate] = []
        self._lowered: Candidate = ()

    def run(self) -> TuneResult:
        """Searches until no candidate is left, no gain is expected or the budget is exhausted.

        Raises:
            UsageError: the untouched workload fails, or the budget is too small to measure it.
        """
        interrupted = False
        try:
            self._begin_compiling()
            self._measure_baseline()
            assert self._scheduler.reference is not None
            if self._scheduler.reference.repeatable:
                self._explore()
            else:
                self._give_up()
            self._decide()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._scheduler.kill_all()
            self._neighbour.close()
        return self._result(interrupted)

    # -- phases ---------------------------------------------------------------------------------

    def _begin_compiling(self) -> None:
        """Begins compiling the candidates that usually win, before the baseline is measured."""
        source = self._source()
        slow = self._affordable(filter(compiles, source.seeds()))
        early = slow[: max(1, self._compiling * 2 // 3)]  # the others wait for engines
        if self._slots >= 4 and not self._scheduler.shares_cores:  # the first to be ready
            early += itertools.islice((c for c in source.seeds() if not compiles(c)), 1)
        self._lowered = source.lowered()
        if self._lowered and self._lowered not in early:
            early.append(self._lowered)
        if not self._scheduler.shares_cores:  # else they hold up others, which may be far ahead
            self._early = early
        if early:
            deadline_s = self._budget.deadline_s(early, [])
            self._scheduler.begin(early, self._slots, deadline_s)

    def _measure_baseline(self) -> None:
        self._watcher.phase("measuring the untouched workload")
        try:
            baseline = self._scheduler.baseline(self._budget.remaining)
            with self._scheduler.paused(), self._neighbour:
                quiet = baseline.quiet(self._options.metric, max(1.0, self._budget.remaining()))
        except WorkerFault as fault:
            raise self._workload_fails(fault) from fault
        self._pool.trials.append(baseline)
        self._pool.further = {trial.device: trial for trial in self._scheduler.further}
        self._budget.shape = block_shape(self._options, float(np.median(quiet)))
        self._budget.require_confirmation()
        self._prospects.note((), baseline.screened_ns)

    def _give_up(self) -> None:
        seconds = self._budget.spent()
        self._ended = f"stopped after {seconds:.0f} s: outputs change, so nothing can be verified"
        self._watcher.phase(self._ended)
        self._scheduler.give_up(UNREPEATABLE)

    def _explore(self) -> None:
        character, findings = self._scheduler.character, self._scheduler.findings
        assert character is not None
        self._settle_precision()
        if not self._workload.is_training:
            self._available = self._with_engines()
        source = self._source(character.regime, findings)
        named = dict.fromkeys([character.regime, *(finding.id for finding in findings)])
        named.pop(UNCLASSIFIED, None)
        why = f"{', '.join(named)}: " if named else ""
        self._watcher.phase(f"{why}trying known strong combinations")
        self._pursue(source, owed=self._early)
        if self._workload.is_training and self._may_gain_by_engines():
            self._available = self._with_engines()
            source = self._source(character.regime, findings)
            self._pursue(source)
        owed = self._begin(source.beyond(self._pool.leader().candidate))
        if owed:
            self._watcher.phase("trying other precisions for comparison")
            self._pursue(source, owed)
        left = [*source.seeds(), *self._variations(source), *source.late()]
        left = [candidate for candidate in dict.fromkeys(left) if not self._pool.known(candidate)]
        for candidate, gain in zip(left, self._prospects.expected_gains(left), strict=True):
            hopeless = self._ended or gain < LEAST
            self._not_tried[describe(candidate)] = STOPPED if hopeless else EXHAUSTED

    def _proposed(self, source: CandidateSource) -> list[Candidate]:
        """Candidates to try: retries, strong ones, variations of the two fastest, and weak ones.

        While the first compilations run, a leader that is not compiled will soon be replaced, and
        screening its variations would hold the compilers up. Spare cores then compile variations of
        the first candidate that is being compiled.
        """
        smaller = self._without_one_part(source)
        strong = [*self._scheduler.retry, *source.seeds(), *smaller, *self._unpadded()]
        begun = self._scheduler.begun
        untried = [candidate for candidate in strong if not self._pool.known(candidate)]
        settled = compiles(self._pool.leader().candidate) or self._engine_leads()
        if settled or not any(map(compiles, [*begun, *untried])):
            return [*strong, *self._variations(source), *source.late()]
        if self._scheduler.shares_cores:
            return strong
        first = self._compiled_under_way()[:1]
        return [*strong, *(c for each in first for c in source.neighbours(each) if compiles(c))]

    def _without_one_part(self, source: CandidateSource) -> list[Candidate]:
        """Compiled training steps that were rejected, without one transform each.

        That transform may be at fault, and all known compiled combinations for training share most
        of theirs; those for inference differ enough. Empty once compiled code was timed. Timeouts
        are no reason: less would take as long.
        """
        if self._has_timed_compiled() or not self._workload.is_training:
            return []
        seeds = set(filter(compiles, source.seeds()))
        at_fault = [
            trial.candidate
            for trial in self._pool.trials
            if trial.status in ("rejected", "failed")
            and trial.fault is not Fault.DEADLINE
            and trial.candidate in seeds
        ]
        smaller = (c for each in at_fault for c in source.neighbours(each) if len(c) < len(each))
        return [candidate for candidate in smaller if compiles(candidate)]

    def _may_gain_by_engines(self) -> bool:
        """Whether cuDNN engines apply and are worth choosing for a training step.

        False if compiled code leads; the reason then goes to `not_tried`. In recorded searches for
        five training steps on two GPUs, compiled code took 1.00 to 3.7 times as long with engines
        as without.
        """
        if self._choose_engines is None:
            return False
        if compiles(self._pool.leader().candidate):
            self._not_tried[ENGINES] = "compiled code leads, and engines gain nothing beside it"
            return False
        return True

    def _settle_precision(self) -> None:
        """Tries precision-lowering transforms alone, and drops those too inaccurate for the model.

        Every candidate with a dropped transform would fail too: half precision overflows or
        underflows in some models.
        """
        while lowered := self._source().lowered():
            self._lowered = lowered
            self._begin([lowered])
            trial = self._scheduler.finished(lowered)
            if trial is None or not trial.inexact:
                return
            label = describe(lowered)
            why = f"{label} alone is rejected: {trial.reason}"
            self._watcher.phase(f"leaving {label} out: {trial.reason}")
            self._scheduler.give_up(why, lowered[0])
            self._available = tuple(spec for spec in self._available if spec != lowered[0])
            self._not_applicable[f"combinations with {label}"] = why

    def _source(self, regime: str = UNKNOWN, findings: Sequence[Finding] = ()) -> CandidateSource:
        # Without choices, the transform stands for itself: its engines are chosen later.
        known = [
            spec
            for spec in self._available
            if spec.name != ENGINES or dict(spec.parameters).get("choices")
        ]
        precision = self._options.precision
        return CandidateSource(known, self._workload, precision, regime, findings)

    def _begin(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Begins the set-up of candidates that fit into the time left, and returns those."""
        taken = self._affordable(candidates)
        deadline_s = self._budget.deadline_s(taken, self._pool.trials)
        self._scheduler.begin(taken, self._slots, deadline_s)
        return taken

    def _pursue(self, source: CandidateSource, owed: Sequence[Candidate] = ()) -> None:
        """Sets candidates up and screens them as they become ready, as long as that pays.

        Ends when no candidate is left or those left cannot be expected to gain `ENOUGH`.

        Args:
            source: proposes candidates.
            owed: candidates begun before, which are timed in any case.
        """
        while True:
            proposed = self._by_promise(self._proposed(source))
            hopeless = self._is_hopeless(proposed, owed)
            if hopeless and not set(owed).intersection(self._scheduler.begun):
                self._watcher.phase(self._ended)
                self._scheduler.give_up(STOPPED)
                self._round([])
                return
            taken = [] if hopeless else self._affordable(proposed)
            if not (taken or self._scheduler.begun):
                return
            self._round(taken)

    def _by_promise(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Sorts candidates by expected gain per second of set-up; ties keep their order.

        Once compiled code was timed or an engine leads, candidates with too little expected gain
        are left out.
        """
        again = self._scheduler.retry
        left = [c for c in dict.fromkeys(candidates) if c in again or not self._pool.known(c)]
        seconds = [self._budget.expected_setup_s(c, self._pool.trials) for c in left]
        gains = self._prospects.expected_gains(left)
        order = np.argsort(-(gains / np.maximum(seconds, 1.0)).round(5), kind="stable")
        least = LEAST if self._has_timed_compiled() or self._engine_leads() else 0.0
        return [left[place] for place in order if gains[place] >= least or left[place] in again]

    def _is_hopeless(self, proposed: Sequence[Candidate], owed: Sequence[Candidate]) -> bool:
        """Whether the candidates left, apart from `owed`, are expected to gain less than `ENOUGH`.

        False if a compiled candidate is still to come, none was timed and no engine leads. Stores
        the reason for stopping in `_ended`; empty if False.
        """
        within_s = min(HORIZON_S, self._budget.left_to_explore())
        each_s = {
            c: self._budget.expected_setup_s(c, self._pool.trials)
            for c in [*self._scheduler.begun, *proposed]
            if not (self._pool.known(c) or c in owed)
        }
        # Those under way may outlast the horizon: they were worth it when they began.
        unfinished = (t.candidate for t in self._scheduler.unfinished)
        each_s.update({c: 0.0 for c in unfinished if c not in owed})
        fitting = [c for c, seconds in each_s.items() if seconds < within_s]
        mean_s = max(np.mean([each_s[c] for c in fitting] or [1]), 1.0)
        at_once = 1 if self._scheduler.shares_cores else self._slots
        fitting = fitting[: int(at_once * within_s / mean_s)]
        gain = self._prospects.expected_gain(fitting)
        settled = self._has_timed_compiled() or self._engine_leads()
        awaited = not settled and any(map(compiles, fitting))
        if not fitting or gain >= ENOUGH or awaited or self._scheduler.owes:
            self._ended = ""
            return False
        self._ended = (
            f"stopped after {self._budget.spent():.0f} s: the next {within_s:.0f} s were expected "
            f"to gain {gain:.1%}"
        )
        return True

    def _with_engines(self) -> tuple[TransformSpec, ...]:
        """The available transforms, with a cuDNN engine chosen for each convolution."""
        choose = self._choose_engines
        others = tuple(spec for spec in self._available if spec.name != ENGINES)
        if choose is None or others == self._available:
            return others
        precision, training = self._options.precision, self._workload.is_training
        prefix = engine_prefix(self._available, precision, training)
        left_s = self._budget.left_to_explore()
        seconds = min(ENGINES_S, ENGINES_SHARE * left_s)
        if left_s - seconds < self._budget.expected_setup_s(prefix, self._pool.trials):
            self._not_applicable[ENGINES] = f"{EXHAUSTED} before engines could be tried"
            return others
        self._watcher.phase("choosing a cuDNN engine for each convolution")
        try:
            chosen = TransformSpec(ENGINES, (("choices", choose(prefix, seconds)),))
        except WorkerFault as fault:
            self._not_applicable[ENGINES] = f"no engine could be chosen: {fault.reason}"
            return others
        return (*others, chosen)

    def _unpadded(self) -> list[Candidate]:
        """The fastest compiled candidate without padding, if the compiler padded a matrix product.

        Until one was timed, takes the first that is being compiled.
        """
        timed = [trial.candidate for trial in self._pool.ranked() if compiles(trial.candidate)]
        fastest = [*timed, *self._compiled_under_way()][:1]
        return list(map(unpadded, fastest)) if self._pads() else []

    def _compiled_under_way(self) -> list[Candidate]:
        under_way = (trial.candidate for trial in self._scheduler.unfinished)
        return [candidate for candidate in under_way if compiles(candidate)]

    def _decide(self) -> None:
        """Confirms the winner on fresh pairs; if its worker dies, races the remaining finalists."""
        while (chosen := self._raced()) is not self._pool.baseline:
            if (confirmed := self._confirmed(chosen)) is not None:
                self._final = confirmed
                if confirmed[2] is chosen:
                    self._keep_choices(chosen)
                return
        mark = len(chosen.blocks)
        self._watcher.phase("timing the untouched workload")
        for _ in range(LOOKS[0]):
            self._pool.arm(chosen)()
        alone = chosen.measured(self._options.metric, mark)
        self._final = (alone, alone, chosen, untouched_speedup(LOOKS[0]))

    def _keep_choices(self, chosen: LiveTrial) -> None:
        try:
            self._compiler = chosen.compiler_choices()
        except WorkerFault as fault:
            self._watcher.phase(f"replays tune their kernels anew: {fault.reason}")

    def _raced(self) -> LiveTrial:
        """The winner of a race of the finalists and, if nearly as fast, the untouched workload.

        Only finalists on the leader's device race, since times of different devices differ.
        """
        self._pool.move_to_leader()
        arms = self._pool.racing()
        finalists = [trial for trial in arms if trial is not self._pool.baseline]
        if len(finalists) <= 1:
            return arms[0]
        beside = "" if finalists == arms else " and the untouched workload"
        self._watcher.phase(f"final race of {len(finalists)} candidates{beside}")
        reserve_s = min(self._budget.confirmation_s(), CLAIM * self._options.budget_s)
        result = race(
            [self._pool.arm(trial) for trial in arms],
            rng=self._rng,
            loss=RACE_LOSS,
            stop=lambda: self._budget.remaining() < reserve_s,
        )
        if not result.times[0]:  # no time for a single round: the leader of the screening
            return arms[0]
        peaks = [trial.set_up.peak_memory_bytes if trial.set_up else 0 for trial in arms]
        return arms[choose(result, [trial.candidate for trial in arms], peaks)]

    def _confirmed(self, chosen: LiveTrial) -> _Final | None:
        """Times fresh pairs of baseline and winner; keeps the baseline unless the winner is faster.

        Returns:
            The decision; None if the winner died, which rejects it.
        """
        self._watcher.phase(f"confirming {describe(chosen.candidate)} on fresh pairs")
        marks = {id(t): len(t.blocks) for t in (self._pool.baseline, chosen)}
        try:
            judgement, _ = compare(
                lambda: self._pool.timed_block(self._pool.baseline),
                lambda: self._pool.timed_block(chosen),
                rng=self._rng,
                stop=self._stops_confirming,
                looks=self._budget.looks(),
            )
            self._top_up(chosen, marks)
        except WorkerFault:
            return None
        faster = judgement.verdict == "faster"
        winner = chosen if faster else self._pool.baseline
        if not faster:
            chosen.status = "ok"
            chosen.reason = f"not shown to be faster on fresh pairs ({judgement.verdict})"
        return (
            self._measured(self._pool.baseline, marks),
            self._measured(winner, marks),
            winner,
            speedup_of(judgement) if faster else untouched_speedup(judgement.pairs),
        )

    def _top_up(self, chosen: LiveTrial, marks: dict[int, int]) -> None:
        """Takes more samples for a 99th percentile, or at least an interval, if that is cheap.

        If the untouched workload is too slow for a 99th percentile, only the winner gets one.
        """
        both = (self._pool.baseline, chosen)
        tail_s = OBJECTIVE_S if self._options.of_tail else TAIL_S
        taken = len(chosen.measured(self._options.metric, marks[id(chosen)]).samples_ns)
        for target, trials, most_s in (
            (P99_SAMPLES, both, tail_s),
            (P99_SAMPLES, (chosen,), tail_s),
            (INTERVAL_SAMPLES, both, INTERVAL_S),
        ):
            missing = target - taken
            cost_s = missing * 1.5e-9 * sum(trial.screened_ns for trial in trials)
            if missing <= 0 or cost_s > min(most_s, max(self._budget.remaining(), 0.0)):
                continue
            size = min(missing, 50)
            for _ in range(-(-missing // size)):
                for trial in self._rng.sample(trials, len(trials)):
                    self._pool.timed_block(trial, size)
            return

    # -- a round --------------------------------------------------------------------------------

    def _round(self, candidates: Sequence[Candidate]) -> None:
        """Begins set-ups, waits until some candidates are ready, and screens the ready ones."""
        deadline_s = self._budget.deadline_s(candidates, self._pool.trials)
        others = len(self._pool.alive()) + len(self._pool.further)
        fresh = self._scheduler.prepare(candidates, self._slots, deadline_s, others, self._is_due)
        self._screen(fresh)

    def _screen(self, fresh: list[LiveTrial]) -> None:
        verified, blocks = self._timely([trial for trial in fresh if trial.ok])
        self._pool.join(fresh)
        if not verified:
            return
        with self._scheduler.paused():
            self._pool.screen(verified, blocks)
        for trial in [self._pool.baseline, *verified]:
            # Losers teach as much as leaders, although their workers are closed by now.
            if trial.status == "ok" and trial.blocks and self._pool.allowed(trial):
                self._prospects.note(trial.candidate, self._pool.screened_ns(trial))

    def _timely(self, verified: list[LiveTrial]) -> tuple[list[LiveTrial], int]:
        """The trials that can be screened before the time to confirm one, and blocks of each.

        Takes fewer blocks if the time is short, and then rejects the least promising trials, but
        one.
        """
        budget, pool = self._budget, self._pool
        left_s = budget.remaining() + budget.may_add_s() - budget.confirmation_s()
        if pool.screening_s(verified) < left_s:
            return verified, SCREEN_BLOCKS
        gains = self._prospects.expected_gains([trial.candidate for trial in verified])
        taken: list[LiveTrial] = []
        for place in np.argsort(-gains, kind="stable"):
            trial = verified[place]
            if not taken or pool.screening_s([*taken, trial], FEWEST_BLOCKS) < left_s:
                taken.append(trial)
            else:
                trial.skip(f"screening: {EXHAUSTED}")
                self._watcher.trial(describe(trial.candidate), trial.status, trial.reason or "")
        return taken, FEWEST_BLOCKS

    def _is_due(self) -> bool:
        """Whether to stop waiting for set-ups, because candidates are ready or the time is up.

        Screening pauses all set-ups, so screening waits for set-ups that would end within the time
        it takes.
        """
        needed_s = self._pool.screening_s(self._scheduler.ready)
        soonest_s = self._soonest_s(self._scheduler.unfinished)
        if self._budget.left_to_explore() < needed_s:
            if self._waits_longer():
                return False
            self._scheduler.give_up(EXHAUSTED)
            return True
        # The candidate that only tests the lower precision is not worth a screening of its own.
        worth = any(trial.candidate != self._lowered for trial in self._scheduler.ready)
        return worth and soonest_s > needed_s

    def _soonest_s(self, trials: Sequence[LiveTrial]) -> float:
        """Expected seconds until one of these trials is ready; inf without trials."""
        return min((self._left_s(trial) for trial in trials), default=math.inf)

    def _left_s(self, trial: LiveTrial) -> float:
        if trial.set_up is not None:
            return 0.0
        expected_s = self._budget.expected_setup_s(trial.candidate, self._pool.trials)
        return self._budget.left_to_set_up_s(expected_s, self._scheduler.elapsed_s(trial))

    def _waits_longer(self) -> bool:
        """Whether to wait for the first compiled candidate, at the expense of a final race.

        Grants overtime if the candidate is about to be ready.
        """
        rivals = [t for t in self._scheduler.unfinished if compiles(t.candidate)]
        if not rivals or self._has_timed_compiled():
            return False
        soonest = min(rivals, key=self._left_s)
        needed_s = self._pool.screening_s([*self._scheduler.ready, soonest], FEWEST_BLOCKS)
        left_s = self._budget.left_without_race() - needed_s
        if left_s > 0.0:  # nothing else could use this time
            return True
        if self._left_s(soonest) - left_s > self._budget.may_add_s():
            return False
        label = describe(soonest.candidate)
        self._go_beyond("waiting for a compiled candidate", f"{label} is about to be ready")
        return True

    def _engine_leads(self) -> bool:
        return bool(transforms.engines(self._pool.leader().candidate))

    def _has_timed_compiled(self) -> bool:
        return any(compiles(trial.candidate) for trial in self._pool.ranked())

    def _go_beyond(self, doing: str, why: str) -> None:
        """Grants the search all overtime that is left."""
        more_s = self._budget.may_add_s()
        self._budget.overtime_s += more_s
        self._beyond = doing
        self._watcher.phase(f"up to {more_s:.0f} s beyond the budget: {why}")

    def _stops_confirming(self) -> bool:
        """Grants overtime to a confirmation that needs it; always False, since looks are fixed."""
        if self._budget.remaining() < 0 < self._budget.may_add_s():
            self._go_beyond("confirming the plan", "whether it is faster is not decided yet")
        return False

    def _variations(self, source: CandidateSource) -> list[Candidate]:
        near = self._pool.near_leader()[:2]
        return [c for trial in near for c in source.neighbours(trial.candidate)]

    def _affordable(self, batch: Iterable[Candidate]) -> list[Candidate]:
        """The first untried candidates, one per slot, whose set-up fits into the time left.

        On a CPU, set-ups run one after another, so their expected times add up. Time is also
        reserved for compilations under way, because they pause during other set-ups.
        """
        left_s, retry = self._budget.left_to_explore(), self._scheduler.retry
        if left_s < 0.0:  # overtime is for what is under way
            return []
        begun, taken = self._scheduler.begun, []
        room = self._compiling - sum(map(compiles, begun))
        # Until a compiled candidate or an engine was timed, one is worth a risk. More compilations
        # slow the first down, so they must fit even if the guess at their set-up is too short.
        engines = any(transforms.engines(trial.candidate) for trial in self._pool.ranked())
        bold = not (engines or self._has_timed_compiled())
        longest_s = compiled_s = left_s + (self._budget.may_add_s() if bold else 0.0)
        if bold and any(map(compiles, begun)):
            compiled_s = left_s / GUESSED_SHORT
        in_turn = self._scheduler.shares_cores
        if in_turn:
            left_s -= self._kept_s(left_s)
        for candidate in dict.fromkeys(batch):
            known = candidate in begun or self._pool.known(candidate)
            if (known and candidate not in retry) or (compiles(candidate) and not room):
                continue
            expected_s = self._budget.expected_setup_s(candidate, self._pool.trials)
            most_s = longest_s if transforms.engines(candidate) else left_s
            if expected_s < (compiled_s if compiles(candidate) else most_s):
                taken.append(candidate)
                room -= compiles(candidate)
                if in_turn:
                    left_s -= expected_s
        return taken[: self._slots]

    def _kept_s(self, left_s: float) -> float:
        """Seconds to reserve for compilations under way; 0 if they need more than the time left.

        Until a compiled candidate was timed, overtime and the time for the final race count as time
        left.
        """
        paused = [t for t in self._scheduler.unfinished if compiles(t.candidate)]
        needed_s = sum(map(self._left_s, paused))
        if not self._has_timed_compiled():
            left_s = self._budget.left_without_race() + self._budget.may_add_s()
        return needed_s if needed_s < left_s else 0.0

    # -- outcome --------------------------------------------------------------------------------

    def _workload_fails(self, fault: WorkerFault) -> UsageError:
        if fault.fault is Fault.DEADLINE:
            return UsageError(
                f"a budget of {self._options.budget_s:.0f} s is too small: it ended before the "
                "untouched workload was measured; raise --budget"
            )
        return UsageError(f"the untouched workload fails: {fault.reason}")

    def _measured(self, trial: LiveTrial, marks: dict[int, int]) -> Measurement:
        return trial.measured(self._options.metric, marks[id(trial)])

    def _result(self, interrupted: bool) -> TuneResult:
        baseline = winner = speedup = break_even = None
        chosen: Candidate = ()
        if self._final is not None:
            baseline, winner, live, speedup = self._final
            chosen = live.candidate
            setups = [self._pool.setup_s(trial) for trial in (live, self._pool.baseline)]
            if live is not self._pool.baseline:
                break_even = break_even_calls(baseline.median_ns - winner.median_ns, *setups)
        elif self._pool.trials and self._pool.baseline.blocks:
            baseline = self._pool.baseline.measured(self._options.metric)
        character = self._scheduler.character
        home = self._pool.baseline.device if self._pool.trials else self._scheduler.device
        return TuneResult(
            baseline=baseline,
            winner=winner,
            chosen=chosen,
            regime=character.regime if character else "unknown",
            candidates=tuple(map(self._frozen, [*self._pool.trials, *self._scheduler.under_way])),
            not_applicable=self._not_applicable,
            not_tried=self._not_tried,
            speedup=speedup,
            break_even_calls=break_even,
            reference=reference_text(self._scheduler.reference),
            seconds=self._budget.spent(),
            ended=self._how_it_ended(),
            interrupted=interrupted,
            compiler=self._compiler,
            devices=tuple(sorted(self._scheduler.devices, key=lambda each: each != home)),
            devices_left_out=dict(self._scheduler.left_out),
            timed_on={
                describe(trial.candidate): trial.device
                for trial in self._pool.trials
                if trial.blocks and trial.device != home
            },
        )

    def _how_it_ended(self) -> str:
        spent_s, beyond_s = self._budget.spent(), self._budget.spent() - self._options.budget_s
        if self._budget.overtime_s and beyond_s > 0:
            return f"took {spent_s:.0f} s, {beyond_s:.0f} s beyond the budget, {self._beyond}"
        return self._ended

    def _frozen(self, trial: LiveTrial) -> Trial:
        if trial.status == "ok" and not trial.blocks:
            trial.status, trial.reason = "skipped", "search ended before it was timed"
        if trial.status == "ok" and not self._pool.allowed(trial):
            trial.reason = f"allow with --precision {trial.precision}"
        frozen = trial.frozen(self._pool.allowed(trial))
        return msgspec.structs.replace(frozen, setup_s=self._pool.setup_s(trial))
