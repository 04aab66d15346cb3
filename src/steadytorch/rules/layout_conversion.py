"""Find kernels that only convert images between memory layouts."""

from __future__ import annotations

from collections import Counter

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import (
    CHECK,
    busy_ns,
    gpu_launches,
    longest,
    per_step,
    spent_per_step,
)
from steadytorch.traces.events import Category
from steadytorch.traces.kernel_names import converts_layout

NAME = "layout-conversion"
LEAST_SHARE = 0.02
"""Minimum share of GPU busy time. Below it, changing the layout does not pay."""


def rule(case: Case) -> Verdict:
    """Report cuDNN's `nchwToNhwc` and `nhwcToNchw` kernels, which run for NCHW images.

    Tensor cores need channels-last tensors, so cuDNN converts inputs and outputs (NVIDIA Deep
    Learning Performance, "Convolutional layers user's guide", tensor layouts in memory; PyTorch
    tutorial "Channels last memory format").
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    chosen = seen.of(Category.KERNEL) & seen.named(converts_layout)
    cost = spent_per_step(seen, chosen)
    share = cost / busy_ns(seen.ledger)
    if share <= LEAST_SHARE:
        return ()
    around = seen.operator[chosen]
    callers = Counter(seen.trace.name_of(row) for row in around[around >= 0].tolist())
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"layout conversions: {many(per_step(seen, chosen), 'kernel')} a step between "
            f"NCHW and NHWC, {duration(cost)} ({percent(share)} of GPU work)",
            evidence=(
                *map(str, longest(seen, chosen)),
                *(f"in {name} ({count})" for name, count in callers.most_common(2)),
            ),
            slices=("gpu_kernel",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high",
            fix="Convert the model and its inputs to torch.channels_last once, so that every "
            "layer runs in it.",
            transforms=("channels_last",),
            check=CHECK,
            false_alarm="an operator in between supports only NCHW: then conversions reappear "
            "around it.",
        ),
    )
