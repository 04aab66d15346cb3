"""Find optimizers that update one parameter after another."""

from __future__ import annotations

from typing import NamedTuple

from steadytorch.findings.figures import amount, duration, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, step_ns
from steadytorch.findings.optimizer_steps import (
    HAS_FOREACH,
    HAS_FUSED,
    LEAST_SHARE,
    OptimizerWork,
    optimizer_work,
)

NAME = "single-tensor-optimizer"
FEWEST = 20
"""Minimum updates of single tensors a step. Smaller models gain little."""


class _Advice(NamedTuple):
    """How to update all parameters at once, and how sure it is that this is faster."""

    fix: str
    confidence: str
    transforms: tuple[str, ...] = ("optimizer",)


def rule(case: Case) -> Verdict:
    """Report an optimizer step of many small operators that one operator could replace.

    On a CPU, only fused implementations are known to be faster. There, foreach took 0.6 times as
    long as single tensors for 60 parameters of 32 x 32, but 2 to 5 times as long for 256 x 256
    (RMSprop, NAdam and AdamW; two virtual cores).

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
    recoverable = launching + round(saved * working)
    advice = _advice(seen)
    if advice is None or not recoverable or cost < LEAST_SHARE * step_ns(seen.ledger):
        return ()
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
            recoverable_ns=(0, recoverable),
            confidence=advice.confidence,
            fix=advice.fix,
            transforms=advice.transforms,
            check=CHECK,
            false_alarm="the optimizer is not elementwise, or memory is too small for the "
            "temporary tensors of foreach.",
        ),
    )


def _advice(seen: OptimizerWork) -> _Advice | None:
    """Advice for an optimizer; None if nothing is known to be faster."""
    if any(HAS_FUSED.fullmatch(name) for name in seen.names):
        return _Advice("Create the optimizer with fused=True.", "high")
    from_torch = any(HAS_FOREACH.fullmatch(name) for name in seen.names)
    if seen.ledger.kind == "gpu":
        if from_torch:
            return _Advice("Create the optimizer with foreach=True.", "high")
        write = "Write the update with torch._foreach operators, or compile the optimizer's step."
        return _Advice(write, "medium", ())
    if not from_torch:
        return None
    return _Advice(
        "`steady tune` measures whether foreach=True or a compiled step is faster here. On a CPU, "
        "foreach is slower for large parameters.",
        "low",
    )
