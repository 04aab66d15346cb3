"""Checks that a training step that replays CUDA graphs trains like the same code run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadytorch.graphs.checks import MOST_APART, NOISE_FACTOR, distance
from steadytorch.graphs.step import CapturedStep
from steadytorch.workload.feed import Targeted
from steadytorch.workload.start import Start, buffers_of, optimizer_of, parameters_of
from steadytorch.workload.workload import Workload

STEPS = 8
LOWERED = 0.5
"""Factor on the learning rates after half of the steps: a rate that is fixed shows."""


class _Run(NamedTuple):
    losses: list[Tensor]
    tensors: list[Tensor]
    random: Tensor


def replay_fault(workload: Workload, step: Callable[[], Any], start: Start) -> str | None:
    """Returns why a captured step must not serve: no replays, or a difference from eager steps.

    Graphs and eager code start from the same state and seed, and the learning rate is lowered
    halfway. The graphs and the eager steps must leave the random generator in equal states. Losses,
    weights and buffers may differ by at most `MOST_APART` or, if larger, `NOISE_FACTOR` times the
    difference between two eager runs.

    Args:
        workload: the untouched workload, as returned by `with_optimizer`.
        step: the step of a candidate, warmed up.
        start: state from which each run starts; restored at the end.
    """
    captured = getattr(step, "step", None)
    if not isinstance(captured, CapturedStep):
        return None
    one, other = (_run(workload, captured.run_eagerly, start) for _ in range(2))
    before = captured.replays
    recorded = _run(workload, captured, start)
    start.restore()
    if captured.replays - before < STEPS // 2:
        return f"the step is not replayed: {captured.reason()}"
    if not torch.equal(recorded.random, one.random):
        return "the graphs advance the random number generator differently from the eager steps"
    parts = (
        ("losses", one.losses, other.losses, recorded.losses),
        ("weights or buffers", one.tensors, other.tensors, recorded.tensors),
    )
    for what, right, again, theirs in parts:
        noise, found = distance(again, right), distance(theirs, right)
        if not found <= max(MOST_APART, NOISE_FACTOR * noise):
            return f"graphs and eager steps differ in {what}: relative error {found:.1e}"
    return None


def _run(workload: Workload, take: Callable[..., Tensor], start: Start) -> _Run:
    start.restore()
    torch.manual_seed(0)
    loss = workload.training_step.loss if workload.training_step is not None else None
    fed = workload.feed is not None and isinstance(loss, Targeted)
    targets = tuple(loss.targets) if fed and isinstance(loss, Targeted) else ()
    optimizer, losses = optimizer_of(workload), list[Tensor]()
    began = {name: p.detach().clone() for name, p in parameters_of(workload).items()}
    for number in range(STEPS):
        if number == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * LOWERED
        losses.append(take(workload.inputs, dict(workload.kwargs), targets).clone())
    moved = [p.detach() - began[name] for name, p in parameters_of(workload).items()]
    kept = [b.detach().clone() for b in buffers_of(workload).values() if b.is_floating_point()]
    return _Run(losses, [*moved, *kept], torch.cuda.get_rng_state(workload.device))
