"""Plain values of Python that a step reads, and their changes."""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from steadytorch.graphs.settings import Settings
from steadytorch.workload.reads import modules_read, reads_of

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


def test_functions_that_a_parametrised_module_holds():
    class Active(nn.Linear):
        active = None

        def forward(self, x):
            return self.active(super().forward(x))

    model = Active(2, 2)
    model.active = torch.relu
    nn.utils.parametrizations.weight_norm(model)
    settings = Settings([model], of_globals)
    model(torch.ones(2))
    assert not settings.changed()
    model.active = torch.tanh
    assert settings.changed()


def test_the_closure_of_the_loss():
    rate, sizes = 1.0, [1]

    def loss(output):
        return output * rate + sizes[0]

    settings = Settings([], partial(loss))
    sizes = [1]
    assert not settings.changed()
    sizes = [2]
    assert settings.changed()
    settings.remember()
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


def test_writes_to_arrays_that_the_loss_reads():
    held = SimpleNamespace(rates=np.ones(3), bytes=bytearray(3))

    def loss(output):
        return output * held.rates[0] * held.bytes[0]

    settings = Settings([], loss)
    for array in (held.rates, held.bytes):
        assert not settings.changed()
        array[0] = 2
        assert settings.changed()
        settings.remember()


def test_an_unbound_cell_is_no_value():
    def loss(output):
        return output * later

    settings = Settings([], loss)
    later = 2.0
    assert settings.changed()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", 2.0),
        ("mode", "b"),
        ("flag", True),
        ("array", np.full(3, 2.0)),
        ("drop.p", 0.7),
        ("act.negative_slope", 0.5),
        ("conv.stride", (2, 2)),
        ("act.forward", abs),
        ("tanh.forward", abs),
        ("forward", abs),
        ("inner", abs),
    ],
)
def test_attributes_of_modules(name, value):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.mode, self.flag, self.list = 1.0, "a", False, [1]
            self.array, self.inner = np.ones(3), torch.relu
            self.tanh = nn.Tanh()
            self.drop, self.act, self.conv = nn.Dropout(0.5), nn.LeakyReLU(), nn.Conv2d(3, 3, 3)

    net = Net()
    settings = Settings([net], nn.MSELoss())
    net.list.append(2)
    net.eval()
    assert not settings.changed()
    path, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(path), leaf, value)
    assert settings.changed()


def changes(loss, change, *modules):
    """Whether a change is seen, once, and nothing before it or after it."""
    settings = Settings(modules, loss)
    assert not settings.changed()
    change()
    seen = settings.changed()
    settings.remember()
    assert not settings.changed()
    return seen


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1)
        self.drop, self.scale = nn.Dropout(0.5), torch.tensor(1.0)

    def forward(self, output, target):
        return self.scale * self.criterion(self.drop(output), target)


class Trainer:
    """As in many training scripts: the loss is a method beside counters of the loop."""

    def __init__(self):
        self.parts, self.weights = [Smoothed()], {"main": 1.0}
        self.steps, self.nested = 0, SimpleNamespace(rate=1.0)

    def loss(self, output, target):
        return self._weighted(self.parts[0](output, target)) * self.nested.rate

    def _weighted(self, value):
        return value * self.weights["main"]


CHANGES = {
    "an attribute of PyTorch's own loss": lambda m: setattr(m.criterion, "label_smoothing", 0.2),
    "the mode of a module": lambda m: m.drop.eval(),
    "a tensor that is no buffer": lambda m: setattr(m, "scale", torch.tensor(1.0)),
    "the value of a tensor of the host": lambda m: m.scale.fill_(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modules_of_the_loss_are_found_wherever_its_code_reads_them(change):
    def closure(output, target):
        return module(output, target)

    def calls_closure(output, target):
        return closure(output, target)

    trainer = Trainer()
    module = trainer.parts[0]
    for loss in (module, module.forward, closure, calls_closure, partial(closure), trainer.loss):
        assert modules_read(loss) == [module]
        assert changes(loss, partial(change, module))
        module.__init__()


def test_values_that_a_method_and_its_helpers_read():
    trainer = Trainer()
    assert changes(trainer.loss, lambda: trainer.weights.update(main=2.0))
    assert changes(trainer.loss, lambda: setattr(trainer.nested, "rate", 2.0))
    assert not changes(trainer.loss, lambda: setattr(trainer, "steps", 1))


class Term:
    power = 2

    def __init__(self, rate):
        self._rate = rate

    @property
    def rate(self):
        return self._rate

    def scaled(self, output):
        return output**self.power * self.rate


def test_each_of_several_objects_of_a_class_with_its_properties_and_class_attributes(monkeypatch):
    first, second = Term(1.0), Term(2.0)

    def loss(output):
        return first.scaled(output) + second.scaled(output)

    assert changes(loss, lambda: setattr(second, "_rate", 3.0))
    assert changes(loss, lambda: setattr(first, "_rate", 3.0))
    assert changes(loss, lambda: monkeypatch.setattr(Term, "power", 3))


class Base:
    rate = 1.0


class Derived(Base):
    pass


def test_inherited_attributes_of_a_class(monkeypatch):
    assert changes(
        lambda output: output * Derived.rate, partial(monkeypatch.setattr, Base, "rate", 2)
    )


class Rates:
    rate = 1.0

    @classmethod
    def of_class(cls, output):
        return output * cls.rate

    @staticmethod
    def static(output):
        return output * CONFIG.rate


@pytest.mark.parametrize("holder", [Rates, Rates()])
def test_class_methods_and_static_methods(holder, monkeypatch):
    change = partial(monkeypatch.setattr, Rates, "rate", 2)
    assert changes(lambda output: holder.of_class(output), change)
    change = partial(monkeypatch.setattr, CONFIG, "rate", 7)
    assert changes(lambda output: holder.static(output), change)


def helper(output):
    return output * CONFIG.rate + sum(TERMS)


def with_helper(output):
    return helper(output)


def named_like_a_global(output):
    return output.RATE


CONFIG, TERMS = ModuleType("config"), [1.0]
CONFIG.rate = 1.0


def test_globals_of_helpers_and_attributes_of_imported_modules(monkeypatch):
    assert changes(with_helper, lambda: monkeypatch.setattr(CONFIG, "rate", 2.0))
    assert changes(with_helper, lambda: TERMS.append(2.0))
    assert changes(with_helper, lambda: TERMS.__setitem__(0, 3.0))
    change = partial(monkeypatch.setitem, globals(), "RATE", 5.0)
    assert not changes(named_like_a_global, change)


def test_tensors_that_the_loss_reads_by_their_memory():
    weight, alpha = torch.ones(3), torch.tensor(1.0)

    def loss(output):
        return (output * weight).sum() * alpha

    def rebind():
        nonlocal weight
        weight = torch.ones(3)

    assert not changes(loss, lambda: weight.fill_(2.0))
    assert changes(loss, rebind)
    assert changes(loss, lambda: weight.set_(torch.zeros(3)))
    assert changes(loss, lambda: alpha.fill_(2.0))


SCALE = 1.0


class Scaled(nn.Module):
    def forward(self, x):
        return x * SCALE


def test_globals_of_the_models_own_code(monkeypatch):
    net = nn.Sequential(Scaled(), nn.Linear(2, 2))
    assert changes(nn.MSELoss(), lambda: monkeypatch.setitem(globals(), "SCALE", 2.0), net)


def test_a_cycle_of_objects_is_searched_once():
    trainer = Trainer()
    trainer.nested.trainer, trainer.nested.more = trainer, [trainer.nested]
    assert changes(trainer.loss, lambda: setattr(trainer.nested, "rate", 3.0))


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.table = config, {"first": SimpleNamespace(factor=1.0)}

    def forward(self, x):
        return self.scaled(x) * self.table["first"].factor

    def scaled(self, x):
        return x * (1.0 if self.config.factor is None else self.config.factor)


@pytest.mark.parametrize("config", [SimpleNamespace(factor=1.0), Slotted(1.0), Slotted(None)])
def test_objects_that_the_models_own_code_reads(config):
    net = nn.Sequential(Configured(config), nn.Linear(2, 2))
    assert changes(nn.MSELoss(), lambda: setattr(config, "factor", 2.0), net)
    assert changes(nn.MSELoss(), lambda: setattr(net[0].table["first"], "factor", 2.0), net)
    config_of_another = SimpleNamespace(factor=1.0)
    net[0].unread = config_of_another
    assert not changes(nn.MSELoss(), lambda: setattr(config_of_another, "factor", 2.0), net)


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {f"word {i}": i for i in range(10_000)}

    def forward(self, x):
        return x * self.table["word 1"]


def test_large_dictionaries_are_watched_in_part():
    assert 1 < len(reads_of([Looked()]).places) <= 64
