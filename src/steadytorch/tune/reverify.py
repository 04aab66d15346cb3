"""A stored plan against the untouched workload again: right, and not slower, in this environment.

Each round starts fresh worker processes, verifies on other random inputs, and times both block by
block in random order. The claim rests on the rounds: processes of one program differ by percents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil

from steadytorch import transforms
from steadytorch.bench.worker import save_payload
from steadytorch.device.facts import resolve_device
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.measure.race import TIE, MachineClaim, compare, machine_claim
from steadytorch.plan.fingerprint import differing_fields, told
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import WorkerFault
from steadytorch.results.candidate import Candidate
from steadytorch.results.signature import Leaf
from steadytorch.serve.exchange import misfit
from steadytorch.serve.plan import Plan
from steadytorch.transforms.precision import ALLOWED, precision_of
from steadytorch.tune.prepare import Preparation, Silent
from steadytorch.tune.select import Options, block_deadline_s, block_shape, block_statistic
from steadytorch.tune.session import Session
from steadytorch.tune.trial import LiveTrial, WorkerLauncher
from steadytorch.verification.verify import INPUT_SETS
from steadytorch.workload import bundled
from steadytorch.workload.given import workload_of
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

PROCESSES = 5
"""Rounds by default; from three on there is an interval, and five make it useful."""
STAGE_S = 600.0
"""Seconds that loading, set-up or verification may take: more than the slowest compiler mode."""


class Reverified(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is worth here and now.

    Attributes:
        plan: the plan.
        error: relative L2 error, the worst over rounds; None where there was nothing to compare.
        failed: why it may not be used any more, None if it may.
        claim: its effect on time, as a fraction of the untouched workload's; None where it was not
            timed. Too few rounds support no interval.
        baseline_ns: median of the untouched workload's blocks; None where none were timed.
        plan_ns: that of the plan's.
    """

    plan: Plan
    error: float | None = None
    failed: str | None = None
    claim: MachineClaim | None = None
    baseline_ns: float | None = None
    plan_ns: float | None = None


def rebuilt(plan: Plan) -> Workload:
    """The workload of a plan that was tuned for a bundled architecture, on the CPU.

    A name in a plan is data: nothing else that it may name is imported or run.

    Raises:
        UsageError: it names no bundled architecture, or inputs that cannot be made.
    """
    if plan.name not in bundled.names():
        raise UsageError(
            f"plan {plan.id} was tuned for {plan.name}, and holds no model: name its workload with "
            "--workload, and the options it was tuned with"
        )
    inputs = [_as_typed(leaf) for leaf in plan.signature.leaves]
    return load_workload(plan.name, inputs=inputs, train=plan.trains is not None)


def _as_typed(leaf: Leaf) -> str:
    return f"{'x'.join(map(str, leaf.shape or ()))}:{leaf.dtype}"


def reverify(
    plan: Plan,
    workload: Workload | tuple[Any, Any],
    *,
    device: str | None = None,
    processes: int = PROCESSES,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> Reverified:
    """Verifies a plan's numerics anew, and times it against the untouched workload.

    It fails where a candidate would be rejected in a search, or where it is slower by more than
    `measure.race.TIE` with 99 % confidence. Nothing is stored or removed.

    Args:
        plan: what to look at.
        workload: what it was tuned for, or its `(model, inputs)`; not run in this process,
            and not changed.
        device: where to run; None for the kind of device that it is keyed by.
        processes: rounds, each in fresh processes; three or more support a claim about time.
        seed: of inputs and of the order of blocks.
        progress: is told what is going on.

    Raises:
        UnsupportedError: the plan is for another machine or other software.
        UsageError: it is for another workload, or the workload itself fails.
        KeyboardInterrupt: interrupted; workers are gone.
    """
    if processes < 1:
        raise UsageError(f"cannot verify in {processes} processes: give 1 or more")
    workload = workload_of(workload)
    target = resolve_device(device or plan.key.device)
    options = _options_of(plan, seed)
    here = Session(workload, options, target).key
    if differing := differing_fields(plan.key, here):
        kind = UnsupportedError if misfit(plan.key) else UsageError
        raise kind(f"plan {plan.id} does not fit here: {told(differing)}")
    if (reason := _no_candidate(plan, workload)) is not None or not plan.candidate:
        return Reverified(plan=plan, failed=reason)
    with shared_folder() as directory:
        save_payload(workload, directory)
        launch = WorkerLauncher(directory, int(0.8 * psutil.virtual_memory().available), {})

        def prepared(number: int) -> Preparation:
            progress(f"processes {number + 1} of {processes}")
            seeded = msgspec.structs.replace(options, seed=seed + number * INPUT_SETS)
            return Preparation(launch, target, transforms.ambient(), seeded, Silent())

        return in_rounds(plan, prepared, processes, options)


def _options_of(plan: Plan, seed: int) -> Options:
    """What was asked of the search that made the plan.

    Raises:
        UsageError: no search can be asked for that.
    """
    key = plan.key
    return Options(
        objective=key.objective,
        precision=key.precision,
        tolerance=key.tolerance,
        max_memory_bytes=key.max_memory_bytes,
        seed=seed,
    )


def _no_candidate(plan: Plan, workload: Workload) -> str | None:
    """Why no search could have chosen this, or None: a plan may have been written by anyone."""
    try:
        reason = transforms.conflict(plan.candidate, workload)
        precision = precision_of(plan.candidate)
    except UsageError as error:
        return str(error)
    if reason is None and precision not in ALLOWED[plan.key.precision]:
        return f"it computes in {precision}, and is kept as one that keeps to {plan.key.precision}"
    return reason


class _Round(NamedTuple):
    """What one set of fresh processes gave.

    Attributes:
        error: relative L2 error; None where there was nothing to compare.
        failed: why the plan may not be used; None if it may.
        effect: on time, as a fraction; None where it was not timed.
        pairs: block times of the untouched workload and of the plan, in ns.
    """

    error: float | None
    failed: str | None
    effect: float | None = None
    pairs: tuple[tuple[float, float], ...] = ()


def in_rounds(
    plan: Plan, prepared: Callable[[int], Preparation], processes: int, options: Options
) -> Reverified:
    """Rounds until one fails, or all are done.

    Args:
        plan: what to look at.
        prepared: starts the processes of a round, by its number.
        processes: how many rounds.
        options: what is asked of the plan.

    Raises:
        UsageError: the workload itself fails.
    """
    rng, done = Random(options.seed), list[_Round]()
    while len(done) < processes and not (done and done[-1].failed):
        preparation = prepared(len(done))
        try:
            done.append(_round(preparation, plan.candidate, options, rng))
        finally:
            preparation.kill_all()
    effects = [each.effect for each in done if each.effect is not None]
    claim = machine_claim(effects) if effects else None
    medians = np.median([pair for each in done for pair in each.pairs], axis=0) if effects else None
    return Reverified(
        plan=plan,
        error=max((each.error for each in done if each.error is not None), default=None),
        failed=done[-1].failed or _too_slow(claim),
        claim=claim,
        baseline_ns=None if medians is None else float(medians[0]),
        plan_ns=None if medians is None else float(medians[1]),
    )


def _too_slow(claim: MachineClaim | None) -> str | None:
    if claim is None or claim.low is None or claim.low <= TIE:
        return None
    return f"it is slower than the untouched workload by {claim.low:.1%} at the least"


def _round(preparation: Preparation, candidate: Candidate, options: Options, rng: Random) -> _Round:
    try:
        baseline = preparation.baseline(lambda: STAGE_S)
        quiet = baseline.block(options.metric, 5, STAGE_S)
    except WorkerFault as fault:
        raise _workload_fails(fault) from fault
    (trial,) = preparation.prepare([candidate], 1, STAGE_S, others=0)
    found = trial.verification.error if trial.verification else None
    error = None if found is None else found.relative_l2
    if not trial.ok:
        return _Round(error, trial.reason)
    shape = block_shape(options, float(np.median(quiet)))
    deadline_s = block_deadline_s(shape)

    def block(live: LiveTrial) -> float:
        try:
            return block_statistic(options, live.block(options.metric, shape.count, deadline_s))
        except WorkerFault as fault:
            if live is baseline:
                raise _workload_fails(fault) from fault
            raise

    try:
        judgement, pairs = compare(partial(block, baseline), partial(block, trial), rng=rng)
    except WorkerFault:
        return _Round(error, trial.reason)
    return _Round(error, None, judgement.estimate, tuple(pairs))


def _workload_fails(fault: WorkerFault) -> UsageError:
    return UsageError(f"the workload itself fails, without any plan: {fault.reason}")
