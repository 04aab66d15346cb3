"""Reads the state of `torch.backends.cudnn.benchmark`, and lists the pitfalls of that switch.

Sources: the documentation of `torch.backends.cudnn`, and PyTorch's
`aten/src/ATen/native/cudnn/Conv_v8.cpp`. `Conv_v8.cpp` times each engine once, within the
allocator's free memory. PyTorch caches the chosen engine by shape, and uses the same cache with the
switch on and off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from steadytorch.ambient import ambient
from steadytorch.results.machine import Switch
from steadytorch.runtime.benchmark_mode import why_not

PREFIX = "TORCH_CUDNN_"
"""Prefix of the environment variables that control PyTorch's use of cuDNN."""
FLOAT32 = "cudnn.conv.fp32_precision"


def read_switch(environment: Mapping[str, str] = os.environ) -> Switch:
    """Reads the cuDNN benchmark switch without changing it or running a convolution."""
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
    """Returns the pitfalls of the cuDNN benchmark switch, one sentence each.

    Args:
        limit: engines timed per convolution; 0 for all.
        deterministic: whether only deterministic engines may be used.
    """
    tried = f"the first {limit} engines that work" if limit else "all engines"
    found = [
        "Each new input shape is timed at its first call, for tens to hundreds of ms; shapes that "
        "keep changing are slower with it.",
        f"It tries {tried}, in a fixed order, once each and within free memory: "
        "its choice may differ at each start.",
        "Shapes that ran before it was switched on keep the engine chosen then.",
        "Chosen engines may take workspace: memory grows.",
    ]
    if deterministic:
        found.append("cudnn.deterministic is on: it tries deterministic engines only.")
    return tuple(found)
