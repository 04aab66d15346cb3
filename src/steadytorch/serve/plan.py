"""Defines plans: stored sets of tuned transforms that can be applied to a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from steadytorch.ambient import ambient
from steadytorch.compiled.artefact import beside
from steadytorch.compiled.bundle import source
from steadytorch.compiled.compiler_choices import Choices
from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.errors import PlanError, UsageError
from steadytorch.graphs.data_parallel import ddp_of, objection
from steadytorch.plan.files import clean, read_file
from steadytorch.plan.fingerprint import (
    differing_fields,
    format_differences,
    make_key,
    trained_fingerprint,
)
from steadytorch.plan.record import PlanRecord
from steadytorch.ranks.agreement import Refusal
from steadytorch.ranks.group import Ranks, collective_in, ranks_of
from steadytorch.results.candidate import describe
from steadytorch.runtime.dispatch import CallContext, Origin, Resolution
from steadytorch.runtime.entries import ServingOptions, parse_verify_every
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.module_proxy import Function, as_module
from steadytorch.runtime.settings import SWITCH, is_switched_off
from steadytorch.runtime.step import Shared, TunedStep
from steadytorch.runtime.trained import TrainedModule
from steadytorch.serve import agreed
from steadytorch.transforms import compiles, engines, libraries
from steadytorch.transforms.compile_loss import CompileLoss
from steadytorch.transforms.precision import ALLOWED, precision_of
from steadytorch.transforms.prefetch import BatchT, Delivered, Prefetch, Prefetched
from steadytorch.workload.workload import Workload


class Plan(PlanRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan. Loading a plan runs no code, because its transforms come from a closed list."""

    def __str__(self) -> str:
        gain, step = self.evidence.speedup, "" if self.trains is None else " (training)"
        lines = [f"{self.name}{step}, {self.signature}: {describe(self.candidate)}"]
        if self.candidate:
            tail = " at p99" if self.key.objective in ("p99", "contended") else ""
            faster = f"{gain.estimate:.2f}x as fast{tail} as untouched"
            if gain.low is not None and gain.high is not None:
                faster += f" (99 % interval {gain.low:.2f} to {gain.high:.2f})"
            lines.append(faster)
        lines.append(f"plan {self.id}, {self.path or 'in memory only'}")
        return "\n".join(map(clean, lines))

    def apply(
        self,
        model: nn.Module,
        *,
        alias_outputs: bool = False,
        bundle: bool = False,
        verify_every: int | None = None,
        agree: bool = True,
        group: Any = None,
    ) -> TunedModule:
        """Returns a module with the call signature of `model` that runs this plan.

        If the plan is for training, call the returned module instead of `model` in your own loop.
        Gradients reach the model's own weights, so the rest of the training loop needs no change.

        If the plan does not fit the model, device, library versions or settings, the module runs
        `model` untouched. The log and `report()` give the reason. If the environment variable
        `STEADYTORCH_MODE` is `off`, the module always runs `model` untouched.

        Args:
            model: the untouched model, on its device. A callable that is not an `nn.Module` runs
                untouched.
            alias_outputs: whether outputs may be buffers that the next call overwrites. Saves a
                copy if a CUDA graph serves.
            bundle: whether to load the plan's compiled code, if it was kept. This code runs: see
                `compiled.bundle` for what is accepted.
            verify_every: compares every N-th call of a signature with `model`, and demotes the plan
                if the answers differ. None for no checks.
            agree: whether the ranks of an initialised process group serve the plan only if all of
                them can; see `docs/ranks.md`. Call this on every rank then.
            group: the process group whose ranks agree; None for the default group.

        Raises:
            UsageError: `model` is not callable or already tuned, or `verify_every` is not a
                positive integer.
        """
        _refuse_tuned(model, "apply")
        options = ServingOptions(
            alias_outputs,
            trains=self.trains is not None,
            verify_every=parse_verify_every(verify_every),
        )
        return self._applied(as_module(model), options, ranks_of(group, agree), bundle=bundle)

    def _applied(
        self,
        module: nn.Module,
        options: ServingOptions,
        ranks: Ranks | None,
        *,
        bundle: bool = False,
        problem: str | None = None,
    ) -> TunedModule:
        """Returns the serving module; it runs untouched on all ranks if this rank has a problem."""
        resolve = partial(self.resolve, bundle=bundle)
        fits: Callable[[nn.Module], str | None] = self._misfit
        if ranks is None and problem is not None:
            fits = partial(_misfit_of_ranks, self, problem)
        if ranks is not None:
            problem = self._problem(module) or (problem if self.candidate else None)
            refusal = agreed.refusal(self, ranks, problem)
            fits = partial(_misfit_of_ranks, self, refusal)
            resolve = partial(agreed.resolve, self, ranks, resolve)
        serving = TrainedModule if options.trains else TunedModule
        return serving(module, resolve, fits, options)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., torch.Tensor],
        *,
        clip: float | None = None,
        accumulate: int = 1,
        scaler: Any = None,
        agree: bool = True,
        group: Any = None,
    ) -> TunedStep:
        """Returns this plan's whole training step as one callable for the caller's loop.

        `step(inputs, *targets)` runs forward, `loss(output, *targets)`, backward, clipping and the
        optimizer, and returns the loss. If the plan does not fit, the same step runs eagerly.

        Args:
            model: the untouched model, on the device it is to run on, or
                `DistributedDataParallel` around it; see `docs/ranks.md`.
            optimizer: over its parameters; it stays the caller's, learning rates included.
            loss: maps the model's output and the targets to a scalar tensor.
            clip: largest norm of all gradients together; None leaves them as they are.
            accumulate: micro-batches per update; each call takes one.
            scaler: a `torch.amp.GradScaler`; None for none.
            agree: as for `apply`.
            group: as for `apply`.

        Raises:
            UsageError: the plan is for inference, or an argument is wrong.
        """
        if self.trains is None:
            raise UsageError(
                f"plan {self.id} is for inference and has no step: tune Workload.training(...)"
            )
        ddp, shared = ddp_of(model), None
        pads = any(spec.name == CompileLoss.name for spec in self.candidate)
        options = ServingOptions(trains=True, pads=pads)
        if ddp is None:
            _refuse_tuned(model, "step")
            fast = self._applied(as_module(model), options, ranks_of(group, agree))
        else:
            if isinstance(ddp.module, TunedModule):
                raise UsageError(
                    "step takes DDP around the untouched model, got DDP around a tuned one: pass "
                    "DistributedDataParallel(model)"
                )
            ranks = ranks_of(group or ddp.process_group, agree)
            inner = as_module(ddp.module)
            fast = self._applied(inner, options, ranks, problem=objection(ddp))
            shared = None if ranks is None else _shared(fast, ranks)
        assert isinstance(fast, TrainedModule)
        return TunedStep(
            fast,
            fast.__wrapped__,
            optimizer,
            loss,
            self.candidate,
            plan=self.id,
            saved_per_step_ns=self.origin.saved_ns,
            break_even_steps=self.evidence.break_even_calls,
            clip=clip,
            accumulate=accumulate,
            scaler=scaler,
            ddp=ddp,
            shared=shared,
        )

    def batches(
        self, loader: Iterable[BatchT], device: str | torch.device | None = None
    ) -> Iterable[BatchT]:
        """Yields a loader's batches on a device, as inputs for the module from `apply`.

        Batches are prefetched if the plan includes the transform `prefetch`. Without `prefetch`, or
        with `STEADYTORCH_MODE=off`, each batch is moved when the loop requests it.

        Args:
            loader: any iterable; each iteration over the result starts it again.
            device: the target device; None for the current CUDA device, or the CPU without CUDA.

        Raises:
            UnsupportedError: this machine lacks the device.
            UsageError: the device type is unknown.
        """
        target = torch.device(resolve_device("auto" if device is None else str(device)))
        prefetches = any(spec.name == Prefetch.name for spec in self.candidate)
        ahead = prefetches and not is_switched_off()
        return (Prefetched if ahead else Delivered)(loader, target)

    @property
    def origin(self) -> Origin:
        """The plan's id and measured time saved, for reports."""
        baseline, winner = self.evidence.baseline, self.evidence.winner
        return Origin(
            self.id,
            max(0.0, baseline.median_ns - winner.median_ns),
            self.evidence.break_even_calls,
            self.key.tolerance,
        )

    def resolve(self, context: CallContext, bundle: bool = False) -> Resolution:
        """Resolves calls with the plan's signature to its transforms, other calls to none."""
        if context.signature != self.signature:
            return Resolution(None)
        return self.resolution(bundle)

    def resolution(self, bundle: bool = False) -> Resolution:
        """Returns the plan's transforms, with compiled code if `bundle`, to build an executor."""
        prebuilt = source(self) if bundle and compiles(self.candidate) else None
        shelf = beside(self.path) if engines(self.candidate) else None
        return Resolution(
            self.candidate,
            origin=self.origin,
            prebuilt=prebuilt,
            shelf=shelf,
            choices=Choices(self.compiler),
        )

    def _problem(self, model: nn.Module) -> str | None:
        """Returns why the plan must not serve on this rank, or None if it may."""
        if is_switched_off():
            return f"{SWITCH} is off"
        return (collective_in(model) if self.candidate else None) or self._misfit(model)

    def _misfit(self, model: nn.Module) -> str | None:
        try:
            reason = self._why_not(model)
        except Exception as error:  # a plan file may hold anything; the caller goes on
            reason = f"a plan could not be checked against this environment: {error}"
        return None if reason is None else clean(reason)

    def precision_violation(self) -> str | None:
        """Returns why transforms are unknown or their precision is not allowed, or None."""
        try:
            precision = precision_of(self.candidate)
        except Exception as error:  # a plan file may hold anything
            return f"a plan could not be checked against this environment: {clean(error)}"
        if precision in ALLOWED.get(self.key.precision, ()):
            return None
        asked = self.key.precision
        return f"plan {self.id} allows precision {asked}, but its transforms need {precision}"

    def library_violation(self) -> str | None:
        """Returns why installed libraries do not match those used in tuning, or None."""
        if not self.libraries:
            return None
        try:
            here = libraries(self.candidate)
        except PackageNotFoundError as error:
            return f"plan {self.id} needs {clean(error.name)}, which is not installed"
        except Exception as error:  # a plan file may hold anything, and a plug-in fail
            return f"a plan could not be checked against this environment: {clean(error)}"
        for name, version in self.libraries.items():
            if here.get(name) != version:
                there = f"{clean(name)} {clean(version)}"
                return f"plan {self.id} was made with {there}, here is {here.get(name, 'none')}"
        return None

    def violation(self) -> str | None:
        """Returns why the plan must not serve any model on this machine, or None if it may."""
        return self.precision_violation() or self.library_violation()

    def _why_not(self, model: nn.Module) -> str | None:
        if isinstance(model, Function):
            return model.reason
        if (violation := self.violation()) is not None:
            return violation
        workload = Workload(model)
        here = make_key(
            workload,
            self.signature,
            load_facts(str(workload.device)),
            objective=self.key.objective,
            precision=self.key.precision,
            tolerance=self.key.tolerance,
            max_memory_bytes=self.key.max_memory_bytes,
            ambient=ambient(),
        )
        # The loader belongs to the caller, so it always fits.
        here = msgspec.structs.replace(here, loader=self.key.loader)
        if self.trains is not None:  # as do the loss and the optimizer
            same = trained_fingerprint(model) == self.trains
            here = msgspec.structs.replace(here, workload=self.key.workload) if same else here
        if not (differences := differing_fields(self.key, here)):
            return None
        return f"plan {self.id} does not fit here: {format_differences(differences)}"


def _refuse_tuned(model: Any, caller: str) -> None:
    if isinstance(model, TunedModule):
        raise UsageError(
            f"{caller} takes the untouched model, got a tuned one: pass model.__wrapped__; "
            "optimize(model) serves several plans at once"
        )


def _shared(fast: TunedModule, ranks: Ranks) -> Shared | None:
    """Returns the state that all ranks of a step share, or None if the ranks cannot agree."""
    assert isinstance(fast, TrainedModule)
    if fast.is_off is not None:
        return None
    prefix = agreed.shared_prefix(ranks, "the steps of a plan")
    if isinstance(prefix, Refusal):
        fast.end_on_all_ranks(prefix.reason)
        return None
    return Shared(ranks, prefix)


def _misfit_of_ranks(plan: Plan, refusal: str | None, model: nn.Module) -> str | None:
    return refusal or plan._misfit(model)


def load_plan(path: str | Path) -> Plan:
    """Reads a plan from a file, without running any code.

    Raises:
        PlanError: `path` is not a path, or the file is missing, damaged, not a plan, or of another
            schema.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise PlanError(f"load_plan takes the path of a plan file, got {path!r}")
    _, plan = read_file(Path(path), Plan)
    return msgspec.structs.replace(plan, path=str(path))
