from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms import channels_last, create, inference_mode
from steadytorch.workload.signature import signature

CANDIDATES = {
    "fold_batch_norm": (TransformSpec("fold_batch_norm"),),
    "cast_weights": (TransformSpec("cast_weights", (("dtype", "bf16"),)),),
    "channels_last": (TransformSpec("channels_last"),),
    "inference_mode": (TransformSpec("inference_mode"),),
    "all": (
        TransformSpec("fold_batch_norm"),
        TransformSpec("channels_last"),
        TransformSpec("inference_mode"),
    ),
}
FROZEN = (TransformSpec("compile", (("mode", "default"), ("freezing", True))),)

NO_PLAN = "untouched: no plan for these inputs"
FAILED = "untouched: the tuned executor failed"
NOT_APPLIED = "untouched: the plan could not be applied"

COPYING = ["fold_batch_norm", "cast_weights", "channels_last", "all"]


class Network(nn.Module):
    """A convolution, a batch norm with statistics of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x, scale=1.0):
        x = torch.relu(self.norm(self.convolution(x)))
        return self.head(x.mean((2, 3))) * scale


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Resolver:
    """Serves one candidate for the inputs that it was made with, and counts its look-ups."""

    def __init__(self, candidate, *args, **kwargs):
        assert [create(spec) for spec in candidate] or not candidate
        self.candidate, self.signature = candidate, signature(args, kwargs)
        self.asked = 0

    def __call__(self, context):
        self.asked += 1
        return Resolution(self.candidate if context.signature == self.signature else None)


@pytest.fixture
def hooked_anyway(monkeypatch):
    """Serves plans for models with hooks, even if their transforms refuse hooks."""
    for module in (channels_last, inference_mode):
        monkeypatch.setattr(module, "refuse_if", lambda objection: None)


def always(candidate):
    return lambda context: Resolution(candidate)


@pytest.fixture
def serving():
    return Resolver


@pytest.fixture
def tuned(model, x, serving):
    return TunedModule(model, serving(CANDIDATES["all"], x))


def answer(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs)


def calls_as_untouched(make, candidate, calls=5):
    """Checks that a tuned model answers call by call as an untouched one; returns its outcomes."""
    model, x = make()
    right = [answer(model, x) for _ in range(calls)]
    model, x = make()
    tuned = TunedModule(model, always(candidate))
    for call, expected in enumerate(right):
        loose = {"rtol": 0.05, "atol": 0.05} if call == 0 else {}
        torch.testing.assert_close(answer(tuned, x), expected, **loose)
    return tuned.report().calls


class Flexible(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, images, *, mask=None, times=1, mode="sum", also=()):
        x = self.convolution(images["left"]) * times
        if mask is not None:
            x = x * mask
        return {"x": x, "pair": (x + 1, [x.sum()]), "mode": mode, "none": None, "also": len(also)}


@pytest.fixture
def flexible():
    torch.manual_seed(0)
    return Flexible().eval()


class Failing:
    """An executor that answers a number of times and raises from then on."""

    def __init__(self, model, good=0, error=None):
        self.model, self.good, self.calls = model, good, 0
        self.error = error or RuntimeError("the executor broke\nin several lines")

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls > self.good:
            raise self.error
        return self.model(*args, **kwargs)


def entries_of(tuned):
    """The entries of a tuned module, one for each signature."""
    return list(tuned._found.values())


def replace_executor(tuned, executor):
    (entry,) = entries_of(tuned)
    entry.call = executor


def other_weights(model):
    return {k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}


def copy_into(model, x):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 1)
