"""Implements `steady.conv`: chooses cuDNN engines for one workload without a plan search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.plan.store import Store
from steadytorch.process.worker import WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import Candidate
from steadytorch.tune.conv import ConvReport, choose_and_keep
from steadytorch.workload.given import workload_of
from steadytorch.workload.workload import Workload

OF_A_TRAINING_STEP = ("autocast", "cast_weights", "channels_last", "tf32")
"""Transforms that keep a training step's gradients and change which engines apply."""


def resolve_cuda(device: str) -> str:
    """Resolves a device name and requires a CUDA device.

    Raises:
        UnsupportedError: the device is missing, or not a CUDA device.
        UsageError: the name is malformed.
    """
    resolved = resolve_device(device)
    if not resolved.startswith("cuda"):
        raise UnsupportedError(f"steady conv needs a CUDA device, got {resolved}: pass cuda")
    return resolved


def conv(
    workload: Workload | tuple[Any, Any],
    *,
    candidate: Candidate = (),
    budget: str | float = "60s",
    deterministic: bool = False,
    device: str | None = None,
    store: Store | str | Path | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> ConvReport:
    """Measures every cuDNN engine for each convolution of a workload and chooses one.

    An engine stored earlier for the same kind of device stays unless another engine is clearly
    faster. The choices are stored in the plan store.

    Args:
        workload: the workload or its `(model, inputs)`; not run in this process. For training,
            each pass is a separate layer: forward, input gradient and weight gradient.
        candidate: transforms that engines run under; they set dtype and memory layout.
        budget: time for choosing, such as `"60s"` or seconds.
        deterministic: whether to take only bitwise reproducible engines.
        device: a CUDA device; None for the workload's device.
        store: the plan store or its folder; None for `~/.cache/steadytorch/plans`.
        progress: called with progress messages.

    Raises:
        UnsupportedError: the device is not a CUDA device, or no engine can be chosen on it.
        UsageError: an argument is wrong, or a training step cannot be run under `candidate`.
    """
    seconds = parse_duration(budget)
    workload = workload_of(workload)
    resolved = resolve_cuda(device or str(workload.device))
    for spec in candidate if workload.is_training else ():
        if spec.name not in OF_A_TRAINING_STEP:
            raise UsageError(
                f"{spec} does not apply to choosing engines for the training step "
                f"{workload.name}: use only {', '.join(OF_A_TRAINING_STEP)}"
            )
    progress("choosing cuDNN engines in a worker process")
    try:
        return choose_and_keep(
            workload,
            load_facts(resolved),
            store if isinstance(store, Store) else Store(store),
            prefix=candidate,
            device=resolved,
            deadline_s=seconds,
            deterministic=deterministic,
        )
    except WorkerFault as fault:
        why = f"engines cannot be chosen for {workload.name}: {fault.reason}"
        raise UnsupportedError(why) from None
