"""The engines of cuDNN for one workload, for whoever asks for them alone."""

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
"""Transforms under which a training step still has its gradients, and other engines."""


def resolve_cuda(device: str) -> str:
    """The device as `resolve_device` finds it, if engines of cuDNN run on it.

    Raises:
        UnsupportedError: it is not there, or no CUDA device.
        UsageError: it is malformed.
    """
    resolved = resolve_device(device)
    if not resolved.startswith("cuda"):
        raise UnsupportedError("steady conv needs a CUDA device: engines of cuDNN run on no other")
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
    """Measures every engine that cuDNN has for each convolution of a workload, and chooses.

    What was chosen before on this kind of device stays unless another engine is shown to be clearly
    faster; what is chosen is kept in the plan store for next time.

    Args:
        workload: what to choose for, or its `(model, inputs)`; it is not run in this process. Of a
            training step each pass is a layer of its own: forward, the gradient by the input and
            by the weight.
        candidate: transforms under which the engines are to run: element type and layout decide.
        budget: time for choosing, such as `"60s"` or seconds.
        deterministic: whether to take only engines that always give the same bits.
        device: a CUDA device; None for where the workload is.
        store: the plan store, or its folder; None for `~/.cache/steadytorch/plans`.
        progress: is told what is going on.

    Raises:
        UnsupportedError: the device is no CUDA device, or no engine can be chosen on it.
        UsageError: an argument is wrong, or a training step cannot be run under `candidate`.
    """
    seconds = parse_duration(budget)
    workload = workload_of(workload)
    resolved = resolve_cuda(device or str(workload.device))
    for spec in candidate if workload.is_training else ():
        if spec.name not in OF_A_TRAINING_STEP:
            raise UsageError(
                f"{spec} with {workload.name}: engines of a training step depend on its element "
                f"type and layout; use {', '.join(OF_A_TRAINING_STEP)}"
            )
    progress("choosing engines in a worker process")
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
