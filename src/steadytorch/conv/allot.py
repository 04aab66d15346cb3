"""Choosing for all problems of a workload: time shared out, faults kept to the one they are of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from steadytorch.conv.choices import ATEN, Choice, read_choice
from steadytorch.conv.choose import Options, Outcome, choose, first_sound
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.timing import device_answers
from steadytorch.errors import one_line

LEAST_S = 0.5
"""For one convolution: what listing, building and timing its engines takes on an H200 where it is
small."""


SPARE = 2.0
"""Times its share that a problem may take: most need less than theirs."""


class Result(NamedTuple):
    """What came of one problem.

    Attributes:
        choice: how it is to run; None to leave it to PyTorch.
        outcome: what was found; None where there is nothing, and without times where an engine was
            taken untimed.
        reason: why it was not timed; None where it was.
    """

    choice: Choice | None
    outcome: Outcome | None = None
    reason: str | None = None


def choose_all(
    options_of: Mapping[ConvProblem, Options],
    counts: Mapping[ConvProblem, int],
    before: Mapping[str, Choice],
    device: torch.device,
    end: float,
    grace_s: float,
) -> dict[str, Result]:
    """What comes of each problem, by key.

    Args:
        options_of: the problems; what one may take is set here.
        counts: how often each occurs.
        before: chosen before, by key.
        device: a CUDA device.
        end: of choosing, on the clock `perf_counter`.
        grace_s: seconds after it, for those that were not reached.
    """
    found: dict[str, Result] = {}
    weights = {problem: problem.traffic_bytes * counts[problem] for problem in options_of}
    # The largest first: they matter most where time runs out.
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
    """Seconds for the first of the problems that are left.

    Each has `LEAST_S`, and what the time left has beyond that is shared out by weight, `SPARE`
    times over.

    Args:
        weights: of the problems, that of the first first.
        left_s: seconds left for all of them.
    """
    beyond_s = max(0.0, left_s - LEAST_S * len(weights))
    return min(left_s, LEAST_S + min(1.0, SPARE * weights[0] / sum(weights)) * beyond_s)


def _attempted(work: Callable[..., Outcome], *given: Any) -> Result:
    """What was found; where it raised, PyTorch's own and the reason."""
    try:
        outcome = work(*given)
    except Exception as fault:
        reason = one_line(fault)
    else:
        return Result(read_choice(outcome.choice), outcome)
    # After the handler, which holds the frames that the fault passed, and their tensors.
    if device_answers():
        torch.cuda.empty_cache()
    return Result(None, None, reason)


def _unreached(
    problem: ConvProblem,
    options: Options,
    before: Choice | None,
    device: torch.device,
    late: bool,
) -> Result:
    """What was chosen before if it is sound, else the first that is, if it is not too late."""
    alive = device_answers()
    reason = "the time ran out before" if alive else "the device failed at another before"
    own = before is not None and before.engine == ATEN
    if own or late or not alive:
        return Result(before if own else None, None, reason)
    result = _attempted(first_sound, problem, device, options, before)
    if result.outcome is None:
        return result._replace(reason=f"{reason}, and {result.reason}")
    kept = result.choice == before
    what = "the engine chosen earlier, which" if kept else "the first of cuDNN's list that"
    return result._replace(reason=f"{reason}; this is {what} verifies")
