"""Find optimizers with many parameter groups of equal hyper-parameters."""

from __future__ import annotations

from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, step_ns
from steadytorch.findings.optimizer_steps import OptimizerWork, optimizer_work

NAME = "equal-groups"
FEWEST = 4
"""Minimum number of groups that merging saves."""


def rule(case: Case) -> Verdict:
    """Report parameter groups that could be merged, since each group launches its own operators.

    Source: PyTorch, `torch.optim`, "per-parameter options": a step runs the implementation once for
    each group.
    """
    seen = optimizer_work(case, NAME)
    if not isinstance(seen, OptimizerWork):
        return seen
    if case.workload is None or case.workload.training_step is None:
        return Abstention(
            NAME,
            "a trace does not record the optimizer's parameter groups",
            "run `steady explain WORKLOAD` on the training workload",
        )
    # Not imported for trace files: PyTorch takes seconds to load.
    from steadytorch.transforms.optimizer import peek_optimizer
    from steadytorch.workload.update import merged

    groups = peek_optimizer(case.workload).param_groups
    count, left = len(groups), len(merged(groups))
    if count - left < FEWEST:
        return ()
    launching, working = seen.cost()
    share = (count - left) / count * _lasting(seen, count)
    # Kernels on the GPU move as many bytes after merging.
    recoverable = launching if seen.ledger.kind == "gpu" else launching + working
    cost = launching + working
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"equal parameter groups: {count} where {left} would do; the optimizer takes "
            f"{duration(cost)} ({percent(cost / step_ns(seen.ledger))} of the step)",
            evidence=(
                f"{count - left} of {count} parameter groups repeat the hyper-parameters of "
                "another",
                seen.times(launching, working),
            ),
            slices=seen.slices,
            cost_ns=round(share * cost),
            recoverable_ns=(0, round(share * recoverable)),
            confidence="medium",
            fix="Put parameters with equal hyper-parameters into one group.",
            transforms=("optimizer",),
            check=CHECK,
            false_alarm="the hyper-parameters of these groups differ later, for example by a "
            "schedule for each layer.",
        ),
    )


def _lasting(seen: OptimizerWork, groups: int) -> float:
    """Share of optimizer operators left with fused=True, which runs one operator per group.

    Fusing removes the other operators without merging groups, so the rules about unfused optimizers
    claim that saving.
    """
    if any("_fused_" in name for name in seen.several):
        return 1.0
    operators = (seen.single.total() + seen.several.total()) / seen.steps
    return min(1.0, groups / max(1.0, operators))
