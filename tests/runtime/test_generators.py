"""Models that draw random numbers draw the same ones as without a plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.state import DRAWS, KEEPS_STATE

from .conftest import always, answer
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


@pytest.mark.sampled(every=3)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("kind", DRAW)
def test_each_call_draws_the_next_number(kind, name):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed here")
    model, x = made(kind)
    right = [answer(model, x) for _ in range(4)]
    model, x = made(kind)
    tuned = TunedModule(model, always(SERVED[name]))
    for call, expected in enumerate(right):
        loose = {"rtol": 0.05, "atol": 0.05} if call == 0 else {}
        torch.testing.assert_close(answer(tuned, x), expected, **loose)
    calls = tuned.report().calls
    assert calls.get("tuned", 0) <= 1
    known = (DRAWS, KEEPS_STATE, "could not be applied")
    assert any(reason in outcome for outcome in calls for reason in known)
