"""Choose engines for all convolutions of a workload: divide the time and isolate faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from steadytorch.conv.choices import ATEN, Choice, read_choice
from steadytorch.conv.choose import ChoiceOptions, ConvOutcome, choose, first_sound
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.timing import device_answers
from steadytorch.errors import one_line

LEAST_S = 0.5
"""Minimum time per problem: on an H200, it is enough for the engines of a small convolution."""


SPARE = 2.0
"""A problem may take this multiple of its share, because most problems need less than theirs."""


class Result(NamedTuple):
    """Result for one problem.

    Attributes:
        choice: how to run the convolution; None for PyTorch's own.
        outcome: the measurements, or None; without times if the engine was chosen without timing.
        reason: why no engine was timed; None if engines were timed.
    """

    choice: Choice | None
    outcome: ConvOutcome | None = None
    reason: str | None = None


def choose_all(
    options_of: Mapping[ConvProblem, ChoiceOptions],
    counts: Mapping[ConvProblem, int],
    before: Mapping[str, Choice],
    device: torch.device,
    end: float,
    grace_s: float,
) -> dict[str, Result]:
    """Choose engines for all convolution problems; return the results by problem key.

    Args:
        options_of: options of each problem; their `seconds` are an upper limit.
        counts: number of occurrences of each problem.
        before: earlier choices, by key.
        device: a CUDA device.
        end: deadline, on the clock `perf_counter`.
        grace_s: further seconds to find untimed engines for problems that were not reached.
    """
    found: dict[str, Result] = {}
    weights = {problem: problem.traffic_bytes * counts[problem] for problem in options_of}
    # Largest first: they matter most if time runs out.
    waiting = sorted(weights, key=weights.__getitem__, reverse=True)
    with torch.no_grad():
        while waiting and device_answers() and (left_s := end - time.perf_counter()) > 0:
            seconds = share_s([weights[problem] for problem in waiting], left_s)
            problem = waiting.pop(0)
            options = options_of[problem]
            within = msgspec.structs.replace(options, seconds=min(options.seconds, seconds))
            found[problem.key] = _attempted(
                choose, problem, device, within, before.get(problem.key)
            )
        for problem in waiting:
            late = time.perf_counter() > end + grace_s
            earlier = before.get(problem.key)
            found[problem.key] = _unreached(problem, options_of[problem], earlier, device, late)
    return found


def share_s(weights: Sequence[float], left_s: float) -> float:
    """Time limit for choosing the engine of the next problem, in seconds.

    Each problem gets at least `LEAST_S` seconds while time remains. The time beyond `LEAST_S` per
    problem is divided by weight; the next problem may take `SPARE` times its share.

    Args:
        weights: weights of the remaining problems, the next one first.
        left_s: seconds left for all of them.
    """
    beyond_s = max(0.0, left_s - LEAST_S * len(weights))
    return min(left_s, LEAST_S + min(1.0, SPARE * weights[0] / sum(weights)) * beyond_s)


def _attempted(work: Callable[..., ConvOutcome], *given: Any) -> Result:
    """Run `work`; if it raises, choose PyTorch's own convolution and return the reason."""
    try:
        outcome = work(*given)
    except Exception as fault:
        reason = one_line(fault)
    else:
        return Result(read_choice(outcome.choice), outcome)
    # Not in the `except` block: the exception holds frames, and they hold tensors.
    if device_answers():
        torch.cuda.empty_cache()
    return Result(None, None, reason)


def _unreached(
    problem: ConvProblem,
    options: ChoiceOptions,
    before: Choice | None,
    device: torch.device,
    late: bool,
) -> Result:
    """Choose untimed: the earlier choice if it verifies, else the first engine that verifies.

    If `late`, PyTorch's own convolution is used.
    """
    alive = device_answers()
    reason = "the time ran out before" if alive else "the device failed at an earlier problem"
    own = before is not None and before.engine == ATEN
    if own or late or not alive:
        return Result(before if own else None, None, reason)
    result = _attempted(first_sound, problem, device, options, before)
    if result.outcome is None:
        return result._replace(reason=f"{reason}, and {result.reason}")
    kept = result.choice == before
    what = "the engine chosen earlier, which" if kept else "the first of cuDNN's list that"
    return result._replace(reason=f"{reason}; this is {what} verifies")
