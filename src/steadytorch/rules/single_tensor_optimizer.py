"""Find optimizers that update one parameter after another."""

from __future__ import annotations

from steadytorch.findings.figures import amount, duration, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, step_ns
from steadytorch.findings.optimizer_steps import OptimizerWork, optimizer_work

NAME = "single-tensor-optimizer"
FEWEST = 20
"""Minimum updates of single tensors a step. Smaller models gain little."""


def rule(case: Case) -> Verdict:
    """Report an optimizer step of many small operators that one operator could replace.

    Source: PyTorch, `torch.optim` (foreach and fused implementations, "how to use the for-loop,
    foreach and fused implementations"); PyTorch "Performance Tuning Guide".
    """
    seen = optimizer_work(case, NAME)
    if not isinstance(seen, OptimizerWork):
        return seen
    steps = seen.steps
    count = seen.single.total() / steps
    if seen.several or count < FEWEST:
        return ()
    tensors = max(seen.single.values()) / steps
    # One pass would replace them all: at best tensors / count of the work remains.
    saved = 1 - tensors / count
    launching, working = seen.cost()
    cost = launching + working
    names = ", ".join(f"{name} ({amount(n / steps)})" for name, n in seen.single.most_common(4))
    share = percent(cost / step_ns(seen.ledger))
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"single-tensor optimizer: {count:.0f} operators a step on single tensors, "
            f"{duration(cost)} ({share} of the step)",
            evidence=(
                f"{seen.names[0]}: a step calls {names}",
                seen.times(launching, working),
            ),
            slices=seen.slices,
            cost_ns=cost,
            recoverable_ns=(0, launching + round(saved * working)),
            confidence="high",
            fix="Create the optimizer with fused=True, or with foreach=True if it has no fused "
            "implementation.",
            transforms=("optimizer",),
            check=CHECK,
            false_alarm="the optimizer is not elementwise, or memory is too small for the "
            "temporary tensors of foreach.",
        ),
    )
