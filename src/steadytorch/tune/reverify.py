"""Checks that a stored plan is still correct, and no slower than the untouched workload here.

Each round starts fresh worker processes, verifies on new random inputs, and times the plan and the
untouched workload block by block in random order. The claim about time compares rounds, because
processes of the same program differ by several percent in speed.
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
from steadytorch.bench.bench_worker import save_payload
from steadytorch.compiled import artefact, compiler_choices
from steadytorch.device.facts import resolve_device
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.measure.race import TIE, MachineClaim, compare, machine_claim
from steadytorch.plan.fingerprint import differing_fields, format_differences
from steadytorch.process.folder import shared_folder
from steadytorch.process.neighbour import Neighbour
from steadytorch.process.worker import WorkerFault
from steadytorch.results.candidate import Candidate
from steadytorch.results.shown import Shown
from steadytorch.results.signature import Leaf
from steadytorch.serve.exchange import misfit
from steadytorch.serve.plan import Plan
from steadytorch.transforms.precision import ALLOWED, precision_of
from steadytorch.tune.search_server import compiler_cache
from steadytorch.tune.select import (
    CONTENDED,
    SearchOptions,
    block_deadline_s,
    block_shape,
    block_statistic,
)
from steadytorch.tune.session import Session
from steadytorch.tune.setup_scheduler import NullListener, SetupScheduler
from steadytorch.tune.trial import LiveTrial, WorkerLauncher
from steadytorch.verification.verify import INPUT_SETS
from steadytorch.workload import bundled
from steadytorch.workload.given import workload_of
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

PROCESSES = 5
"""Default number of rounds. Three are needed for an interval; five make it useful."""
STAGE_S = 600.0
"""Timeout in seconds for loading, set-up or verification; above the slowest compiler mode."""


class Reverified(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking a plan.

    Attributes:
        plan: the plan.
        error: worst relative L2 error over the rounds; None if no outputs could be compared.
        failed: why the plan must not be used; None if it passed.
        claim: effect on time as a fraction of the untouched workload's; None if it was not timed.
            It has no interval with fewer than three rounds.
        baseline_ns: median block time of the untouched workload; None if it was not timed.
        plan_ns: median block time of the plan; None if it was not timed.
    """

    plan: Plan
    error: float | None = None
    failed: str | None = None
    claim: MachineClaim | None = None
    baseline_ns: float | None = None
    plan_ns: float | None = None


def rebuilt(plan: Plan) -> Workload:
    """Rebuilds the workload of a plan that was tuned for a bundled architecture, on the CPU.

    Only names of bundled models are resolved, since the name in a plan is untrusted data.

    Raises:
        UsageError: the plan's name is not bundled, or its inputs cannot be created.
    """
    if plan.name not in bundled.names():
        raise UsageError(
            f"plan {plan.id} was tuned for {plan.name}, which is not a bundled model: pass it with "
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
    """Verifies a plan's numerics again and times it against the untouched workload.

    The plan fails if a search would reject it, or if it is slower by more than `measure.race.TIE`
    with 99 % confidence. The plan store is not changed.

    Args:
        plan: the plan to check.
        workload: the workload it was tuned for, or its `(model, inputs)`; neither run in this
            process nor changed.
        device: where to run; None for the device type in the plan's key.
        processes: rounds, each in fresh processes; three or more support a claim about time.
        seed: seed of the inputs and the block order.
        progress: called with progress messages.

    Raises:
        UnsupportedError: the plan is for another machine or other software.
        UsageError: the plan is for another workload, or the untouched workload fails.
        KeyboardInterrupt: interrupted by the user; the workers have ended.
    """
    if processes < 1:
        raise UsageError(f"cannot verify in {processes} processes: give 1 or more")
    workload = workload_of(workload)
    target = resolve_device(device or plan.key.device)
    options = _options_of(plan, seed)
    here = Session(workload, options, target).key
    if differing := differing_fields(plan.key, here):
        kind = UnsupportedError if misfit(plan.key) else UsageError
        raise kind(f"plan {plan.id} does not fit here: {format_differences(differing)}")
    if (reason := _no_candidate(plan, workload)) is not None or not plan.candidate:
        return Reverified(plan=plan, failed=reason)
    with shared_folder() as directory:
        save_payload(workload, directory)
        artefact.lend(plan.path, directory, transforms.artefacts(plan.candidate))
        compiler_choices.put(directory, plan.compiler)
        limit = int(0.8 * psutil.virtual_memory().available)
        launch = WorkerLauncher(directory, limit, compiler_cache(directory))

        def prepared(number: int) -> SetupScheduler:
            progress(f"round {number + 1} of {processes}")
            seeded = msgspec.structs.replace(options, seed=seed + number * INPUT_SETS)
            return SetupScheduler(launch, target, transforms.ambient(), seeded, NullListener())

        return in_rounds(plan, prepared, processes, options)


def _options_of(plan: Plan, seed: int) -> SearchOptions:
    """The options of the search that made the plan, from its key.

    Raises:
        UsageError: the key holds invalid options.
    """
    key = plan.key
    return SearchOptions(
        objective=key.objective,
        precision=key.precision,
        tolerance=key.tolerance,
        max_memory_bytes=key.max_memory_bytes,
        seed=seed,
    )


def _no_candidate(plan: Plan, workload: Workload) -> str | None:
    """Why no search could have chosen the candidate of an untrusted plan; None if one could."""
    try:
        reason = transforms.conflict(plan.candidate, workload)
        precision = precision_of(plan.candidate)
    except UsageError as error:
        return str(error)
    if reason is None and precision not in ALLOWED[plan.key.precision]:
        return f"it computes in {precision}, but its key allows only {plan.key.precision}"
    return reason


class _Round(NamedTuple):
    """Result of one round in fresh processes.

    Attributes:
        error: relative L2 error; None if no outputs could be compared.
        failed: why the plan must not be used; None if it passed.
        effect: effect on time as a fraction; None if it was not timed.
        pairs: block times of the untouched workload and of the plan, in ns.
    """

    error: float | None
    failed: str | None
    effect: float | None = None
    pairs: tuple[tuple[float, float], ...] = ()


def in_rounds(
    plan: Plan, prepared: Callable[[int], SetupScheduler], processes: int, options: SearchOptions
) -> Reverified:
    """Runs rounds of verification and timing until one fails or all are done.

    Args:
        plan: the plan to check.
        prepared: starts the processes of a round, given its number.
        processes: number of rounds.
        options: the options that the plan was tuned with.

    Raises:
        UsageError: the untouched workload fails.
    """
    rng, done = Random(options.seed), list[_Round]()
    neighbour = Neighbour(options.objective == CONTENDED)
    while len(done) < processes and not (done and done[-1].failed):
        scheduler = prepared(len(done))
        try:
            done.append(_round(scheduler, plan.candidate, options, rng, neighbour))
        finally:
            scheduler.kill_all()
            neighbour.close()
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
    return f"it is at least {claim.low:.1%} slower than the untouched workload"


def _round(
    scheduler: SetupScheduler,
    candidate: Candidate,
    options: SearchOptions,
    rng: Random,
    neighbour: Neighbour,
) -> _Round:
    try:
        baseline = scheduler.baseline(lambda: STAGE_S)
        with neighbour:
            quiet = baseline.quiet(options.metric, STAGE_S)
    except WorkerFault as fault:
        raise _workload_fails(fault) from fault
    (trial,) = scheduler.prepare([candidate], 1, STAGE_S, others=0)
    found = trial.verification.error if trial.verification else None
    error = None if found is None else found.relative_l2
    if not trial.ok:
        return _Round(error, trial.reason)
    shape = block_shape(options, float(np.median(quiet)))
    deadline_s = block_deadline_s(shape)

    def block(live: LiveTrial) -> float:
        try:
            with neighbour:
                times = live.block(options.metric, shape.count, deadline_s)
            return block_statistic(options, times)
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
    return UsageError(f"the untouched workload fails: {fault.reason}")
