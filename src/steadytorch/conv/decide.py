"""Choose among timed engines: keep the earlier choice by paired tests, or pick by medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steadytorch.conv.choices import ATEN
from steadytorch.conv.timing import BENCHMARK, NOISE, RACE_LOOKS, Measured
from steadytorch.errors import UnsupportedError
from steadytorch.measure.race import ALPHA
from steadytorch.measure.statistics import signed_rank_interval

KEPT = 0.03
"""The earlier choice is kept unless another engine is shown to be faster by more than this."""

STEADY = 0.02
"""Maximum spread of steady times. On an H200, 683 of 690 engines near the fastest are below it; the
others reach up to 0.11 (`docs/convolutions.md`)."""


def stays(times_ns: Mapping[str, Sequence[float]], incumbent: str) -> bool:
    """Whether to keep the earlier choice.

    The earlier choice is kept unless another engine is shown to be faster by more than `KEPT`. The
    test is an exact signed-rank interval of paired blocks, at level `ALPHA` divided by the number
    of other engines. With medians alone, the choice between kernels of a few microseconds would
    change from run to run.

    Args:
        times_ns: block times by choice, in the order of the rounds. All start with the first round;
            engines that dropped out have fewer.
        incumbent: the earlier choice; returns False if it is not in `times_ns`.
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
    """Choose among timed engines (sorted, fastest first) without an earlier choice.

    Of the engines within `NOISE` of the fastest, steady ones win, then the smallest workspace, then
    the name. PyTorch's own convolution is chosen only if it beats all engines by more than `NOISE`.

    Raises:
        UnsupportedError: nothing was timed.
    """
    timed = [m for m in measured if m.median_ns is not None and m.choice != BENCHMARK]
    if not timed:
        raise UnsupportedError("timing failed for every cuDNN engine and for PyTorch's own")
    engines = [m for m in timed if m.choice != ATEN]
    fastest = timed[0].median_ns or 0.0
    near = [m for m in engines if (m.median_ns or 0.0) <= fastest * (1 + NOISE)]
    if not near:
        return timed[0]
    return min(near, key=lambda m: (not _is_steady(m), m.workspace_bytes or 0, m.choice))


def _is_steady(measured: Measured) -> bool:
    """Whether the spread of an engine's times is at most `STEADY`; True with too few times."""
    few = measured.spread is None or measured.runs < RACE_LOOKS[0]
    return few or (measured.spread or 0.0) <= STEADY
