"""Models that keep state in objects, globals or closures answer as without a plan."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.state import KEEPS_STATE

from .conftest import CANDIDATES, FROZEN, always, answer

HELD = SimpleNamespace(count=0)
COUNT = 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self, count):
        self.count = count


class Counting(nn.Module):
    def __init__(self, held=None):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.held = held

    def forward(self, x):
        return self.norm(self.convolution(x)) * self.counted()

    def counted(self):
        self.held.count += 1
        return self.held.count


class InItems(Counting):
    def counted(self):
        self.held["all"][0].count += 1
        return self.held["all"][0].count


class InGlobal(Counting):
    def counted(self):
        global COUNT
        COUNT += 1
        return COUNT


class InGlobalObject(Counting):
    def counted(self):
        HELD.count += 1
        return HELD.count


def in_closure():
    count = 0

    class InClosure(Counting):
        def forward(self, x):
            nonlocal count
            count += 1
            return self.norm(self.convolution(x)) * count

    return InClosure()


CASES = {
    "object": lambda: Counting(SimpleNamespace(count=0)),
    "slots": lambda: Counting(Slotted(0)),
    "tensor of an object": lambda: Counting(SimpleNamespace(count=torch.zeros(1))),
    "object in containers": lambda: InItems({"all": [SimpleNamespace(count=0)]}),
    "global": InGlobal,
    "object in a global": InGlobalObject,
    "closure": in_closure,
}
SERVED = {name: CANDIDATES[name] for name in ("fold_batch_norm", "cast_weights", "inference_mode")}
SERVED |= {"frozen": FROZEN, "onnxruntime": (TransformSpec("onnxruntime"),)}


@pytest.fixture(autouse=True)
def uncounted(monkeypatch):
    monkeypatch.setitem(globals(), "COUNT", 0)
    monkeypatch.setattr(HELD, "count", 0)


@pytest.mark.sampled(every=6)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("case", CASES)
def test_each_call_counts_once(case, name):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed here")
    torch.manual_seed(0)
    model, x = CASES[case]().eval(), torch.randn(2, 3, 8, 8)
    once = answer(copy.deepcopy(model).norm, answer(model.convolution, x))
    tuned = TunedModule(model, always(SERVED[name]))
    for call in range(1, 5):
        loose = {"rtol": 0.05, "atol": 0.05 * call} if call == 1 else {}
        torch.testing.assert_close(answer(tuned, x), once * call, **loose)
    calls = tuned.report().calls
    assert calls.get("tuned", 0) <= 1
    assert any(KEEPS_STATE in outcome or "could not be applied" in outcome for outcome in calls)
