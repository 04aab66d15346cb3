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
LEAST_USED = 0.5
"""Minimum part of the growth that is in use. Gaps between large and small tensors only add free
memory: one heap grew by 133 MB in 16 s, and its free part by 171 MB."""
LEAST_BYTES = 64 << 20
"""Minimum growth over the run: 38 MiB were seen where a script only saved checkpoints."""


def rule(case: Case) -> Verdict:
    """Report resident memory that keeps growing after the warm-up, as a leak does.

    Typical causes are a loss kept with its autograd graph (`total += loss`) and results appended to
    a list. Source: "My model reports 'cuda runtime error(2): out of memory'", PyTorch FAQ.
    """
    samples = samples_of(case)
    column = None if samples is None else samples.column("resident_bytes")
    if samples is None or column is None:
        return unrecorded(NAME, samples, "resident_bytes", "resident memory")
    at = np.asarray(samples.recording.at_ns, dtype=np.int64)
    within = (at >= samples.starts_ns[0]) & (at <= samples.starts_ns[0] + samples.elapsed_ns)
    steady = column[within]
    if len(steady) < 2 * PARTS:
        return ()
    middles = _medians(steady)
    rise = float(middles[-1] - middles[0])
    late = float(middles[-1] - (middles[PARTS // 2 - 1] + middles[PARTS // 2]) / 2)
    if not (np.diff(middles) > 0).all() or rise < max(LEAST_BYTES, LEAST_RISE * middles[0]):
        return ()
    if late < LEAST_LATE * rise:
        return ()
    free = samples.recording.heap_free_bytes
    if free is not None:
        used = _medians(steady - np.asarray(free)[within])
        if used[-1] - used[0] < LEAST_USED * rise:
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
            confidence="medium" if free is None else "high",
            fix="Keep numbers, not tensors with their graphs: total += loss.item() or "
            "loss.detach(). Clear lists of results, and hand them on before they grow.",
            check="run `steady run SCRIPT` for longer: memory stays level",
            false_alarm="a cache fills up to its limit, such as a data set kept in memory.",
        ),
    )


def _medians(bytes_: np.ndarray) -> np.ndarray:
    return np.asarray([np.median(part) for part in np.array_split(bytes_, PARTS)])
