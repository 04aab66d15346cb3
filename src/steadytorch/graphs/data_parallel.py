"""Helpers to run tuned plans inside `DistributedDataParallel` (DDP) and record DDP steps.

Before recording, DDP must be constructed on a side stream and run at least 11 eager steps there. In
its first eager steps, DDP rebuilds its buckets and times itself. Source: PyTorch's notes on CUDA
graphs, "Usage with DistributedDataParallel".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

WARM_UP = 12
"""Eager steps before the first recording. DDP reads its timers last before the 11th step."""
_NEVER = 1 << 30
"""An interval in steps at which DDP in effect never reads its timers. Reading them waits for the
GPU."""
_LAYOUT = (
    *("has_rebuilt_buckets", "bucket_sizes", "rebuilt_bucket_sizes"),
    *("rebuilt_per_bucket_param_indices", "gradient_as_bucket_view", "broadcast_buffers"),
)


def ddp_of(model: Any) -> Any:
    """The model if it is a `DistributedDataParallel`, else None."""
    if not torch.distributed.is_available():
        return None
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None


def objection(ddp: Any) -> str | None:
    """Reason why a tuned plan must not run inside the given DDP; None if it may."""
    if getattr(ddp, "_comm_hooks", None):
        return "DDP has a communication hook"
    for name, text in (
        ("find_unused_parameters", "find_unused_parameters=True"),
        ("static_graph", "static_graph=True"),
        ("mixed_precision", "mixed precision of its own"),
        ("_delay_all_reduce_params", "delayed reductions"),
        ("_use_python_reducer", "the Python reducer"),
    ):
        if getattr(ddp, name, None):
            return f"DDP uses {text}: make it without"
    missing = [name for name in _USED if not hasattr(ddp, name)]
    if missing:
        return f"this PyTorch's DDP lacks {missing[0]}"
    return None


_USED = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")


def make_anew(ddp: Any, stream: Any = None) -> None:
    """Recreates DDP's reducer on a stream; call it on all ranks between two steps.

    The reducer holds the gradient-accumulation nodes, which stay on the stream on which they were
    created. Recording a CUDA graph on a stream other than the reducer's would fail. The caller must
    not hold the loss of an earlier step, because it keeps the old accumulation nodes alive.

    Args:
        ddp: a `DistributedDataParallel` that `objection` allows.
        stream: a CUDA stream; None on a CPU.
    """
    ddp.reducer = ddp.logger = None  # frees the old nodes before the new ones are made
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    ddp._set_ddp_runtime_logging_sample_rate(_NEVER)


def layout(ddp: Any) -> dict[str, str]:
    """How DDP groups gradients into buckets; ranks with equal layouts issue equal collectives."""
    told = ddp._get_ddp_logging_data()
    return {name: str(told[name]) for name in _LAYOUT if name in told}


class ServedInside:
    """Calls a DDP model, with its module replaced by another one during the call.

    Args:
        ddp: the caller's `DistributedDataParallel`.
        served: takes the place of its module; computes with the same parameters.
        reduces: whether gradients of this call are to be reduced; asked at each call.
    """

    def __init__(
        self, ddp: Any, served: nn.Module, reduces: Callable[[], bool] = lambda: True
    ) -> None:
        self._ddp, self._served, self._reduces = ddp, served, reduces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls DDP's own forward."""
        with self._inside(), nullcontext() if self._reduces() else self._ddp.no_sync():
            return self._ddp(*args, **kwargs)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        modules = self._ddp._modules
        found = modules["module"]
        modules["module"] = self._served
        try:
            yield
        finally:
            modules["module"] = found
