"""The result of watching a script's steps: where time goes, and why it varies."""

from __future__ import annotations

import msgspec

from steadytorch.results.explain import Abstention, Finding, SlowStep
from steadytorch.results.machine import DeviceFacts
from steadytorch.results.measure import HostBlock, Measurement
from steadytorch.results.shown import Shown


class LineShare(msgspec.Struct, frozen=True):
    """A line of the user's code, with its share of the stack samples.

    Attributes:
        slice: the slice that was running.
        where: the line, as `train.py:57 main, in save`.
        share: of the samples of all steps.
    """

    slice: str
    where: str
    share: float


class Watched(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of the watched steps went. Times are host times in ns.

    Attributes:
        unit: what a step is: `optimizer steps`, `batches`, `model calls` or `iterations`.
        environment: the machine.
        elapsed_s: from start to end of the watch, set-up included.
        measured: statistics of the steps, with the causes of outliers; None without steps.
        starts_ns: start of each step, shape (steps,).
        slices_ns: slice to its time in each step, shape (steps,); the slices of a step add up to
            its time.
        variance_shares: slice to its share of the variance of the steps, adding up to 1; None if
            unknown.
        why_no_variance_shares: why they are unknown, else None.
        slowest: slow steps that stand out, slowest first, with what differed.
        lines: the lines of the user's code that take most time, largest first.
        findings: as in an explanation.
        abstained: rules that lacked data.
        host: the host during the steps; None without steps.
        peak_memory_bytes: highest memory use: of the GPU's allocator, or resident host memory.
        overhead_share: cost of watching over the time of the steps: measured time of the probes,
            and CPU time of the recorders.
        ranks: rank to the mean time of each slice, over the later half of its steps; only on
            rank 0 of a job started by torchrun.
        traces: folder with the traces of slow steps; None if none were kept.
        remarks: caveats, for people.
        failed: the exception that ended the watched code, else None.
        interrupted: whether the user stopped it.
    """

    unit: str
    environment: DeviceFacts
    elapsed_s: float
    measured: Measurement | None = None
    starts_ns: tuple[int, ...] = ()
    slices_ns: dict[str, tuple[int, ...]] = {}
    variance_shares: dict[str, float] | None = None
    why_no_variance_shares: str | None = None
    slowest: tuple[SlowStep, ...] = ()
    lines: tuple[LineShare, ...] = ()
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstention, ...] = ()
    host: HostBlock | None = None
    peak_memory_bytes: int | None = None
    overhead_share: float = 0.0
    ranks: dict[int, dict[str, float]] = {}
    traces: str | None = None
    remarks: tuple[str, ...] = ()
    failed: str | None = None
    interrupted: bool = False

    def mean_slices_ns(self) -> dict[str, float]:
        """Mean ns per step of each time slice; the values add up to the mean step time."""
        return {
            name: sum(values) / len(values) for name, values in self.slices_ns.items() if values
        }
