"""How cuDNN's benchmark switch stands in this process, and which of its traps apply.

Sources of the traps: PyTorch's `aten/src/ATen/native/cudnn/Conv_v8.cpp`, which times each engine
once, within the workspace that the allocator has free, and keeps what it chose by shape in one
cache for both states of the switch; and the documentation of `torch.backends.cudnn`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
import torch

from steadytorch.ambient import ambient
from steadytorch.runtime.benchmark_mode import why_not

PREFIX = "TORCH_CUDNN_"
"""Of the environment variables by which PyTorch's use of cuDNN is set."""
FLOAT32 = "cudnn.conv.fp32_precision"


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """The switch and what it depends on.

    Attributes:
        benchmark: `torch.backends.cudnn.benchmark`.
        benchmark_limit: engines that it times per convolution; 0 for all, None where this PyTorch
            has no cuDNN.
        deterministic: `torch.backends.cudnn.deterministic`.
        fp32_precision: what float32 convolutions compute in, as PyTorch names it.
        environment: variables that set PyTorch's use of cuDNN, by name.
        no_effect: why the switch does nothing here; empty where it does something.
        traps: what to know while it is on, or before it is switched on, a sentence each; none
            where it does nothing.
    """

    benchmark: bool
    benchmark_limit: int | None
    deterministic: bool
    fp32_precision: str
    environment: dict[str, str]
    no_effect: str
    traps: tuple[str, ...]


def read_switch(environment: Mapping[str, str] = os.environ) -> Switch:
    """Reads the switch; nothing is changed, and no convolution is run."""
    cudnn, reason = torch.backends.cudnn, why_not()
    limit, deterministic = cudnn.benchmark_limit, bool(cudnn.deterministic)
    return Switch(
        benchmark=bool(cudnn.benchmark),
        benchmark_limit=limit,
        deterministic=deterministic,
        fp32_precision=ambient()[FLOAT32],
        environment={k: v for k, v in sorted(environment.items()) if k.startswith(PREFIX)},
        no_effect=reason,
        traps=() if reason else traps(limit, deterministic),
    )


def traps(limit: int | None, deterministic: bool) -> tuple[str, ...]:
    """What to know of the switch, a sentence each.

    Args:
        limit: engines timed per convolution; 0 for all.
        deterministic: whether only deterministic engines may be used.
    """
    tried = f"the first {limit} engines that work" if limit else "all engines"
    found = [
        "Each new input shape is timed at its first call, for tens to hundreds of ms; shapes that "
        "keep changing are slower with it.",
        f"It tries {tried}, in a fixed order and each once, and within the memory that is free: "
        "its choice may differ at each start.",
        "Shapes that have run before it is switched on keep the engine chosen then.",
        "Chosen engines may take workspace: memory grows.",
    ]
    if deterministic:
        found.append("cudnn.deterministic is on: it tries deterministic engines only.")
    return tuple(found)
