"""Plans are not served after a change of what the model's code reads outside of its attributes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadytorch.runtime.module import TunedModule

from .conftest import CANDIDATES, COPYING, FROZEN, answer

SHARED = SimpleNamespace(factor=1.0)
FACTOR = 1.0


@dataclass
class Config:
    factor: object


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Computed(SimpleNamespace):
    @property
    def factor(self):
        return self.base


class Scaled(nn.Module):
    """Multiplies by a factor that `found` gets from `held`."""

    def __init__(self, held):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.held = held

    def forward(self, x):
        factor = self.found()
        return self.norm(self.convolution(x)) * (1.0 if factor is None else factor)

    def found(self):
        return self.held.factor


class OfItem(Scaled):
    def found(self):
        return self.held["first"][0].factor


class OfNested(Scaled):
    def found(self):
        return self.held.inner.factor


class OfGlobal(Scaled):
    def found(self):
        return SHARED.factor * FACTOR


def with_scores(forward):
    @functools.wraps(forward)
    def wrapped(self, x):
        factors = [getattr(self.held, f"output_{key}", None) for key in ("scores", "factor")]
        return forward(self, x) * (factors[1] or 1.0)

    return wrapped


class Wrapped(Scaled):
    @with_scores
    def forward(self, x):
        return self.norm(self.convolution(x)) * self.held.factor


def closure():
    cell = 1.0

    class OfClosure(Scaled):
        def forward(self, x):
            return self.norm(self.convolution(x)) * cell

    def change(held):
        nonlocal cell
        cell = 2.0

    return OfClosure(None), change


def set_factor(held):
    held.factor = 2.0


CASES = {
    "namespace": lambda: (Scaled(SimpleNamespace(factor=1.0)), set_factor),
    "dataclass": lambda: (Scaled(Config(1.0)), set_factor),
    "slots": lambda: (Scaled(Slotted(1.0)), set_factor),
    "from none": lambda: (Scaled(Slotted(None)), set_factor),
    "property": lambda: (Scaled(Computed(base=1.0)), lambda held: setattr(held, "base", 2.0)),
    "tensor replaced": lambda: (
        Scaled(Config(torch.ones(1))),
        lambda held: setattr(held, "factor", torch.full((1,), 2.0)),
    ),
    "tensor written": lambda: (Scaled(Config(torch.ones(1))), lambda held: held.factor.add_(1)),
    "in containers": lambda: (
        OfItem({"first": [Config(1.0)]}),
        lambda held: set_factor(held["first"][0]),
    ),
    "nested": lambda: (
        OfNested(SimpleNamespace(inner=Config(1.0))),
        lambda held: set_factor(held.inner),
    ),
    "nested replaced": lambda: (
        OfNested(SimpleNamespace(inner=Config(1.0))),
        lambda held: setattr(held, "inner", Config(2.0)),
    ),
    "closure": closure,
    "of wrapped code": lambda: (Wrapped(Config(1.0)), set_factor),
    "of a computed name": lambda: (
        Wrapped(SimpleNamespace(factor=1.0, output_factor=None)),
        lambda held: setattr(held, "output_factor", 2.0),
    ),
}


def check(model, change, candidate, serving):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model.eval()
    tuned = TunedModule(model, serving(candidate, x))
    before = answer(tuned, x)
    answer(tuned, x)
    assert tuned.report().calls == {"tuned": 2}
    change(model.held)
    expected = answer(model, x)
    assert not torch.allclose(before, expected, rtol=0.05, atol=0.05)
    assert torch.equal(answer(tuned, x), expected)
    tuned.refresh()
    torch.testing.assert_close(answer(tuned, x), expected, rtol=0.05, atol=0.05)
    assert tuned.report().hits == 3


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", COPYING)
@pytest.mark.parametrize("case", CASES)
def test_what_the_models_code_reads_of_objects(serving, case, name):
    check(*CASES[case](), CANDIDATES[name], serving)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("case", ["namespace", "slots", "tensor written"])
def test_frozen_code_too(serving, case):
    check(*CASES[case](), FROZEN, serving)


@pytest.mark.parametrize("name", COPYING)
def test_globals(serving, name, monkeypatch):
    def change(held):
        monkeypatch.setitem(globals(), "FACTOR", 2.0)

    check(OfGlobal(None), change, CANDIDATES[name], serving)
    check(
        OfGlobal(None),
        lambda held: monkeypatch.setattr(SHARED, "factor", 3.0),
        CANDIDATES[name],
        serving,
    )


def test_what_the_code_does_not_read_may_change(serving):
    model, x = Scaled(SimpleNamespace(factor=1.0, calls=0)).eval(), torch.randn(2, 3, 8, 8)
    tuned = TunedModule(model, serving(CANDIDATES["all"], x))
    for _ in range(3):
        answer(tuned, x)
        model.held.calls += 1
    assert tuned.report().calls == {"tuned": 3}
