"""Builds a plan's bundle: a worker sets the plan up again and stores its compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from steadytorch import transforms
from steadytorch.bench.bench_worker import save_payload
from steadytorch.compiled import bundle, compiler_choices, model_digest, package
from steadytorch.errors import SteadyError, UnsupportedError
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.serve.plan import Plan
from steadytorch.tune.package import PackagingResult
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.tune.package:PackagingHandler"
STAGE_S = 900.0
"""Timeout in seconds for loading, or for compiling and warming up; above the slowest mode."""

_log = logging.getLogger("steadytorch")


def keep_bundle(plan: Plan, workload: Workload, device: str) -> str | None:
    """Builds the bundle of a stored plan unless a usable one exists.

    Args:
        plan: the stored plan; a plan that compiles nothing has no bundle.
        workload: the plan's workload; neither run in this process nor changed.
        device: where to run, as a torch device string.

    Returns:
        None if the bundle exists, else the reason in one line. The reason is logged too, unless
        the plan compiles nothing.

    Raises:
        KeyboardInterrupt: interrupted by the user; the worker has ended.
    """
    if not transforms.compiles(plan.candidate):
        return "the plan compiles nothing"
    held, unpackaged = _contents(workload)
    if bundle.fault(plan, held) is None:
        return None
    try:
        unpackaged = build(plan, workload, device, held) or unpackaged
    except WorkerFault as fault:
        reason = f"its worker failed: {fault.reason}"
    except SteadyError as error:
        reason = str(error)
    except Exception as error:  # the stored plan works without a bundle
        reason = bundle.why_not(error)
    else:
        if unpackaged:
            _log.warning("the bundle of plan %s has no package: %s", plan.id, unpackaged)
        return None
    _log.warning("no bundle for plan %s: %s", plan.id, reason)
    return reason


def _contents(workload: Workload) -> tuple[str | None, str]:
    """The model digest that identifies a package, or None and the reason why it has no digest."""
    if workload.module is None:
        return None, "its model is a plain callable"
    try:
        return model_digest.digest(workload.module), ""
    except UnsupportedError as error:
        return None, str(error)


def build(plan: Plan, workload: Workload, device: str, held: str | None) -> str:
    """Builds the bundle, with a package if possible; returns why it has no package, or ""."""
    with shared_folder() as directory:
        cache, file = directory / "cache", directory / f"plan{bundle.PACKAGE}"
        at_work = partial(run_in_worker, plan, device, directory, cache)
        save_payload(workload, directory)
        compiler_choices.put(directory, plan.compiler)
        # The model may be in use meanwhile; the saved weights must match the digest.
        if held is not None and _contents(workload)[0] != held:
            raise UnsupportedError("the model changed while it was being saved")
        if held is None:
            at_work("set_up")
            bundle.write(plan, cache)
            return ""
        arguments = {"file": str(file), "tolerance": plan.key.tolerance}
        try:
            outcome = msgspec.convert(at_work("set_up_packaged", **arguments), PackagingResult)
        except WorkerFault as fault:  # set-up may still succeed without a package
            outcome = PackagingResult(None, f"its worker failed: {fault.reason}")
            at_work("set_up")
        return _written(plan, cache, file, held, check_in_worker(outcome, at_work, arguments))


def run_in_worker(
    plan: Plan, device: str, directory: Path, cache: Path, method: str, **arguments: Any
) -> Any:
    """Runs a worker method, such as `set_up`, for the plan in a fresh process."""
    # Temporary files of a crashed worker are deleted with the directory.
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(directory)}
    share_headers(directory)
    worker = Worker(HANDLER, directory, method, folders)
    try:
        worker.call("load", STAGE_S, device=device, ambient=transforms.ambient())
        candidate = msgspec.to_builtins(plan.candidate)
        return worker.call(method, STAGE_S, candidate=candidate, **arguments)
    finally:
        worker.kill()


def share_headers(directory: Path) -> None:
    """Links Inductor's precompiled C++ headers into a worker's temporary folder.

    Inductor keeps precompiled headers in a default folder that all processes of a user share.
    Without the link, the worker compiles each header again, in about 4 s.
    """
    with suppress(ImportError, OSError):  # Inductor then compiles them again
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        shared = Path(default_cache_dir()) / "precompiled_headers"
        shared.mkdir(parents=True, exist_ok=True)
        if shared.owner() == directory.owner():  # anyone can write to the temporary folder
            link = directory / shared.parent.name / shared.name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(shared)


def check_in_worker(
    outcome: PackagingResult, at_work: Callable[..., Any], arguments: dict[str, Any]
) -> PackagingResult:
    """Checks the package in a fresh process; returns the outcome, or why the check failed."""
    if outcome.made is None:
        return outcome
    try:
        fault = at_work("check_package", made=msgspec.to_builtins(outcome.made), **arguments)
    except WorkerFault as error:
        fault = f"a fresh process cannot use it: {error.reason}"
    return PackagingResult(None, fault) if fault else outcome


def _written(plan: Plan, cache: Path, file: Path, held: str, outcome: PackagingResult) -> str:
    if outcome.made is None:
        bundle.write(plan, cache)
        return outcome.reason
    if (size := file.stat().st_size) > bundle.MOST_BYTES:
        bundle.write(plan, cache)
        return f"it has {size} bytes, over the limit of {bundle.MOST_BYTES}"
    bundle.write(plan, cache, (file, package.packaged(file, held, outcome.made)))
    return ""
