"""The worker process of a sweep: tunes one workload, so that a crash ends only this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from steadytorch.device.facts import resolve_device
from steadytorch.plan.record import gain, kept_plan
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.loading import load_workload


class SweepHandler:
    """Worker handler that tunes one workload per request.

    Args:
        directory: folder of the parent; unused.
    """

    def __init__(self, directory: Path) -> None:
        pass

    def check(self, *, device: str) -> None:
        """Checks that this machine has the requested device.

        Raises:
            UnsupportedError: the machine lacks the device.
            UsageError: `device` is not a device name.
        """
        resolve_device(device)

    def tune(
        self,
        *,
        workload: str,
        shape: dict[str, Any],
        options: dict[str, Any],
        device: str,
        store: str | None,
        mode: str,
        bundle: bool,
    ) -> dict[str, Any]:
        """Loads and tunes a workload.

        Args:
            workload: as for `load_workload`.
            shape: the other arguments of `load_workload`.
            options: the fields of `SearchOptions`.
            device: where to run.
            store: folder of the plan store; None for the default one.
            mode: `replay`, `tune` or `strict`.
            bundle: whether to keep compiled code beside the plan.

        Returns:
            The fields of `SweepRow` that follow from the plan; or `unable`, with the reason why
            this machine cannot store plans.
        """
        loaded = load_workload(workload, device="cpu", **shape)
        session = Session(loaded, SearchOptions(**options), device, store)
        replayed = mode != "tune" and session.look_up(explained=False)[0] is not None
        plan = session.find_or_search(mode)
        if plan.path is None:
            return {"unable": f"the plan was not stored: {session.store_trouble}"}
        reason = session.keep_bundle(plan) if bundle else None
        return {
            "reason": None if reason is None else f"no bundle: {reason}",
            "plan": msgspec.to_builtins(kept_plan(plan)),
            "speedup": msgspec.to_builtins(gain(plan.evidence.speedup)),
            "replayed": replayed,
            "device": session.facts.name or session.facts.device,
        }
