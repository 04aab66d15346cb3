"""The GPU, or the step on a CPU, waits for the next batch."""

from __future__ import annotations

from steadytorch.findings.figures import duration, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import by_prefetch, step_ns
from steadytorch.findings.host_calls import tally
from steadytorch.traces.evidence import RANGES, Evidence, by_name, evidence

NAME = "input-pipeline"
LEAST_SHARE = 0.05
"""Of the step: the profiler's own TensorBoard plug-in advises on the loader from 5 % on (Kineto,
`tb_plugin`, "DataLoader" recommendation)."""

_SLICE = {"gpu": "idle_data_wait", "cpu": "cpu_data_wait"}


def rule(case: Case) -> Verdict:
    """Time in which nothing runs because the loader has not delivered.

    Only waiting that keeps the GPU idle counts: a loader that works while the GPU does costs
    nothing. Practice: "Performance Tuning Guide", PyTorch tutorials, on workers and pinned memory.
    """
    if case.trace is None or case.ledger is None:
        why = "no trace: the times of a workload do not tell what it waits for"
        return Abstention(NAME, why, _RECAPTURE)
    ledger, name = case.ledger, _SLICE[case.ledger.kind]
    share = ledger.share(name)
    if share == 0 and not (evidence(case.trace) == Evidence.DATA_WAIT).any():
        return Abstention(NAME, "nothing in the trace is named as a data loader", _RECAPTURE)
    if share <= LEAST_SHARE:
        return ()
    wait_ns = round(ledger.mean(name))
    owners, lengths = ledger.idle_of(name)
    rows = owners[owners >= 0]
    single = len(by_name(case.trace, RANGES, r".*SingleProcessDataLoaderIter.*")) > 0
    idle = "the GPU is idle" if ledger.kind == "gpu" else "nothing is computed"
    lines = [
        f"{idle} for {duration(wait_ns)} of a step's {duration(step_ns(ledger))} while the "
        f"loader prepares the batch: {tally(case.trace, rows)}",
        f"the longest wait: {duration(int(lengths[0]))}" if len(lengths) else "",
        "the loader runs in the training process itself (no worker processes)" if single else "",
    ]
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"input pipeline: {idle} {percent(share)} of the step, waiting for data",
            evidence=tuple(line for line in lines if line),
            slices=(name,),
            cost_ns=wait_ns,
            recoverable_ns=(0, wait_ns),
            variance_share=variance_of(case, name),
            confidence="high",
            fix=_FIX_SINGLE if single else _FIX,
            transforms=by_prefetch(case),
            check="profile the training loop again and run `steady explain TRACE`",
            false_alarm="the first batch of an epoch waits for workers to start: a trace of it "
            "alone overstates the wait.",
        ),
    )


_RECAPTURE = (
    "hand the loader over with the model (Workload.from_loader); or profile the training loop "
    "itself with torch.profiler, data loading inside the profiled steps, and run `steady explain "
    "TRACE`; mark a loader of your own there with torch.profiler.record_function('DataLoader')"
)
_FIX_SINGLE = (
    "Load in worker processes: DataLoader(..., num_workers=4 or more, pin_memory=True, "
    "persistent_workers=True), and copy with non_blocking=True."
)
_FIX = (
    "Give the DataLoader more workers or less work per sample (decode and augment ahead of time, "
    "or on the GPU), a larger prefetch_factor and persistent_workers=True."
)
