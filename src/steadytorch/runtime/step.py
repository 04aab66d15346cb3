"""Runs a plan's whole training step as one callable for the user's loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadytorch import transforms
from steadytorch.errors import UsageError
from steadytorch.graphs import data_parallel
from steadytorch.graphs.step import CapturedStep
from steadytorch.graphs.uniform_step import UniformStep
from steadytorch.quantities import counted
from steadytorch.ranks.checkpoints import Checkpoints
from steadytorch.ranks.group import Ranks
from steadytorch.results.candidate import Candidate
from steadytorch.runtime.trained import CHANGED, TrainedModule
from steadytorch.runtime.weights import Weights
from steadytorch.transforms.autocast import Autocast
from steadytorch.transforms.base import NotApplicable
from steadytorch.transforms.compile_loss import CompileLoss
from steadytorch.transforms.optimizer import OptimizerStep
from steadytorch.transforms.step_graph import StepGraph
from steadytorch.workload.compiled_loss import CompiledLoss
from steadytorch.workload.feed import arguments
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import Update
from steadytorch.workload.workload import TrainingStep, Workload

NO_GRAPH = "the plan records no step"
ALONE = "a step under DDP is recorded only if two or more ranks agree: leave agree=True"


class Shared(NamedTuple):
    """Data that all ranks running one training step have in common.

    Attributes:
        ranks: this process and its group.
        prefix: prefix of their keys; new for each step of each run.
    """

    ranks: Ranks
    prefix: str


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did so far.

    Attributes:
        plan: id of the plan.
        micro_batches: number of calls.
        replays: calls that replayed CUDA graphs.
        eager: number of calls that ran eagerly, by reason.
        update: why updates run eagerly although the plan records them; None if they do not.
        optimizer: implementation of the optimizer's step; if not the plan's, also the reason.
        loss: whether the loss is compiled; if not, although the plan compiles it, also the reason.
        saved_per_step_ns: time saved per step, as measured when the plan was made.
        break_even_steps: steps after which the plan's set-up is paid back; None if not known.
        model: report of the module that serves the model in eager steps, as text.
    """

    plan: str
    micro_batches: int
    replays: int
    eager: dict[str, int]
    update: str | None
    optimizer: str
    loss: str
    saved_per_step_ns: float
    break_even_steps: int | None
    model: str

    def __str__(self) -> str:
        lines = [f"{counted(self.micro_batches, 'call')}: {self.replays} replayed"]
        lines += [f"  {count} eager: {reason}" for reason, count in self.eager.items()]
        if self.update is not None:
            lines.append(f"  updates eager: {self.update}")
        lines += [f"  optimizer: {self.optimizer}", f"  loss: {self.loss}"]
        if self.replays and self.saved_per_step_ns:
            saved = self.replays * self.saved_per_step_ns * 1e-9
            lines.append(f"  {saved:.3g} s saved by plan {self.plan}{self._paid_back()}")
        return "\n".join(lines)

    def _paid_back(self) -> str:
        if self.break_even_steps is None:
            return ""
        if self.replays >= self.break_even_steps:
            return ", set-up paid back"
        return f", set-up to be paid back after {counted(self.break_even_steps, 'step')}"


class TunedStep:
    """Runs a plan's whole training step: forward, loss, backward, clipping, update.

    `step(inputs, *targets)` takes one micro-batch and returns the loss, a detached scalar that
    later calls do not overwrite. A tuned step raises an exception only where the eager step would
    raise one. A call that cannot replay a CUDA graph runs eagerly on the same parameters and
    optimizer, and is counted by reason. Learning rates may change between steps. The first
    micro-batch of each optimizer update discards earlier gradients. The caller keeps using the same
    model and optimizer, including their `state_dict`.

    Args:
        fast: the model, served by the plan.
        model: the untouched model.
        ddp: the `DistributedDataParallel` around the model, or None.
        shared: what the ranks of `ddp` share; None if this rank decides alone.
        optimizer: the optimizer over the model's parameters.
        loss: maps the model's output and the targets to a scalar tensor.
        candidate: the plan's transforms.
        clip: maximum joint norm of all gradients; None for no clipping.
        accumulate: micro-batches per update.
        scaler: a `torch.amp.GradScaler`; None for none.

    Raises:
        UsageError: an argument is wrong, or the optimizer holds no parameter of the model.
    """

    def __init__(
        self,
        fast: TrainedModule,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[..., Tensor],
        candidate: Candidate,
        *,
        plan: str = "",
        saved_per_step_ns: float = 0.0,
        break_even_steps: int | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        scaler: Any = None,
        ddp: Any = None,
        shared: Shared | None = None,
    ) -> None:
        _check(model, optimizer, loss, clip, accumulate)
        self._fast, self._model = fast, model
        self._plan, self._saved, self._break_even = plan, saved_per_step_ns, break_even_steps
        workload = Workload(model, (), training_step=TrainingStep(loss, optimizer))
        device = workload.device
        # A plan that does not fit may hold transforms that this version does not know.
        parts = [] if fast.is_off is not None else [transforms.create(spec) for spec in candidate]
        update, self._update_text = _update(parts, workload, optimizer, fast.is_off)
        called: Any = fast if ddp is None else data_parallel.ServedInside(ddp, fast, self._reduces)
        compiles = any(isinstance(part, CompileLoss) for part in parts)
        self._eager = EagerStep(
            called,
            loss,
            optimizer,
            update=update,
            compiled_loss=CompiledLoss(loss) if compiles else None,
            autocast=any(isinstance(part, Autocast) for part in parts),
            clip=clip,
            accumulate=accumulate,
            scaler=scaler,
        )
        self._points = None if shared is None else Checkpoints(*shared)
        self._weights = Weights(model, contents=False)
        self._weights.remember()
        self._mode, self._ended = model.training, False
        graph = next((part for part in parts if isinstance(part, StepGraph)), None)
        self._captured: CapturedStep | None = None
        self._counts: Counter[str] = Counter()
        self._reason = fast.is_off or NO_GRAPH
        if graph is not None and device.type == "cuda" and fast.is_off is None:
            modules = [model, *([loss] if isinstance(loss, nn.Module) else [])]
            scope = graph.parameters.scope
            given = (self._eager, scope, modules, self._invalid)
            if ddp is None:
                self._captured = CapturedStep(*given, check=True)
            elif shared is None:
                self._reason = ALONE
            else:
                stream = torch.cuda.Stream(device)
                data_parallel.make_anew(ddp, stream)
                self._captured = UniformStep(
                    *given,
                    ranks=shared.ranks,
                    prefix=shared.prefix,
                    layout=partial(data_parallel.layout, ddp),
                    stream=stream,
                )

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """Takes one micro-batch.

        Args:
            inputs: of the model: a tensor, a tuple of positional arguments, or a mapping of keyword
                arguments.
            targets: further arguments of the loss.

        Returns:
            The loss of the micro-batch, detached; reading it waits for the GPU.

        Raises:
            Exception: whatever the model, the loss or the optimizer raises.
        """
        args, kwargs = arguments(inputs)
        if self._points is not None:
            self._pass(self._points)
        if self._captured is not None:
            return self._captured(args, kwargs, targets)
        self._counts[self._reason] += 1
        return self._eager(args, kwargs, targets)

    def _reduces(self) -> bool:
        """Whether ranks all-reduce gradients now: at the last micro-batch of an update."""
        return self._eager.turn == self._eager.accumulate - 1

    def _pass(self, points: Checkpoints) -> None:
        """Publishes this rank's fault; ends the plan or its graphs at the agreed step."""
        graphs = self._captured if isinstance(self._captured, UniformStep) else None
        fault, kind = (None if self._ended else self._fast.fault), "plan"
        if fault is None and graphs is not None:
            fault, kind = graphs.fault, "graphs"
        ending = points.at(fault, kind)
        if ending is None:
            return
        if ending.kind == "plan":
            self._ended = True
            self._fast.end_on_all_ranks(str(ending))
            self._reason = self._fast.is_off or str(ending)
        if graphs is not None:
            graphs.begin_again(str(ending))

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm before the latest clipping, on the device; None without clipping."""
        norm = self._eager.norm
        return None if norm is None else norm.detach().clone()

    def report(self) -> StepReport:
        """Returns counts of replayed and eager calls, with reasons and time saved."""
        captured = self._captured
        eager = self._counts if captured is None else captured.eager
        replays = 0 if captured is None else captured.replays
        fallback = self._eager.update.fallback
        return StepReport(
            plan=self._plan,
            micro_batches=replays + sum(eager.values()),
            replays=replays,
            eager=dict(eager),
            update=None if captured is None else captured.update_reason,
            optimizer=self._update_text + ("" if fallback is None else f", eager: {fallback}"),
            loss=_loss_text(self._eager.compiled_loss),
            saved_per_step_ns=self._saved,
            break_even_steps=self._break_even,
            model=str(self._fast.report()),
        )

    def close(self) -> None:
        """Frees the CUDA graphs; later steps run eagerly."""
        if self._captured is not None:
            self._captured.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a step belongs to its model, its optimizer and this process: copy or save those, and "
            "make another step with plan.step"
        )

    def _invalid(self) -> str | None:
        if (off := self._fast.is_off) is not None:
            return off
        if self._model.training is not self._mode or self._weights.changed():
            return CHANGED
        return None


def _update(
    parts: list[Any], workload: Workload, optimizer: Optimizer, off: str | None
) -> tuple[Update | None, str]:
    """Returns the optimizer update to run, and a description of it."""
    wanted = next((part for part in parts if isinstance(part, OptimizerStep)), None)
    if off is not None:
        return None, f"its own step: {off}"
    if wanted is None:
        return None, "its own step"
    from steadytorch.device.facts import load_facts

    answer = wanted.applies_to(workload, load_facts(str(workload.device)))
    if isinstance(answer, NotApplicable):
        return None, f"its own step: {answer.reason}"
    parameters = wanted.parameters
    text = f"{parameters.implementation}{', groups merged' if parameters.merge else ''}"
    return Update(optimizer, parameters.implementation, parameters.merge), text


def _loss_text(compiled: CompiledLoss | None) -> str:
    if compiled is None:
        return "called as it is"
    return "compiled" if compiled.fallback is None else f"called as it is: {compiled.fallback}"


def _check(model: Any, optimizer: Any, loss: Any, clip: Any, accumulate: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"step takes an optimizer, got {type(optimizer).__name__}: pass a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "step cannot take LBFGS, which needs a closure: call plan.apply(model) in your own loop"
        )
    if not callable(loss):
        raise UsageError(
            f"step takes a loss of output and targets, got {type(loss).__name__}: pass a function"
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in updated for parameter in model.parameters()):
        raise UsageError(
            "the optimizer holds no parameter of the model: make it from model.parameters()"
        )
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise UsageError(f"clip must be a norm above 0, got {clip!r}: leave it out to clip nothing")
    if type(accumulate) is not int or accumulate < 1:
        raise UsageError(
            f"accumulate must be a number of micro-batches, 1 or more, got {accumulate!r}"
        )
