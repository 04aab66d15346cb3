"""What is thrown away after each switch between workers: they ramp up, it is no sample."""

from __future__ import annotations

import math

DISCARD = 2
"""Iterations, at the least."""
RAMP_NS = 4e6
"""And the least time of these in inference. What ran meanwhile has taken the caches of the host: on
an H200, calls under 1 ms took up to 1.5 times as long in the first 2.4 ms, and few did later."""


def ramp(iteration_ns: float) -> int:
    """How many iterations that is.

    Args:
        iteration_ns: of one, expected.
    """
    return max(DISCARD, math.ceil(RAMP_NS / max(iteration_ns, 1.0)))
