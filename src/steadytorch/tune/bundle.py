"""Making a plan's bundle: a worker process sets the plan up once more, for what it compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from steadytorch import transforms
from steadytorch.bench.worker import save_payload
from steadytorch.compiled import bundle, model_digest, package
from steadytorch.errors import SteadyError, UnsupportedError
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.serve.plan import Plan
from steadytorch.tune.package import Outcome
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.tune.package:PackagingHandler"
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
    if not transforms.compiles(plan.candidate):
        return "the plan compiles nothing"
    held, unpackaged = _contents(workload)
    if bundle.fault(plan, held) is None:
        return None
    try:
        unpackaged = _make(plan, workload, device, held) or unpackaged
    except WorkerFault as fault:
        reason = f"its worker failed: {fault.reason}"
    except SteadyError as error:
        reason = str(error)
    except Exception as error:  # the plan is stored, and good without
        reason = bundle.why_not(error)
    else:
        if unpackaged:
            _log.warning("the bundle of plan %s has no package: %s", plan.id, unpackaged)
        return None
    _log.warning("no bundle for plan %s: %s", plan.id, reason)
    return reason


def _contents(workload: Workload) -> tuple[str | None, str]:
    """What a package is to be known by, or why there can be none."""
    if workload.module is None:
        return None, "its model is a plain callable"
    try:
        return model_digest.digest(workload.module), ""
    except UnsupportedError as error:
        return None, str(error)


def _make(plan: Plan, workload: Workload, device: str, held: str | None) -> str:
    """Makes the bundle, with a package where that can be; returns why it has none, if so."""
    with shared_folder() as directory:
        cache, file = directory / "cache", directory / f"plan{bundle.PACKAGE}"
        at_work = partial(_at_work, plan, device, directory, cache)
        save_payload(workload, directory)
        # It is made while the model is in use: what is saved must be what it is known by.
        if held is not None and _contents(workload)[0] != held:
            raise UnsupportedError("the model changed while it was being saved")
        if held is None:
            at_work("set_up")
            bundle.write(plan, cache)
            return ""
        arguments = {"file": str(file), "tolerance": plan.key.tolerance}
        try:
            outcome = msgspec.convert(at_work("set_up_packaged", **arguments), Outcome)
        except WorkerFault as fault:  # without a package it may well be set up
            outcome = Outcome(None, f"its worker failed: {fault.reason}")
            at_work("set_up")
        return _written(plan, cache, file, held, _checked(outcome, at_work, arguments))


def _at_work(
    plan: Plan, device: str, directory: Path, cache: Path, method: str, **arguments: Any
) -> Any:
    """Sets the plan up in a worker process of its own."""
    # What a crash leaves behind goes with the directory.
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(directory)}
    _share_headers(directory)
    worker = Worker(HANDLER, directory, method, folders)
    try:
        worker.call("load", STAGE_S, device=device, ambient=transforms.ambient())
        candidate = msgspec.to_builtins(plan.candidate)
        return worker.call(method, STAGE_S, candidate=candidate, **arguments)
    finally:
        worker.kill()


def _share_headers(directory: Path) -> None:
    """Lets a process with this temporary folder find the C++ headers that the compiler has ready.

    Inductor keeps them in its default folder, for all processes of a user and whatever its cache;
    without, it makes them anew, some 4 s each.
    """
    with suppress(ImportError, OSError):  # then they are made anew
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        shared = Path(default_cache_dir()) / "precompiled_headers"
        shared.mkdir(parents=True, exist_ok=True)
        if shared.owner() == directory.owner():  # the folder for temporary files is everybody's
            link = directory / shared.parent.name / shared.name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(shared)


def _checked(outcome: Outcome, at_work: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    """The outcome, where a fresh process can use the package."""
    if outcome.made is None:
        return outcome
    try:
        fault = at_work("check_package", made=msgspec.to_builtins(outcome.made), **arguments)
    except WorkerFault as error:
        fault = f"a fresh process cannot use it: {error.reason}"
    return Outcome(None, fault) if fault else outcome


def _written(plan: Plan, cache: Path, file: Path, held: str, outcome: Outcome) -> str:
    if outcome.made is None:
        bundle.write(plan, cache)
        return outcome.reason
    if (size := file.stat().st_size) > bundle.MOST_BYTES:
        bundle.write(plan, cache)
        return f"it would take {size} bytes, and one holds {bundle.MOST_BYTES}"
    bundle.write(plan, cache, (file, package.packaged(file, held, outcome.made)))
    return ""
