"""Kernels that only turn images from one memory layout into the other."""

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
"""Of the time that the GPU works: less is not worth a change of layout."""


def rule(case: Case) -> Verdict:
    """CuDNN's `nchwToNhwc` and `nhwcToNchw` kernels, which run where images come as NCHW.

    Tensor cores want the channels last, so cuDNN converts before and after (NVIDIA Deep Learning
    Performance, "Convolutional layers user's guide", tensor layouts in memory; PyTorch tutorial
    "Channels last memory format").
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
            f"NCHW and NHWC, {duration(cost)}, {percent(share)} of the GPU's work",
            evidence=(
                *map(str, longest(seen, chosen)),
                *(f"in {name} ({count})" for name, count in callers.most_common(2)),
            ),
            slices=("gpu_kernel",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high",
            fix="Convert model and inputs to torch.channels_last once, from the first layer to the "
            "last.",
            transforms=("channels_last",),
            check=CHECK,
            false_alarm="an operator in between that only exists for NCHW: then each switch costs "
            "a copy, and the conversions come back elsewhere.",
        ),
    )
