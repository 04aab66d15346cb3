"""Shared by tests of the candidate source: all options, and invariants of all candidates."""

import torch
from hypothesis import strategies as st
from torch import nn

from steadytorch import transforms
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.precision import PRECISIONS
from steadytorch.workload.workload import Workload

GPU = DeviceFacts(device="cuda", compute_capability="9.0", cudnn="9.19.0", triton="3.6.0")
CPU = DeviceFacts(device="cpu", cores_physical=8, cores_logical=16)
EVERY = list(dict.fromkeys(t.spec for facts in (GPU, CPU) for t in transforms.all_variants(facts)))
ON_CPU = [spec for spec in EVERY if transforms.engines((spec,))]
"""Never available on a GPU, unlike the others."""
ALL = [spec for spec in EVERY if spec not in ON_CPU]
WORKLOAD = Workload(nn.Linear(2, 2), torch.zeros(1, 2))
REGIMES = ("launch-bound", "memory-bound", "compute-bound")

subsets = st.lists(st.sampled_from(EVERY), unique=True)
precisions = st.sampled_from(PRECISIONS)


_OFF_BY_DEFAULT = ("unpadded", "combo_kernels")


def single(name, **parameters):
    (found,) = [
        spec
        for spec in ALL
        if spec.name == name
        and {k: v for k, v in spec.parameters if v or k not in _OFF_BY_DEFAULT} == parameters
    ]
    return found


GRAPH, LAYOUT = single("cuda_graph"), single("channels_last")
BF16, FP16 = (single("cast_weights", dtype=dtype) for dtype in ("bf16", "fp16"))


def assert_sound(candidates, available):
    assert len(set(candidates)) == len(candidates)
    for candidate in candidates:
        assert candidate
        assert set(candidate) <= set(available)
        assert candidate == transforms.order(candidate)
        assert transforms.conflict(candidate, WORKLOAD) is None
