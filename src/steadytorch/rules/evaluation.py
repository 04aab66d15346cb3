"""Find steps that spend much of their time on evaluation."""

from __future__ import annotations

from steadytorch.findings.figures import duration, evidence_of, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict

NAME = "evaluation"
LEAST_SHARE = 0.2
"""Minimum share of the time, in scripts that train: a fifth is more than progress needs."""


def rule(case: Case) -> Verdict:
    """Report module calls without gradients that take much of the time of a training script.

    Calls without gradients count towards the step in which they run. Source: "Performance Tuning
    Guide", PyTorch tutorials, on validation and inference without gradients.
    """
    steps = case.watched
    if steps is None:
        return Abstention(NAME, "no script was watched", "run `steady run SCRIPT`")
    if not steps.mean("backward") or steps.share("evaluation") < LEAST_SHARE:
        return ()
    share, cost = steps.share("evaluation"), round(steps.mean("evaluation"))
    lines = steps.lines.get("evaluation", ())
    where = f", mostly {lines[0][0]}" if lines else ""
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"evaluation takes {percent(share)} of the time, {duration(cost)} a step{where}",
            evidence=evidence_of(steps, "evaluation"),
            slices=("evaluation",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=steps.variance_share("evaluation"),
            confidence="medium",
            fix="Evaluate less often or on fewer batches, with larger batches under "
            "torch.inference_mode(); or tune the evaluated model as well.",
            check="run `steady run SCRIPT` again",
            false_alarm="the calls without gradients are part of the method, such as a teacher or "
            "a target network.",
        ),
    )
