"""The steps of a script as a watch cut them, for rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STANDS_OUT = 0.25
"""Minimum share of the variance of a slice that takes little time but makes steps uneven."""
LEAST_UNEVEN = 0.005
"""Minimum share of the time of a slice that makes steps uneven: the tie threshold of `steady
tune`."""


@dataclass(frozen=True, eq=False)
class WatchedSteps:
    """Steps after the warm-up, cut into slices of host time.

    Attributes:
        slices_ns: slice to its time in each step, float64, (steps,); they add up to the step.
        lines: slice to the lines of the user's code seen in it, with their share of its time.
    """

    slices_ns: dict[str, np.ndarray]
    lines: dict[str, tuple[tuple[str, float], ...]]

    @property
    def totals_ns(self) -> np.ndarray:
        """Time of each step, float64, (steps,)."""
        return np.sum(list(self.slices_ns.values()), axis=0)

    @property
    def step_ns(self) -> float:
        """Mean time of a step."""
        return float(self.totals_ns.mean())

    def mean(self, name: str) -> float:
        """Mean time of a slice in a step, in ns."""
        return float(self.slices_ns[name].mean())

    def share(self, name: str) -> float:
        """Share of a slice in the time of all steps."""
        return self.mean(name) / self.step_ns

    def variance_share(self, name: str) -> float | None:
        """Share of a slice in the variance of the steps; None if they do not vary."""
        total = self.totals_ns
        off = total - total.mean()
        variance = float(off @ off)
        mine = self.slices_ns[name]
        return float((mine - mine.mean()) @ off) / variance if variance else None

    def counts(self, name: str, least: float) -> bool:
        """Whether a slice takes at least a share of the time, or makes the steps uneven."""
        share, varies = self.share(name), self.variance_share(name)
        uneven = varies is not None and varies >= STANDS_OUT and share >= LEAST_UNEVEN
        return share >= least or uneven
