"""Chooses among candidates: by constraints, then time, then simplicity."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from steadytorch.bench.ramp import LONG_NS, ramp
from steadytorch.errors import UsageError
from steadytorch.measure.race import LOOKS, TIE, RaceResult
from steadytorch.measure.statistics import hodges_lehmann
from steadytorch.quantities import size
from steadytorch.results.candidate import Candidate, describe
from steadytorch.transforms.precision import PRECISIONS

AUTO, CONTENDED = "auto", "contended"
OBJECTIVES = (AUTO, "latency", "p99", "throughput", CONTENDED)
P99_BLOCK, LEAST_TAIL = 69, 10
"""Iterations per block for the 99th percentile. Since 0.99^69 = 0.5, the median of the blocks'
largest samples is the 99th percentile. Slow iterations get fewer, to keep a block to a second, but
at least ten: the median is then the 93rd percentile. With 69 iterations of 0.1 s a block, a search
would run out of time before it could compare anything."""

CLAIM = 0.4
"""Share of the budget for the fewest pairs of blocks that support a claim."""


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options for a search.

    Attributes:
        objective: `latency` (call to finished result), `throughput` (period with a full queue),
            `p99` (99th percentile of the latency) or `contended` (the same beside a process that
            keeps one core busy; on a CPU); `auto` is throughput for training, whose loop does not
            wait for each step, and latency for inference.
        precision: lowest precision class allowed: same, tf32, bf16, fp16 or int8.
        tolerance: relative L2 error allowed for a lower precision; None for the class's default.
        budget_s: wall-clock seconds for the search.
        max_memory_bytes: cap on a plan's peak memory; None for no cap.
        seed: seed of the verification inputs and the block order.
    """

    objective: str = AUTO
    precision: str = "same"
    tolerance: float | None = None
    budget_s: float = 180.0
    max_memory_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for value, name, known in (
            (self.objective, "objective", OBJECTIVES),
            (self.precision, "precision", PRECISIONS),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise UsageError(
                f"tolerance {self.tolerance} is not a relative error between 0 and 1, such as 0.01"
            )
        if not self.budget_s > 0:
            raise UsageError(f"budget {self.budget_s} s is not a positive time")

    def resolved(self, is_training: bool) -> SearchOptions:
        """These options, with the objective `auto` replaced by throughput or latency."""
        if self.objective != AUTO:
            return self
        objective = "throughput" if is_training else "latency"
        return msgspec.structs.replace(self, objective=objective)

    @property
    def of_tail(self) -> bool:
        """Whether candidates are compared by the 99th percentile instead of the median."""
        return self.objective in ("p99", CONTENDED)

    @property
    def metric(self) -> str:
        """The metric to time: `period` for throughput, else `latency`."""
        return "period" if self.objective == "throughput" else "latency"


class BlockShape(msgspec.Struct, frozen=True):
    """The size of one timed block.

    Attributes:
        count: iterations kept.
        iteration_ns: expected time of one iteration, for deadlines and budgets.
    """

    count: int
    iteration_ns: float

    @property
    def expected_s(self) -> float:
        """Expected seconds of one block, discarded iterations included."""
        return (self.count + ramp(self.iteration_ns)) * self.iteration_ns * 1e-9


def block_shape(options: SearchOptions, iteration_ns: float) -> BlockShape:
    """The block shape: 5 to 10 iterations; 3 if one takes 150 ms or more, 1 from 500 ms.

    If the 99th percentile decides, a block has 10 to 69 iterations. Blocks shrink to 3 iterations
    or 1 if 12 pairs of blocks, the fewest for a claim, would exceed `CLAIM` of the budget.
    """
    if options.of_tail:
        usual = min(P99_BLOCK, max(LEAST_TAIL, 1e9 // max(iteration_ns, 1)))
    elif iteration_ns >= LONG_NS:
        usual = 1
    else:
        usual = 3 if iteration_ns >= 150e6 else min(10, max(5, 50e6 // max(iteration_ns, 1)))
    counts = sorted({int(usual), *(count for count in (3, 1) if count < usual)}, reverse=True)
    shapes = [BlockShape(count, iteration_ns) for count in counts]
    most_s = CLAIM * options.budget_s / (2 * LOOKS[0])
    return next((shape for shape in shapes if shape.expected_s <= most_s), shapes[-1])


def block_deadline_s(shape: BlockShape) -> float:
    """Timeout in seconds for timing one block."""
    return 30.0 + 20.0 * shape.expected_s


def block_statistic(options: SearchOptions, times: Sequence[int]) -> float:
    """The statistic of a block: its median, or its maximum if the 99th percentile decides."""
    return float(max(times)) if options.of_tail else float(np.median(times))


def over_memory(peak_memory_bytes: int, options: SearchOptions) -> str | None:
    """Why a candidate exceeds the memory cap, or None."""
    cap = options.max_memory_bytes
    if cap is None or peak_memory_bytes <= cap:
        return None
    return f"peaks at {size(peak_memory_bytes)}, over the cap of {size(cap)}"


def choose(
    result: RaceResult, candidates: Sequence[Candidate], peaks: Sequence[int], tie: float = TIE
) -> int:
    """Chooses the simplest surviving candidate within the tie band of the fastest.

    Simplest means fewest transforms, then least memory, then name, so that every run makes the same
    choice among equal candidates.

    Args:
        result: result of the final race.
        candidates: candidate of each arm.
        peaks: peak memory of each arm in bytes.
        tie: half-width of the tie band as a fraction.

    Returns:
        Index of the chosen arm.
    """
    centre = {
        arm: hodges_lehmann(np.log(result.times[arm])) if result.times[arm] else float("inf")
        for arm in result.survivors
    }
    fastest = min(centre.values())
    tied = [arm for arm in result.survivors if centre[arm] <= fastest + np.log1p(tie)]
    return min(tied, key=lambda a: (len(candidates[a]), peaks[a], describe(candidates[a])))
