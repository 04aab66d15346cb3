"""Making a plan's bundle: a worker process sets the plan up once more, for what it compiles."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import msgspec

from steadytorch import transforms
from steadytorch.errors import SteadyError
from steadytorch.plan import bundle
from steadytorch.plan.plan import Plan
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.trial.worker import save_payload
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.trial.worker:WorkloadHandler"
STAGE_S = 900.0
"""Seconds that loading, or compiling and warming up, may take: more than the slowest mode does."""

_log = logging.getLogger("steadytorch")


def keep_bundle(plan: Plan, workload: Workload, device: str) -> str | None:
    """Makes the bundle of a stored plan, unless there is one that can be used here.

    Args:
        plan: as it is stored; plans that compile nothing have no bundle.
        workload: what it is for; not run in this process, and not changed.
        device: where to run, as a torch device string.

    Returns:
        None when there is a bundle, else one line on why not, which is logged too unless nothing
        is compiled.

    Raises:
        KeyboardInterrupt: interrupted; the worker is gone.
    """
    if not bundle.compiles(plan):
        return "the plan compiles nothing"
    if bundle.fault(plan) is None:
        return None
    try:
        _make(plan, workload, device)
        return None
    except WorkerFault as fault:
        reason = f"its worker failed: {fault.reason}"
    except SteadyError as error:
        reason = str(error)
    except Exception as error:  # the plan is stored, and good without
        reason = bundle.why_not(error)
    _log.warning("no bundle for plan %s: %s", plan.id, reason)
    return reason


def _make(plan: Plan, workload: Workload, device: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix="steadytorch-"))
    cache = directory / "cache"
    try:
        save_payload(workload, directory)
        worker = Worker(HANDLER, directory, "bundle", {"TORCHINDUCTOR_CACHE_DIR": str(cache)})
        try:
            worker.call("load", STAGE_S, device=device, ambient=transforms.ambient())
            worker.call("set_up", STAGE_S, candidate=msgspec.to_builtins(plan.candidate))
        finally:
            worker.kill()
        bundle.write(plan, cache)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
