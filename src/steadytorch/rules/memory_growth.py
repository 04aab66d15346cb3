"""Find host memory that grows with every step."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, many
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.samples import samples_of, unrecorded

NAME = "memory-growth"
PARTS = 8
"""Parts of the run that must all grow: one order in 40,000 by chance."""
LEAST_RISE = 0.1
"""Minimum growth over the run, as a share of the memory at its start."""
LEAST_LATE = 1 / 3
"""Minimum part of the growth in the second half of the run. A leak has half of it there; a heap or
a cache that fills up grows less and less."""
LONG_NS = 60 * 10**9
"""Time after which growth is no heap that still fills up: in one of seven runs of 16 s, the heap of
a script looked like a leak, and stayed level in a run of a minute."""
LEAST_BYTES = 64 << 20
"""Minimum growth over the run: 38 MiB were seen where a script only saved checkpoints."""


def rule(case: Case) -> Verdict:
    """Report resident memory that keeps growing after the warm-up, as a leak does.

    A loss kept with its graph (`total += loss`), and results appended to a list, grow so. Source:
    "My model reports 'cuda runtime error(2): out of memory'", PyTorch FAQ.
    """
    samples = samples_of(case)
    column = None if samples is None else samples.column("resident_bytes")
    if samples is None or column is None:
        return unrecorded(NAME, samples, "resident_bytes", "resident memory")
    at = np.asarray(samples.recording.at_ns, dtype=np.int64)
    steady = column[
        (at >= samples.starts_ns[0]) & (at <= samples.starts_ns[0] + samples.elapsed_ns)
    ]
    if len(steady) < 2 * PARTS:
        return ()
    middles = np.asarray([np.median(part) for part in np.array_split(steady, PARTS)])
    rise = float(middles[-1] - middles[0])
    late = float(middles[-1] - (middles[PARTS // 2 - 1] + middles[PARTS // 2]) / 2)
    if not (np.diff(middles) > 0).all() or rise < max(LEAST_BYTES, LEAST_RISE * middles[0]):
        return ()
    if late < LEAST_LATE * rise:
        return ()
    each = rise * PARTS / (PARTS - 1) / samples.steps
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"memory grows by {each / 1e6:.3g} MB a step: {middles[0] / 1e9:.2f} GB to "
            f"{middles[-1] / 1e9:.2f} GB in {duration(samples.elapsed_ns)}",
            evidence=(
                f"resident memory rises in each of {PARTS} parts of {many(samples.steps, 'step')}",
            ),
            confidence="high" if samples.elapsed_ns >= LONG_NS else "medium",
            fix="Keep numbers, not tensors with their graphs: total += loss.item() or "
            "loss.detach(). Clear lists of results, and hand them on before they grow.",
            check="run `steady run SCRIPT` for longer: memory stays level",
            false_alarm="a cache fills up to its limit, such as a data set kept in memory, or the "
            "heap of a short run.",
        ),
    )
