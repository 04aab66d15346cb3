"""Name the bottleneck of a step."""

from __future__ import annotations

from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.roofline import FROM_CACHE, Roofline

REGIMES = {
    "compute-bound": "arithmetic sets the pace",
    "memory-bound": "memory traffic sets the pace",
    "kernel-bound": "kernels set the pace; no device limit identified",
    "communication-bound": "communication between devices sets the pace",
    "copy-bound": "copies set the pace",
    "launch-bound": "the GPU waits for the host to launch work",
    "input-bound": "the next batch sets the pace",
    "synchronisation-bound": "waiting for one another sets the pace",
    "python-bound": "Python or short waits set the pace, not the operators",
    "host-bound": "host-side preparation sets the pace",
    "unclassified": "the limit could not be identified",
}
"""Every regime with its meaning."""

IDLE = 0.25
"""Minimum share of the step from which waiting names the regime. Advice on single causes starts
at 5 % (data) and 15 % (launches); the regime of a whole step needs more."""
LIMITED = 0.4
"""Minimum share of the device's limits from which they name the regime."""
LEAST_KNOWN = 0.5
"""Minimum share of kernel time with known work for the device's limits to name the regime."""

_WAITS = {
    "launch-bound": ("idle_launch",),
    "input-bound": ("idle_data_wait", "cpu_data_wait"),
    "synchronisation-bound": (
        "idle_synchronisation",
        "idle_cross_stream",
        "cpu_waiting",
        "cpu_synchronisation",
    ),
    "python-bound": ("cpu_python", "cpu_script"),
    "host-bound": (
        *("idle_compile", "idle_allocation", "idle_gc"),
        *("cpu_compile", "cpu_allocation", "cpu_gc"),
    ),
    "unclassified": ("unknown",),
}
_WORK = {
    "communication-bound": ("gpu_communication", "cpu_communication"),
    "copy-bound": ("gpu_memcpy", "gpu_memset", "cpu_copy"),
}


def regime_of(ledger: Ledger | None, lines: Roofline | None = None) -> str:
    """Return the regime of a step: one of the keys of `REGIMES`.

    If waiting takes a share of `IDLE` of the step or more, the largest cause of waiting determines
    the regime. Otherwise, communication or copies determine the regime if either takes more than
    half of the working time. Otherwise, the limit that bounds most kernel time determines the
    regime, if kernels reach a share of `LIMITED` of the device's limits and the work of
    `LEAST_KNOWN` of their time is known. Kernels whose data came from a cache do not count.

    Args:
        ledger: ledger of the profiled steps; None if there are none.
        lines: roofline of their kernels; None if unknown.
    """
    if ledger is None or not ledger.total_ns:
        return "unclassified"
    waits = {regime: _share(ledger, slices) for regime, slices in _WAITS.items()}
    waiting = sum(waits.values())
    if waiting >= IDLE:
        return max(waits, key=lambda regime: waits[regime])
    for regime, slices in _WORK.items():
        if _share(ledger, slices) > (1 - waiting) / 2:
            return regime
    if _share(ledger, ("cpu_forward", "cpu_backward", "cpu_optimizer", "cpu_evaluation")):
        return "unclassified"  # recorded without operators
    return "kernel-bound" if lines is None else _limited(lines)


def _share(ledger: Ledger, slices: tuple[str, ...]) -> float:
    return ledger.share(*(name for name in slices if name in ledger.names))


def _limited(lines: Roofline) -> str:
    known = lines.known_ns >= LEAST_KNOWN * lines.busy_ns
    if not known or lines.share_of_limit is None or lines.share_of_limit < LIMITED:
        return "kernel-bound"
    bound = {"memory": 0, "compute": 0}
    for line in lines.lines:
        cached = line.bound == "memory" and (line.share_of_limit or 0.0) > FROM_CACHE
        if line.bound is not None and not cached:
            bound[line.bound] += line.known_ns
    if not any(bound.values()):
        return "kernel-bound"
    return f"{max(bound, key=lambda name: bound[name])}-bound"
