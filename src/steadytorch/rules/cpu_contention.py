"""The thread that feeds the device waits for a core, or the machine under it takes cores away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.measure.causes import CONTEXT_SWITCH, CPU_STEAL

NAME = "cpu-contention"
LEAST_WAIT = 0.01
"""Of the time, ready to run without a core: twice what `steady tune` takes for a tie. Interrupts
and the kernel's own threads take some time on any machine."""
LEAST_LATE = 0.005
"""Of the time, in outliers that a lost core explains: what `steady tune` takes for a tie."""
LEAST_OUTLIERS = 3
"""Outliers with that cause; one or two in a series happen on any machine."""
LEAST_STEAL = 0.05
"""Of the time of all the machine's cores. A process may have a part of these, so that less says
little about it."""


@dataclass(frozen=True, eq=False)
class _Load:
    """Three kinds of evidence as shares of the time; None where not recorded.

    Attributes:
        wait: of the measured thread's time, ready to run and without a core.
        late: excess of the outliers put down to a lost core.
        steal: of the time of all the machine's cores, taken by other virtual machines.
        places: these outliers.
    """

    wait: float | None
    late: float
    steal: float | None
    places: np.ndarray

    @property
    def found(self) -> bool:
        """Whether any of them is more than a quiet machine shows."""
        return (
            (self.wait or 0.0) >= LEAST_WAIT
            or (self.late >= LEAST_LATE and len(self.places) >= LEAST_OUTLIERS)
            or (self.steal or 0.0) >= LEAST_STEAL
        )

    @property
    def share(self) -> float:
        """Of the time, what it costs: the largest of the three, which see the same time."""
        return max(self.wait or 0.0, self.late, self.steal or 0.0)


def rule(case: Case) -> Verdict:
    """Decided by time alone: switches happen on every machine, and their number proves nothing.

    Time on the run queue is the kernel's own account ("Scheduler Statistics", Linux documentation,
    the second field of /proc/<pid>/schedstat). It counts where a delay of the host delays the step;
    a step bound by the GPU only has its outliers.
    """
    samples = samples_of(case)
    if samples is None:
        return unrecorded(NAME, samples, "wait_ns", "waiting for a core")
    load = _load(samples)
    if not load.found:
        if load.wait is None and samples.host_bound:
            return unrecorded(NAME, samples, "wait_ns", "waiting for a core")
        return ()
    mean = float(samples.durations_ns.mean()) / samples.group
    cost = round(load.share * mean)
    return (
        Finding(
            id=NAME,
            source="hardware contention",
            title=f"cores are contended: {percent(load.share)} of the time is lost "
            f"({duration(cost)} of a step's {duration(mean)} on average)",
            evidence=_lines(samples, load),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=samples.variance_share(load.places),
            confidence="high" if (load.wait or 0.0) >= LEAST_WAIT else "medium",
            fix="Stop or move what else runs on these cores, give the process cores of its own "
            "(taskset, cpuset, a CPU request in the container), and use fewer threads than cores, "
            "data loading workers included.",
            transforms=() if samples.on_gpu else ("threads",),
            check="`steady explain WORKLOAD` again while `uptime` shows a load below the number of "
            "cores",
            false_alarm="the load was there for the time of this run only.",
        ),
    )


def _load(samples: Samples) -> _Load:
    elapsed, cpus = samples.elapsed_ns, samples.recording.cpus
    places = samples.caused_by(CONTEXT_SWITCH, CPU_STEAL)
    wait, steal = samples.rate("wait_ns"), samples.rate("steal_ns")
    waited = wait if samples.host_bound else None
    stolen = min(1.0, steal / cpus) if steal is not None and cpus else None
    return _Load(waited, samples.excess_ns(places) * samples.steps / elapsed, stolen, places)


def _lines(samples: Samples, load: _Load) -> tuple[str, ...]:
    lines = []
    if load.wait:
        lines.append(f"ready to run, without a core: {percent(load.wait)} of the time")
    if len(load.places):
        worst = float(samples.durations_ns[load.places].max() / samples.median_ns)
        lines.append(
            f"{many(len(load.places), 'outlier')} in {many(len(samples.durations_ns), 'sample')} "
            f"fall on a lost core; the slowest takes {worst:.1f} times the median"
        )
    if load.steal:
        lines.append(f"other virtual machines took {percent(load.steal)} of all cores' time")
    if switches := samples.rate("involuntary_switches"):
        lines.append(f"made to give up a core {1e9 * switches:.0f} times a second")
    return tuple(lines)
