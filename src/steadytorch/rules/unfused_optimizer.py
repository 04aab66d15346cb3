"""Find optimizers that run without their fused implementation."""

from __future__ import annotations

from steadytorch.findings.figures import amount, duration, evidence_of, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, step_ns
from steadytorch.findings.optimizer_steps import (
    HAS_FUSED,
    LEAST_SHARE,
    OptimizerWork,
    optimizer_work,
)
from steadytorch.findings.watched_steps import SteppedOptimizer, WatchedSteps
from steadytorch.quantities import counted
from steadytorch.rules.single_tensor_optimizer import FEWEST as FEWEST_SINGLE

NAME = "unfused-optimizer"
FEWEST = 3
"""Minimum operators on lists of tensors a step. Fewer are about what fused=True needs."""
LEAST_WATCHED = 0.2
"""Minimum share of a watched step. Fused, the update of a common batch takes a few percent."""
LEAST_SINGLE = 0.1
"""The same where single tensors are updated one after another although a fused implementation
exists. On one CPU thread, fused AdamW took 14 to 38 % of the time of single tensors (20 to 240
parameters of 16 x 16 to 512 x 512), and fused SGD 19 to 79 %."""


def rule(case: Case) -> Verdict:
    """Report an optimizer that passes over all tensors several times instead of once.

    By default, Adam, AdamW and SGD use foreach on a GPU: one operator on all tensors for each
    arithmetic operation. With fused=True, one operator does the whole update. In traces, the rule
    `single-tensor-optimizer` covers optimizers that update one tensor at a time.

    Source: PyTorch, `torch.optim`, "how to use the for-loop, foreach and fused implementations".
    """
    if case.watched is not None:
        return _in_script(case.watched)
    seen = optimizer_work(case, NAME)
    if not isinstance(seen, OptimizerWork):
        return seen
    unfused = [name for name in seen.names if HAS_FUSED.fullmatch(name)]
    passes = {name: n for name, n in seen.several.items() if "_foreach_" in name}
    count = sum(passes.values()) / seen.steps
    if not unfused or len(passes) < len(seen.several) or count < FEWEST:
        return ()
    launching, working = seen.cost()
    cost = launching + working
    if cost < LEAST_SHARE * step_ns(seen.ledger):
        return ()
    # Each operator runs at least once a group, and one for each group remains.
    saved = 1 - min(passes.values()) / sum(passes.values())
    names = ", ".join(f"{name} ({amount(n / seen.steps)})" for name, n in list(passes.items())[:4])
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"unfused optimizer: {count:.0f} operators a step on lists of tensors, "
            f"{duration(cost)} ({percent(cost / step_ns(seen.ledger))} of the step)",
            evidence=(f"{unfused[0]}: a step calls {names}", seen.times(launching, working)),
            slices=seen.slices,
            cost_ns=cost,
            recoverable_ns=(0, round(saved * cost)),
            confidence="medium",
            fix="Create the optimizer with fused=True.",
            transforms=("optimizer",),
            check=CHECK,
            false_alarm="a gradient is sparse, or a parameter is not floating point: then fused is "
            "not supported.",
        ),
    )


def _in_script(steps: WatchedSteps) -> Verdict:
    unfused = [each for each in steps.setting.optimizers if not each.fused]
    single = sum(each.parameters for each in unfused if each.single) >= FEWEST_SINGLE
    usual, cost = steps.usual_share("optimizer"), round(steps.mean("optimizer"))
    if not unfused or usual < (LEAST_SINGLE if single else LEAST_WATCHED):
        return ()
    share, names = steps.share("optimizer"), ", ".join(each.name for each in unfused)
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"the optimizer takes {percent(share)} of the time, {duration(cost)} a step: "
            f"{names} is not fused",
            evidence=(
                *filter(None, map(_updates, unfused)),
                f"{percent(usual)} of the faster half of the steps",
                *evidence_of(steps, "optimizer"),
            ),
            slices=("optimizer",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=steps.variance_share("optimizer"),
            confidence="high" if single else "medium",
            fix="Create the optimizer with fused=True."
            if all(each.single for each in unfused)
            else "Create the optimizer with fused=True. Write an optimizer of your own with "
            "torch._foreach operators, or compile its step.",
            check="run `steady run SCRIPT` again",
            false_alarm="the model is large for its batch, so that the update is bound by memory "
            "however it is written.",
        ),
    )


def _updates(optimizer: SteppedOptimizer) -> str:
    """A line with the number of parameters that an optimizer updates; empty if unknown."""
    if not optimizer.parameters:
        return ""
    how = ", one after another" if optimizer.single else ""
    return f"{optimizer.name} updates {counted(optimizer.parameters, 'parameter')}{how}"
