"""Find steps that wait for a CPU core, or lose cores to other virtual machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.measure.causes import CONTEXT_SWITCH, CPU_STEAL

NAME = "cpu-contention"
LEAST_WAIT = 0.01
"""Minimum share of time ready to run without a core: twice the tie threshold of `steady tune`.
Interrupts and kernel threads take some time on any machine."""
LEAST_POOL_WAIT = 0.02
"""The same for the other threads of an operator. They share their cores with the recorder and with
the process's own helpers, which may take up to another percent."""
LEAST_LATE = 0.005
"""Minimum share of time in outliers that a lost core explains: the tie threshold of `steady
tune`."""
LEAST_OUTLIERS = 3
"""Minimum outliers with that cause; one or two in a series happen on any machine."""
LEAST_STEAL = 0.05
"""Minimum stolen share of all cores' time. The process may use only some cores, so less says
little."""


_POOLS = (
    " If the cores must be shared: engines with thread pools of their own hold up better than "
    "OpenMP's (the extra steadytorch[cpu]; `steady tune --objective contended`), and "
    "OMP_WAIT_POLICY=passive lets waiting threads leave their cores to others."
)


@dataclass(frozen=True, eq=False)
class _Load:
    """Four signs of CPU contention, as shares of the measured time; None if not recorded.

    Attributes:
        wait: time of the measured thread ready to run without a core.
        pool_wait: the same for the worst of the other threads that compute; None on a GPU.
        late: excess time of outliers attributed to a lost core.
        steal: time of all cores that other virtual machines took.
        places: indices of these outliers.
        crowd: PyTorch's threads and the cores that they share, if these are fewer; else None.
    """

    wait: float | None
    pool_wait: float | None
    late: float
    steal: float | None
    places: np.ndarray
    crowd: tuple[int, int] | None

    @property
    def found(self) -> bool:
        """Whether any sign of contention exceeds its level on a quiet machine."""
        return (
            (self.wait or 0.0) >= LEAST_WAIT
            or self.pool
            or (self.late >= LEAST_LATE and len(self.places) >= LEAST_OUTLIERS)
            or (self.steal or 0.0) >= LEAST_STEAL
        )

    @property
    def pool(self) -> bool:
        """Whether operators wait for a pool thread that has no core to run on."""
        return (self.pool_wait or 0.0) >= LEAST_POOL_WAIT

    @property
    def share(self) -> float:
        """Estimated share of time lost: the largest of the four signs, since the signs overlap."""
        return max(self.wait or 0.0, self.pool_wait or 0.0, self.late, self.steal or 0.0)


def rule(case: Case) -> Verdict:
    """Report time lost because no CPU core was available.

    Context switches happen on every machine, so their number is no evidence. The time without a
    core is the run-queue time in the second field of /proc/<pid>/schedstat ("Scheduler Statistics",
    Linux documentation). Run-queue time counts only in host-bound steps; in GPU-bound steps, only
    outliers and stolen CPU time count.

    A multi-threaded operator ends with its slowest thread, so the longest wait of any thread is a
    lower bound of the lost time.
    """
    samples = samples_of(case)
    if samples is None:
        return unrecorded(NAME, samples, "wait_ns", "time waiting for a core")
    load = _load(samples, None if samples.on_gpu else _crowd(case))
    if not load.found:
        if load.wait is None and samples.host_bound:
            return unrecorded(NAME, samples, "wait_ns", "time waiting for a core")
        return ()
    mean = float(samples.durations_ns.mean()) / samples.group
    cost = round(load.share * mean)
    return (
        Finding(
            id=NAME,
            source="hardware contention",
            title=f"CPU cores are contended: {percent(load.share)} of the time is lost "
            f"({duration(cost)} of an average step of {duration(mean)})",
            evidence=_lines(samples, load),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=samples.variance_share(load.places),
            confidence="high" if (load.wait or 0.0) >= LEAST_WAIT else "medium",
            fix=_fix(load),
            transforms=() if samples.on_gpu else ("threads", "openvino", "onnxruntime"),
            check="run `steady explain WORKLOAD` again while `uptime` shows a load below the "
            "number of cores",
            false_alarm="the other load ran only during this measurement.",
        ),
    )


def _crowd(case: Case) -> tuple[int, int] | None:
    """PyTorch's threads and the cores that they share, if there are fewer cores than threads."""
    if case.watched is not None:
        threads, cores = case.watched.setting.threads, case.watched.setting.cores
    else:
        threads = (case.notes or {}).get("threads")
        cores = None if case.facts is None else case.facts.cores_logical
    if not isinstance(threads, int) or cores is None or threads <= cores:
        return None
    return threads, cores


def _fix(load: _Load) -> str:
    own = ""
    if load.crowd is not None:
        most = load.crowd[1]
        own = f"Call torch.set_num_threads({most}) or set OMP_NUM_THREADS={most}. "
    return (
        f"{own}Stop or move other programs on these cores, or give the process its own (taskset, "
        "cpuset, a container's CPU request). Use fewer threads than cores, data loading workers "
        f"included.{_POOLS if load.pool else ''}"
    )


def _load(samples: Samples, crowd: tuple[int, int] | None) -> _Load:
    elapsed, cpus = samples.elapsed_ns, samples.recording.cpus
    places = samples.caused_by(CONTEXT_SWITCH, CPU_STEAL)
    wait, steal = samples.rate("wait_ns"), samples.rate("steal_ns")
    waited = wait if samples.host_bound else None
    stolen = min(1.0, steal / cpus) if steal is not None and cpus else None
    pool = None if samples.on_gpu else samples.rate("pool_wait_ns")
    late = samples.excess_ns(places) * samples.steps / elapsed
    return _Load(waited, pool, late, stolen, places, crowd)


def _lines(samples: Samples, load: _Load) -> tuple[str, ...]:
    lines = []
    if load.crowd is not None:
        threads, cores = load.crowd
        lines.append(
            f"PyTorch runs {threads} threads, but this process may use {many(cores, 'core')}: they "
            "take turns"
        )
    if load.wait:
        lines.append(f"ready to run without a core for {percent(load.wait)} of the time")
    if load.pool_wait:
        lines.append(
            f"another thread of the process was without a core for {percent(load.pool_wait)}; "
            "operators of several threads wait for their last one"
        )
    if len(load.places):
        worst = float(samples.durations_ns[load.places].max() / samples.median_ns)
        lines.append(
            f"{many(len(load.places), 'outlier')} among "
            f"{many(len(samples.durations_ns), 'sample')} coincide with a lost core; the slowest "
            f"takes {worst:.1f} times the median"
        )
    if load.steal:
        lines.append(f"other virtual machines took {percent(load.steal)} of all cores' time")
    if switches := samples.rate("involuntary_switches"):
        lines.append(f"preempted {1e9 * switches:.0f} times a second")
    return tuple(lines)
