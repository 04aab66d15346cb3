"""Find convolution biases that the following batch norm makes redundant."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from steadytorch.findings.figures import amount, duration
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, PROFILE, SHAPES
from steadytorch.findings.host_calls import steps_of
from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.launches import Operators, launches_of, operators_of
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.operands import NotRecordedError, Operands

NAME = "bias-before-batch-norm"

CONVOLUTIONS = frozenset({"aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"})
BATCH_NORMS = frozenset(
    {"aten::batch_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm"}
    | {"aten::_batch_norm_impl_index", "aten::_native_batch_norm_legit"}
)
_BIAS, _TRAINING = 2, 5
"""Positions in the schemas of convolutions and batch norms."""


class _Pair(NamedTuple):
    """Trace rows of a convolution with a bias and of the batch norm after it."""

    convolution: int
    batch_norm: int


def rule(case: Case) -> Verdict:
    """Report a convolution with a bias whose next operator is a batch norm over its channels.

    Source: PyTorch "Performance Tuning Guide", disable bias for convolutions directly followed by a
    batch norm: the subtracted mean, or the added shift, absorbs the bias.
    """
    if case.trace is None or case.ledger is None:
        return Abstention(NAME, "no steps were profiled", PROFILE)
    operators = operators_of(case.trace)
    convolutions = _outermost(operators, operators.named(CONVOLUTIONS))
    # The capture may run a settling step outside the marks.
    begun = case.trace.events.start_ns[convolutions]
    convolutions = convolutions[steps_of(case.ledger, begun) >= 0]
    if not len(convolutions) or not operators.named(BATCH_NORMS).any():
        return ()
    if (case.trace.events.inputs[convolutions] < 0).all():
        return Abstention(NAME, "input shapes were not recorded, so biases are unknown", SHAPES)
    pairs = _pairs(case.trace, convolutions)
    if not pairs:
        return ()
    steps = max(1, len(case.ledger.steps))
    training = any(_trains(case.trace, pair) for pair in pairs)
    cost = _cost_ns(case.trace, case.ledger, pairs) // steps
    shapes = Counter(_shape(case.trace, pair) for pair in pairs)
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"redundant bias before batch norm: {amount(len(pairs) / steps)} a step"
            f"{f', {duration(cost)}' if cost else ''}",
            evidence=(
                *(f"input and weight {shape} ({n})" for shape, n in shapes.most_common(2)),
                f"kernels that add these biases take {duration(cost)} a step"
                if cost
                else "no separate kernel adds these biases",
            ),
            slices=("gpu_kernel",) if case.ledger.kind == "gpu" else (),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high" if cost else "low",
            fix="Create these convolutions with bias=False."
            if training
            else "Fold the batch norms into the convolutions, or train with bias=False.",
            transforms=() if training else ("fold_batch_norm",),
            check=CHECK,
            false_alarm="the convolution's output is also used elsewhere. With trained weights, "
            "move the bias into the batch norm before removing it.",
        ),
    )


def _outermost(operators: Operators, chosen: np.ndarray) -> np.ndarray:
    """Trace rows of the chosen operators that no other chosen operator calls."""
    above = operators.parent[chosen]
    inside = np.zeros(len(chosen), dtype=bool)
    inside[chosen] = np.where(above >= 0, operators.nearest(chosen)[above] >= 0, False)
    return np.flatnonzero(chosen & ~inside)


def _pairs(trace: Trace, convolutions: np.ndarray) -> list[_Pair]:
    pairs = []
    events = trace.events
    for thread in np.unique(events.thread[convolutions]):
        rows = np.flatnonzero((events.category == Category.CPU_OP) & (events.thread == thread))
        mine = convolutions[events.thread[convolutions] == thread]
        following = np.searchsorted(events.start_ns[rows], events.end_ns[mine])
        for row, place in zip(mine.tolist(), following.tolist(), strict=True):
            after = _next(trace, rows[place : place + 4].tolist())
            if after is not None and _fits(trace, row, after):
                pairs.append(_Pair(row, after))
    return pairs


def _next(trace: Trace, rows: list[int]) -> int | None:
    """Trace row of the next operator, if it is a batch norm; None otherwise.

    In training, the increment of `num_batches_tracked` may come before the batch norm.
    """
    for row in rows:
        name = trace.name_of(row)
        if name in BATCH_NORMS:
            return row
        if name not in ("aten::add_", "aten::add") or _shape_of(trace, row, 0) != ():
            return None
    return None


def _fits(trace: Trace, convolution: int, batch_norm: int) -> bool:
    weight, normed = _shape_of(trace, convolution, 1), _shape_of(trace, batch_norm, 0)
    bias = _shape_of(trace, convolution, _BIAS)
    if not weight or not normed or len(normed) < 2 or bias is None:
        return False
    return bias == (normed[1],) and len(weight) == len(normed)


def _shape_of(trace: Trace, row: int, position: int) -> tuple[int, ...] | None:
    try:
        return Operands(trace.inputs_of(row) or {}).shape(position)
    except NotRecordedError:
        return None


def _shape(trace: Trace, pair: _Pair) -> str:
    shapes = [_shape_of(trace, pair.convolution, position) or () for position in (0, 1)]
    return " and ".join(str(list(shape)) for shape in shapes)


def _trains(trace: Trace, pair: _Pair) -> bool:
    try:
        return Operands(trace.inputs_of(pair.batch_norm) or {}).flag(_TRAINING)
    except NotRecordedError:
        return False


def _cost_ns(trace: Trace, ledger: Ledger, pairs: list[_Pair]) -> int:
    """Time of kernels that only add a bias within the given convolutions, in ns."""
    if ledger.kind != "gpu":
        return 0
    seen, operators = launches_of(trace, ledger), operators_of(trace)
    mine = np.zeros(len(trace.events), dtype=bool)
    mine[[pair.convolution for pair in pairs]] = True
    within = operators.nearest(mine)[seen.operator] >= 0
    adds = operators.named(("aten::add_", "aten::add"))[seen.operator]
    return int(seen.length_ns[(seen.operator >= 0) & within & adds].sum())
