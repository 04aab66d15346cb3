"""Find steps that wait for the next batch."""

from __future__ import annotations

from steadytorch.findings.figures import duration, evidence_of, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import by_prefetch, step_ns
from steadytorch.findings.host_calls import tally
from steadytorch.findings.watched_steps import WatchedSteps
from steadytorch.traces.evidence import RANGES, Evidence, by_name, evidence

NAME = "input-pipeline"
LEAST_SHARE = 0.05
"""Minimum share of the step: Kineto's TensorBoard plug-in (`tb_plugin`, "DataLoader"
recommendation) advises from 5 % on."""

_SLICE = {"gpu": "idle_data_wait", "cpu": "cpu_data_wait"}


def rule(case: Case) -> Verdict:
    """Report time in which the device idles because the data loader has not delivered a batch.

    Only waiting that leaves the GPU idle counts: loading data while the GPU works costs nothing.
    Source: "Performance Tuning Guide", PyTorch tutorials, on workers and pinned memory.
    """
    if case.watched is not None:
        return _in_script(case.watched)
    if case.trace is None or case.ledger is None:
        why = "no steps were profiled: waiting for data cannot be seen"
        return Abstention(NAME, why, _RECAPTURE)
    ledger, name = case.ledger, _SLICE[case.ledger.kind]
    share = ledger.share(name)
    if share == 0 and not (evidence(case.trace) == Evidence.DATA_WAIT).any():
        return Abstention(NAME, "no event in the trace belongs to a data loader", _RECAPTURE)
    if share <= LEAST_SHARE:
        return ()
    wait_ns = round(ledger.mean(name))
    owners, lengths = ledger.idle_of(name)
    rows = owners[owners >= 0]
    single = len(by_name(case.trace, RANGES, r".*SingleProcessDataLoaderIter.*")) > 0
    idle = "the GPU is idle" if ledger.kind == "gpu" else "the model is idle"
    lines = [
        f"{idle} for {duration(wait_ns)} of a step's {duration(step_ns(ledger))} while the "
        f"loader prepares the batch: {tally(case.trace, rows)}",
        f"longest wait: {duration(int(lengths[0]))}" if len(lengths) else "",
        "the loader runs in the main process (num_workers=0)" if single else "",
    ]
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"input pipeline: {idle} for {percent(share)} of the step, waiting for data",
            evidence=tuple(line for line in lines if line),
            slices=(name,),
            cost_ns=wait_ns,
            recoverable_ns=(0, wait_ns),
            variance_share=variance_of(case, name),
            confidence="high",
            fix=_FIX_SINGLE if single else _FIX,
            transforms=by_prefetch(case),
            check="profile the training loop again and run `steady explain TRACE`",
            false_alarm="the trace covers only the first batch of an epoch, which waits for "
            "workers to start.",
        ),
    )


def _in_script(steps: WatchedSteps) -> Verdict:
    if not steps.counts("input_wait", LEAST_SHARE):
        return ()
    share, wait_ns = steps.share("input_wait"), round(steps.mean("input_wait"))
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"input pipeline: the script waits for data for {percent(share)} of the time, "
            f"{duration(wait_ns)} a step",
            evidence=evidence_of(steps, "input_wait"),
            slices=("input_wait",),
            cost_ns=wait_ns,
            recoverable_ns=(0, wait_ns),
            variance_share=steps.variance_share("input_wait"),
            confidence="high",
            fix=_FIX_ANY,
            check="run `steady run SCRIPT` again",
            false_alarm="the host is ahead of the GPU, which still computes while the host waits.",
        ),
    )


_RECAPTURE = (
    "pass the loader with the model (Workload.from_loader); or profile the training loop with "
    "torch.profiler, data loading included, and run `steady explain TRACE`; wrap a custom loader "
    "in torch.profiler.record_function('DataLoader')"
)
_CHEAPER = "Make loading cheaper, as by tensor operations in place of Python loops. Or load in "
_HOW = (
    "worker processes, fewer than there are cores: DataLoader(..., num_workers=N, "
    "persistent_workers=True), for a GPU also pin_memory=True and copies with non_blocking=True."
)
_FIX_SINGLE, _FIX_ANY = f"{_CHEAPER}{_HOW}", f"{_CHEAPER}more {_HOW}"
_FIX = (
    "Give the DataLoader more workers, a larger prefetch_factor and persistent_workers=True. Or "
    "reduce the work per sample: decode and augment ahead of time, or on the GPU."
)
