"""Find other Python threads that keep the training thread from running."""

from __future__ import annotations

import sys

from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict

NAME = "interpreter-lock"
LEAST_BUSY = 0.2
"""Minimum CPU use of another thread, in cores."""
LEAST_LOST = 0.1
"""Minimum share of the time in which the training thread does not run, though it waits neither for
data nor for a GPU. Waits between threads of an operator take a few percent."""
_WAITS = ("input_wait", "copies", "synchronisation")


def rule(case: Case) -> Verdict:
    """Report threads that run Python while the training thread waits for the interpreter's lock.

    Waits for the interpreter lock are not recorded directly. The evidence is the CPU time of other
    threads, and the time in which the training thread was blocked or waited for a core. Waits for a
    core count only up to the CPU time of the other threads. Source: "Thread State and the Global
    Interpreter Lock", Python documentation; "Scheduler Statistics", Linux documentation.
    """
    steps = case.watched
    if steps is None:
        return Abstention(NAME, "no script was watched", "run `steady run SCRIPT`")
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    busy = [other for other in steps.setting.others if other.busy >= LEAST_BUSY]
    if not locked or not busy:
        return ()
    off, wait = steps.setting.off_core, steps.setting.core_wait
    if off is None or wait is None:
        why = "the time that the training thread ran is unknown"
        return Abstention(NAME, why, "run on a kernel with /proc/self/task/*/schedstat")
    off = max(0.0, off - sum(steps.share(name) for name in _WAITS))
    lost = off + min(wait, sum(other.busy for other in busy))
    if lost < LEAST_LOST:
        return ()
    cost = round(lost * steps.step_ns)
    other = busy[0]
    where = f", mostly {other.line}" if other.line else ""
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"another Python thread holds up the steps: {other.name}{where}",
            evidence=(
                f"thread {other.name} uses {percent(other.busy)} of a core",
                f"the training thread does not run for {duration(cost)} a step: off its core for "
                f"{percent(off)} of the time, waiting for a core for {percent(wait)}",
            ),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high" if other.line else "medium",
            fix="Move the thread's work into another process (multiprocessing, DataLoader "
            "workers), or into code that releases the lock.",
            check="run `steady run SCRIPT` again without the thread",
            false_alarm="the training thread waits for something else, such as files, a network "
            "or a lock of its own.",
        ),
    )
