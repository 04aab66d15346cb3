"""What taking the time costs, so that every measurement can say it."""

from __future__ import annotations

import numpy as np

from steadytorch.errors import UsageError
from steadytorch.measure.sampler import Sampler


def probe_overhead(sampler: Sampler, count: int) -> float:
    """Time that the sampler adds to an iteration at the most, in ns.

    It is the median period of a step that does nothing. Where a device works while the host takes
    the time, part of it is hidden, so a real iteration suffers no more than this.

    Args:
        sampler: takes the periods.
        count: iterations to take; a few hundred last well under 10 ms.

    Raises:
        UsageError: `count` is below one.
    """
    if count < 1:
        raise UsageError(f"the overhead of a probe needs at least one iteration, not {count}")
    periods, _ = sampler.periods(_nothing, count)
    return float(np.median(periods))


def _nothing() -> None:
    """The empty step."""
