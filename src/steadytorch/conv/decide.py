"""What is chosen among engines that were timed: by pairs, by medians, and what stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steadytorch.conv.choices import ATEN
from steadytorch.conv.timing import BENCHMARK, NOISE, RACE_LOOKS, Measured
from steadytorch.errors import UnsupportedError
from steadytorch.measure.race import ALPHA
from steadytorch.measure.statistics import signed_rank_interval

KEPT = 0.03
"""An engine chosen before is kept unless another is shown to be faster by more than this."""

STEADY = 0.02
"""Spread up to which the times of an engine are steady. On an H200 683 of 690 near the fastest are;
the others go up to 0.11 (`docs/convolutions.md`)."""


def stays(times_ns: Mapping[str, Sequence[float]], incumbent: str) -> bool:
    """Whether an engine that was chosen before is to stay.

    It is, unless another is shown to be faster by more than `KEPT`: the exact interval of their
    paired blocks (signed ranks), at `ALPHA` shared out among the others, lies beyond it. Medians
    alone would let kernels of a few microseconds take turns from run to run.

    Args:
        times_ns: by choice, of blocks in the order of the rounds, which all ran from the first on;
            those that dropped out have fewer.
        incumbent: the choice made before; one that is not among them does not stay.
    """
    if incumbent not in times_ns:
        return False
    others = [name for name in times_ns if name not in (incumbent, BENCHMARK)]
    level = ALPHA / max(1, len(others))
    own = np.log(times_ns[incumbent])
    for name in others:
        count = min(len(own), len(times_ns[name]))
        slower = own[:count] - np.log(times_ns[name][:count])
        interval = signed_rank_interval(slower, level)
        if interval is not None and interval[0] > np.log1p(KEPT):
            return False
    return True


def pick(measured: Sequence[Measured]) -> Measured:
    """The choice among engines that were timed, fastest first, where none was made before.

    Within the noise band of the fastest: one that is `STEADY`, where there is one; of these the
    smallest workspace, then the name. PyTorch's own only where it is faster than all others by more
    than the band.

    Raises:
        UnsupportedError: none was timed.
    """
    timed = [m for m in measured if m.median_ns is not None and m.choice != BENCHMARK]
    if not timed:
        raise UnsupportedError("neither an engine of cuDNN nor PyTorch's own could be timed")
    engines = [m for m in timed if m.choice != ATEN]
    fastest = timed[0].median_ns or 0.0
    near = [m for m in engines if (m.median_ns or 0.0) <= fastest * (1 + NOISE)]
    if not near:
        return timed[0]
    return min(near, key=lambda m: (not _is_steady(m), m.workspace_bytes or 0, m.choice))


def _is_steady(measured: Measured) -> bool:
    """Whether the times of an engine lie together, as far as is known: too few show nothing."""
    few = measured.spread is None or measured.runs < RACE_LOOKS[0]
    return few or (measured.spread or 0.0) <= STEADY
