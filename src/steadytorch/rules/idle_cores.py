"""Find CPU training in which PyTorch uses fewer threads than there are cores."""

from __future__ import annotations

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict

NAME = "idle-cores"
_PARALLEL = ("forward", "backward", "optimizer", "evaluation")


def rule(case: Case) -> Verdict:
    """Report if PyTorch's operators may use at most half of the cores available to the process.

    `torchrun` sets OMP_NUM_THREADS=1 for each process unless the variable is already set. Source:
    `torch.distributed.run`, "Note on OMP_NUM_THREADS"; "CPU threading and TorchScript inference",
    PyTorch documentation.
    """
    steps = case.watched
    if steps is None:
        return Abstention(NAME, "no script was watched", "run `steady run SCRIPT`")
    threads, cores = steps.setting.threads, steps.setting.cores
    if steps.setting.device != "cpu" or 2 * threads > cores:
        return ()
    parallel = sum(steps.mean(name) for name in _PARALLEL)
    gain = round(parallel * (1 - threads / cores))
    return (
        Finding(
            id=NAME,
            source="hardware contention",
            title=f"PyTorch runs {many(threads, 'thread')} on {many(cores, 'core')}",
            evidence=(
                f"torch.get_num_threads() is {threads}; this process may use {cores} cores",
                f"forward, backward and optimizer take {duration(parallel)} a step "
                f"({percent(parallel / steps.step_ns)})",
            ),
            slices=_PARALLEL,
            cost_ns=gain,
            recoverable_ns=(0, gain),
            confidence="medium",
            fix=f"Set OMP_NUM_THREADS={cores}, or call torch.set_num_threads({cores}). Leave cores "
            "for DataLoader workers.",
            check="run `steady run SCRIPT` again with more threads",
            false_alarm="operators are too small to share among threads, or other programs use "
            "the other cores.",
        ),
    )
