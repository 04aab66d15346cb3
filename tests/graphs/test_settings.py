"""Plain values of Python that a step reads, and their changes."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from steadytorch.graphs.settings import Settings

RATE = 1.0


def of_globals(output):
    return output * RATE


def test_globals_of_the_loss(monkeypatch):
    settings = Settings([], of_globals)
    assert not settings.changed()
    monkeypatch.setitem(globals(), "RATE", 2.0)
    assert settings.changed()
    settings.remember()
    assert not settings.changed()


def test_the_closure_of_the_loss():
    rate, unused = 1.0, [1]

    def loss(output):
        return output * rate + len(unused)

    settings = Settings([], partial(loss))
    unused = [2]
    assert not settings.changed()
    rate = 3.0
    assert settings.changed()


def test_keywords_and_attributes_of_callables():
    class Loss:
        rate = 1.0

        def __init__(self):
            self.rate = 2.0

        def __call__(self, output):
            return output * self.rate

        def other(self, output):
            return output * self.rate

    made = Loss()
    for loss in (made, made.other, partial(made, power=2)):
        settings = Settings([], loss)
        made.rate += 1.0
        assert settings.changed()
    keywords = partial(of_globals, power=2)
    settings = Settings([], keywords)
    keywords.keywords["power"] = 3
    assert settings.changed()


def test_an_unbound_cell_is_no_value():
    def loss(output):
        return output * later

    settings = Settings([], loss)
    later = 2.0
    assert settings.changed()


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 2.0), ("mode", "b"), ("flag", True), ("drop.p", 0.7)]
)
def test_attributes_of_modules(name, value):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.mode, self.flag, self.list = 1.0, "a", False, [1]
            self.drop = nn.Dropout(0.5)

    net = Net()
    settings = Settings([net], nn.MSELoss())
    net.list.append(2)
    net.eval()
    assert not settings.changed()
    path, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(path), leaf, value)
    assert settings.changed()
