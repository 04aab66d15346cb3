"""Find time that a training script spends outside loading, model, backward and optimizer."""

from __future__ import annotations

from steadytorch.findings.figures import duration, evidence_of, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict

NAME = "script-work"
LEAST_SHARE = 0.1
"""Minimum share of the time: zeroing gradients and logging take a few percent of a short step."""


def rule(case: Case) -> Verdict:
    """Report a script's time outside the loader, the model, the backward pass and the optimizer.

    Time in PyTorch's functions for losses, clipping and schedules does not count. Typical causes
    are checkpoints, metrics, logging and printing; the device idles meanwhile unless work is
    queued. Stack sampling finds the source lines. Source: "Asynchronous saving with Distributed
    Checkpoint" and "Performance Tuning Guide", PyTorch tutorials.
    """
    steps = case.watched
    if steps is None:
        return Abstention(NAME, "no script was watched", "run `steady run SCRIPT`")
    own = 1 - steps.routine
    if not steps.counts("rest", LEAST_SHARE, own):
        return ()
    share, cost = own * steps.share("rest"), round(own * steps.mean("rest"))
    lines = steps.lines.get("rest", ())
    where = f", mostly {lines[0][0]}" if lines else ""
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"the script's own code takes {percent(share)} of the time, "
            f"{duration(cost)} a step{where}",
            evidence=evidence_of(steps, "rest"),
            slices=("rest",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=steps.variance_share("rest"),
            confidence="high" if lines else "medium",
            fix="Do this work every N steps instead of in each, or in another thread or process. "
            "Save checkpoints asynchronously; keep metrics on the device and read them together.",
            check="run `steady run SCRIPT` again",
            false_alarm="a part of the model runs in plain functions, which no module call shows; "
            "or the host is ahead of the GPU here and nothing waits for it.",
        ),
    )
