"""Models that draw random numbers draw the same ones as without a plan."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from steadytorch.runtime.state import DRAWS, KEEPS_STATE

from .conftest import calls_as_untouched
from .test_module_counts import SERVED


class Noisy(nn.Module):
    """Scales its output by a random number."""

    def __init__(self, draw, held=None):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.draw, self.held = draw, held

    def forward(self, x):
        return self.norm(self.convolution(x)) * (1 + self.draw(self.held))


DRAW = {
    "torch": lambda held: torch.rand(()),
    "Python": lambda held: random.random(),
    "NumPy": lambda held: float(np.random.rand()),
    "torch generator": lambda held: torch.rand((), generator=held),
    "Python generator": lambda held: held.random(),
    "NumPy generator": lambda held: float(held.random()),
    "NumPy random state": lambda held: float(held.rand()),
}
HELD = {
    "torch generator": lambda: torch.Generator().manual_seed(1),
    "Python generator": lambda: random.Random(1),
    "NumPy generator": lambda: np.random.default_rng(1),
    "NumPy random state": lambda: np.random.RandomState(1),
}


def made(kind):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    return Noisy(DRAW[kind], HELD.get(kind, lambda: None)()).eval(), torch.randn(2, 3, 8, 8)


@pytest.mark.sampled(every=6)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("kind", DRAW)
def test_each_call_draws_the_next_number(kind, name):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed here")
    calls = calls_as_untouched(partial(made, kind), SERVED[name], calls=4)
    assert calls.get("tuned", 0) <= 1
    known = (DRAWS, KEEPS_STATE, "could not be applied")
    assert any(reason in outcome for outcome in calls for reason in known)
