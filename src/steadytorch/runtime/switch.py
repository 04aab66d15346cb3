"""How cuDNN's benchmark switch stands in this process, and which of its traps apply.

Sources of the traps: PyTorch's `aten/src/ATen/native/cudnn/Conv_v8.cpp`, which times each engine
once, within the workspace that the allocator has free, and keeps what it chose by shape in one
cache for both states of the switch; and the documentation of `torch.backends.cudnn`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from steadytorch.results.machine import Switch
from steadytorch.runtime.benchmark_mode import why_not
from steadytorch.transforms.ambient import ambient

PREFIX = "TORCH_CUDNN_"
"""Of the environment variables by which PyTorch's use of cuDNN is set."""
FLOAT32 = "cudnn.conv.fp32_precision"


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
