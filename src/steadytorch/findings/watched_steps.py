"""Steps of a watched script, as input of the diagnosis rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

STANDS_OUT = 0.25
"""Minimum share of the variance of a slice that takes little time but makes steps uneven."""
LEAST_UNEVEN = 0.005
"""Minimum share of the time of a slice that makes steps uneven: the tie threshold of `steady
tune`."""


@dataclass(frozen=True)
class BusyThread:
    """A Python thread of the script other than the watched thread.

    Attributes:
        name: its name.
        busy: CPU time over the time of the steps.
        line: the line of the user's code seen most in it; empty if there is none.
    """

    name: str
    busy: float
    line: str = ""


@dataclass(frozen=True)
class SteppedOptimizer:
    """An optimizer whose `step` ran in the script.

    Attributes:
        name: its class.
        fused: whether all its parameter groups use the fused implementation.
        parameters: parameters with a gradient in the groups that are not fused; 0 if unknown.
        single: whether these are updated one after another although the class has a fused
            implementation.
    """

    name: str
    fused: bool
    parameters: int = 0
    single: bool = False


@dataclass(frozen=True)
class Setting:
    """Configuration and load of the watched process.

    Attributes:
        device: `cpu` or `cuda`.
        threads: threads of PyTorch's operators.
        cores: cores for this process: those allowed, over the processes of the job here.
        optimizers: the optimizers that stepped, one for each class.
        modes: debugging modes and the share of the samples in which each was on.
        off_core: share of the time in which the watched thread neither ran nor waited for a
            core; None if unknown.
        core_wait: share of the time in which it was ready to run without a core; None if unknown.
        others: the busiest Python threads beside it.
    """

    device: str = "cpu"
    threads: int = 1
    cores: int = 1
    optimizers: tuple[SteppedOptimizer, ...] = ()
    modes: tuple[tuple[str, float], ...] = ()
    off_core: float | None = None
    core_wait: float | None = None
    others: tuple[BusyThread, ...] = ()


@dataclass(frozen=True, eq=False)
class WatchedSteps:
    """Steps of a script after warm-up, each divided into named slices of host time.

    Attributes:
        slices_ns: slice to its time in each step, float64, (steps,); they add up to the step.
        lines: slice to the lines of the user's code seen in it, with their share of its time.
            Lines of the function seen most come first.
        setting: how the process is set up.
        routine: share of `rest` in PyTorch's own functions for losses, clipping and schedules.
        rank: the rank of this process in its job.
        ranks: rank to the mean time of each slice of a step and its standard error, in ns, this
            rank included; empty if there are no others, or another rank collects the times.
        contended: indices of slow steps whose excess was mostly spent waiting for a core.
    """

    slices_ns: dict[str, np.ndarray]
    lines: dict[str, tuple[tuple[str, float], ...]]
    setting: Setting = Setting()
    routine: float = 0.0
    rank: int = 0
    ranks: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    contended: tuple[int, ...] = ()

    @property
    def totals_ns(self) -> np.ndarray:
        """Duration of each step in ns, float64, shape (steps,)."""
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

    def usual_share(self, name: str) -> float:
        """Share of a slice in the time of the faster half of the steps.

        Waiting for cores lengthens multi-threaded slices most, and so distorts `share`.
        """
        totals = self.totals_ns
        fast = totals <= np.median(totals)
        return float(self.slices_ns[name][fast].sum() / totals[fast].sum())

    def variance_share(self, name: str) -> float | None:
        """Share of a slice in the variance of the step times; None if step times do not vary."""
        total = self.totals_ns
        off = total - total.mean()
        variance = float(off @ off)
        mine = self.slices_ns[name]
        return float((mine - mine.mean()) @ off) / variance if variance else None

    def counts(self, name: str, least: float, part: float = 1.0) -> bool:
        """Whether a slice takes at least the share `least` of the time, or makes steps uneven.

        The step in which the slice takes longest is excluded, because a single event may not recur.
        Contended steps are excluded too, because chance decides which slice waits for a core.

        Args:
            name: the slice.
            least: minimum share of the time.
            part: share of the slice to judge; the same share of its variance is assumed.
        """
        out = {int(self.slices_ns[name].argmax()), *self.contended}
        rest = [step for step in range(len(self.totals_ns)) if step not in out]
        if not rest:
            return False
        slices = {k: column[rest] for k, column in self.slices_ns.items()}
        usual = replace(self, slices_ns=slices, contended=())
        share, varies = part * usual.share(name), part * (usual.variance_share(name) or 0.0)
        return share >= least or (varies >= STANDS_OUT and share >= LEAST_UNEVEN)
