"""Tunes the modules of a pipeline one by one, and verifies the whole pipeline call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from steadytorch.errors import SteadyError, UsageError, one_line
from steadytorch.measure.race import Judgement
from steadytorch.quantities import counted, parse_duration
from steadytorch.ranks.group import ranks_of
from steadytorch.results.candidate import describe
from steadytorch.runtime.agreement import bound
from steadytorch.runtime.module import TunedModule
from steadytorch.serve.plan import Plan
from steadytorch.tune.module_calls import ModuleCalls, Observer, places_of
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import MODES, tune
from steadytorch.tune.whole_call import Swap, WholeCall, difference
from steadytorch.workload.workload import Workload

PUT_BACK = "put back"
NOT_FASTER = "nothing was faster than the untouched module"


@dataclass(frozen=True)
class TunedPart:
    """One module of a pipeline, in calls of one signature.

    Attributes:
        path: where the pipeline keeps it, such as `unet` or `vae.decoder`.
        calls: number of calls within one call of the pipeline.
        share: share of the pipeline's time, from 0 to 1.
        plan: its plan; None if it was not tuned.
        reason: why it runs untouched; None if its plan serves.
    """

    path: str
    calls: int
    share: float
    plan: Plan | None
    reason: str | None

    def __str__(self) -> str:
        head = f"{self.path}: {counted(self.calls, 'call')}, {self.share:.1%} of the time"
        if self.plan is None or not self.plan.candidate:
            return f"{head}, untouched: {self.reason}"
        gain = self.plan.evidence.speedup
        within = "" if gain.low is None else f" ({gain.low:.2f} to {gain.high:.2f})"
        tuned = f"{head}, {describe(self.plan.candidate)}, {gain.estimate:.2f}x{within}"
        return tuned if self.reason is None else f"{tuned}, untouched: {self.reason}"


@dataclass(frozen=True)
class TunedPipeline:
    """A pipeline whose modules are served by plans, and the measured gain.

    Attributes:
        parts: the modules that were called, most time first.
        effect: the whole call with plans against without; None if it was not timed.
        reason: why the pipeline was put back as it was; None if plans serve.
    """

    parts: tuple[TunedPart, ...]
    effect: Judgement | None
    reason: str | None
    _swaps: tuple[Swap, ...] = ()

    @property
    def modules(self) -> dict[str, TunedModule]:
        """The tuned modules by path, with their reports; empty if the pipeline was put back."""
        return {swap.path: swap.tuned for swap in self._swaps}

    def restore(self) -> None:
        """Puts the untouched modules back and frees the executors."""
        for swap in self._swaps:
            swap.take_out()
            swap.tuned.close()

    def __str__(self) -> str:
        lines = [f"  {part}" for part in self.parts]
        if self.reason is not None:
            return "\n".join([f"untouched: {self.reason}", *lines])
        return "\n".join([_effect_line(self.effect), *lines])


def _effect_line(effect: Judgement | None) -> str:
    if effect is None or effect.estimate is None:
        return "the whole call was not timed"
    pairs = f"in {counted(effect.pairs, 'pair')}, {effect.verdict}"
    if effect.low is None or effect.high is None:
        return f"the whole call: {effect.estimate:+.1%} time, too few pairs for an interval {pairs}"
    return (
        f"the whole call: {effect.estimate:+.1%} time ({effect.low:+.1%} to {effect.high:+.1%}) "
        f"{pairs}"
    )


def tune_modules(
    pipe: Any,
    call: Callable[[], Any],
    *,
    objective: str = "auto",
    precision: str = "same",
    tolerance: float | None = None,
    budget: str | float = "3m",
    max_memory: str | int | None = None,
    store: str | Path | None = None,
    mode: str = "replay",
    least_share: float = 0.05,
    seed: int = 0,
    bundle: bool = False,
) -> TunedPipeline:
    """Tunes the modules in which a pipeline call spends its time, and applies their plans.

    Suits pipelines like those of Diffusers: objects with modules as attributes. `call` runs twice
    in this process without plans: once for its outputs, once to time the modules. Each module that
    takes at least `least_share` of the time is then tuned by `tune`, for the inputs that took most
    of its time. Tuned modules replace the originals in the pipeline's attributes.

    At the end, the outputs of `call` with and without plans are compared under the same random
    numbers, and both calls are timed in pairs. If the outputs differ more than the precision class
    allows, or the call with plans is slower, the original modules are put back.

    Args:
        pipe: the pipeline, or a dictionary of modules; not an `nn.Module`.
        call: runs the pipeline once and returns its outputs, as `lambda: pipe(prompt).images`. It
            must return the same for the same seed. A generator of its own must be made within it.
        objective: as for `tune`.
        precision: lowest precision class allowed: `same`, `tf32`, `bf16`, `fp16` or `int8`.
        tolerance: relative L2 error allowed for a lower precision, of each module and of the whole
            call; None for the class's default.
        budget: wall-clock time of each module's search, and at most of timing the whole call.
        max_memory: cap on each plan's peak memory, such as `"8GiB"` or bytes.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.
        mode: as for `tune`; with `strict`, modules without a stored plan run untouched.
        least_share: least share of the time of a module worth tuning, from 0 to 1.
        seed: seed of PyTorch's, NumPy's and Python's random numbers in each run of `call`; their
            states are put back.
        bundle: as for `tune` and `apply`.

    Returns:
        The gain of each module and of the whole call.

    Raises:
        UsageError: `pipe` holds no modules or tuned ones, an argument is wrong, or ranks of a
            process group run this.
        Exception: exceptions of `call` propagate; the pipeline is then as it was.
    """
    _check(pipe, call, mode)
    seconds = parse_duration(budget)
    SearchOptions(objective=objective, precision=precision, tolerance=tolerance)  # raises
    tuning: dict[str, Any] = {"objective": objective, "precision": precision, "mode": mode}
    tuning |= {"tolerance": tolerance, "budget": seconds, "max_memory": max_memory}
    tuning |= {"store": store, "seed": seed, "bundle": bundle, "agree": False}
    whole, observer = WholeCall(call, seed), Observer(pipe)
    expected = whole.outputs()
    with observer.watching():
        again = whole.outputs()
    chosen, left = _chosen(observer, least_share)
    bounds = [bound(precision, c.module, (c.args, c.kwargs), tolerance) for c in chosen]
    limit = max(bounds, default=0.0)
    if (fault := difference(again, expected, limit)) is not None:
        parts = [_part(each, observer, None, "not tuned") for each in chosen]
        reason = f"the call does not repeat under one seed, so it cannot be verified: {fault}"
        return TunedPipeline((*parts, *left), None, reason)
    parts = [_tuned(each, observer, tuning) for each in chosen]
    swaps = [
        Swap(each, part.plan.apply(each.module, bundle=bundle, agree=False))
        for each, part in zip(chosen, parts, strict=True)
        if part.plan is not None and part.plan.candidate
    ]
    if not swaps:
        return TunedPipeline((*parts, *left), None, "no module has a faster plan")
    found = whole.check(swaps, expected, limit, seconds)
    removed = {s.path: found.unserved.get(s.path, PUT_BACK) for s in swaps if s not in found.kept}
    parts = [replace(part, reason=removed.get(part.path, part.reason)) for part in parts]
    return TunedPipeline((*parts, *left), found.effect, found.reason, found.kept)


def _check(pipe: Any, call: Any, mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r:.60}: choose one of {', '.join(MODES)}")
    if isinstance(pipe, nn.Module):
        raise UsageError(
            f"tune_modules takes an object that holds modules, got the module "
            f"{type(pipe).__name__}: use tune(Workload(model, inputs))"
        )
    if not callable(call):
        raise UsageError(f"tune_modules takes a function without arguments, got {call!r:.60}")
    places = places_of(pipe)
    if not places:
        raise UsageError(f"the attributes of {type(pipe).__name__} hold no nn.Module")
    for place in (place for found in places.values() for place in found):
        if isinstance(place.registry[place.name], TunedModule):
            raise UsageError(f"{place.path} is already tuned: put the untouched module back first")
    if ranks_of() is not None:
        raise UsageError("tune_modules runs in one process: tune before starting the ranks")


def _chosen(
    observer: Observer, least_share: float
) -> tuple[list[ModuleCalls], tuple[TunedPart, ...]]:
    """Modules worth tuning, each with the inputs that took most time; and all other modules."""
    chosen: list[ModuleCalls] = []
    left: list[TunedPart] = []
    for each in observer.calls:
        if each.problem is not None:
            left.append(_part(each, observer, None, each.problem))
        elif any(each.module is other.module for other in chosen):
            left.append(_part(each, observer, None, "inputs of another signature took more time"))
        elif each.seconds < least_share * observer.seconds:
            left.append(_part(each, observer, None, f"takes less than {least_share:.0%}"))
        else:
            chosen.append(each)
    return chosen, tuple(left)


def _part(
    calls: ModuleCalls, observer: Observer, plan: Plan | None, reason: str | None
) -> TunedPart:
    share = calls.seconds / observer.seconds
    return TunedPart(calls.places[0].path, calls.calls, share, plan, reason)


def _tuned(calls: ModuleCalls, observer: Observer, tuning: dict[str, Any]) -> TunedPart:
    workload = Workload(calls.module, calls.args, calls.kwargs, calls.places[0].path)
    try:
        plan = tune(workload, **tuning)
    except SteadyError as error:
        return _part(calls, observer, None, str(error))
    except Exception as error:  # such as a module that cannot be pickled
        return _part(calls, observer, None, one_line(error))
    return _part(calls, observer, plan, None if plan.candidate else NOT_FASTER)
