"""Models that advance iterators, write to arrays or read the environment, served with a plan."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import io
import itertools
import os
import queue
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.state import State
from steadytorch.runtime.weights import Weights
from steadytorch.workload.contents import contents, memory_of, same, version

from .conftest import FROZEN, always, answer, calls_as_untouched
from .test_module_counts import SERVED


class Scaled(nn.Module):
    """Scales its output by what it reads of an attribute, and may change it."""

    rate = 1.0
    calls = 0

    def __init__(self, held, read):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.held, self.read = held, read

    def forward(self, x):
        return self.norm(self.convolution(x)) * self.read(self.held)


class OfClass(Scaled):
    def forward(self, x):
        type(self).calls += 1
        return self.norm(self.convolution(x)) * (type(self).calls + self.rate)


class Plain:
    count = 1.0


ARRAY, HELD = np.ones(1), Plain()


def numbers():
    yield from itertools.count(1.0)


def filled():
    found = queue.SimpleQueue()
    for number in range(1, 100):
        found.put(float(number))
    return found


def counted(held):
    held[0] += 1
    return float(held[0])


def counted_in(held):
    held[0].count += 1
    return held[0].count


def counted_global(held):
    ARRAY[0] += 1
    return float(ARRAY[0])


def counted_in_global(held):
    HELD.array[0] += 1
    return float(HELD.array[0])


def next_global(held):
    return next(NUMBERS)


def drawn_global(held):
    return GENERATOR.random()


def counted_by_function(held):
    counted_by_function.calls += 1
    return counted_by_function.calls


def counted_by_value(held):
    held.value += 1
    return held.value


CHANGED = {
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "generator": (numbers, next),
    "iterator": (lambda: iter([float(n) for n in range(1, 100)]), next),
    "queue": (filled, lambda held: held.get()),
    "file": (lambda: io.StringIO("123456789" * 9), lambda held: float(held.read(1))),
    "bytearray": (lambda: bytearray([1]), counted),
    "array": (lambda: array.array("d", [1.0]), counted),
    "NumPy": (lambda: np.ones(1), counted),
    "NumPy in a list": (lambda: [np.ones(1)], lambda held: counted(held[0])),
    "ctypes": (lambda: ctypes.c_double(1.0), counted_by_value),
    "object in a list": (lambda: [Plain()], counted_in),
    "function": (lambda: None, counted_by_function),
    "global array": (lambda: None, counted_global),
    "array in a global": (lambda: None, counted_in_global),
    "global iterator": (lambda: None, next_global),
    "global generator": (lambda: None, drawn_global),
}


def made(kind):
    torch.manual_seed(0)
    global NUMBERS, GENERATOR
    NUMBERS, GENERATOR = itertools.count(1.0), np.random.default_rng(1)
    HELD.array = np.ones(1)
    ARRAY[0] = counted_by_function.calls = OfClass.calls = 0
    if kind == "class":
        return OfClass(None, None).eval(), torch.randn(2, 3, 8, 8)
    hold, read = CHANGED[kind]
    return Scaled(hold(), read).eval(), torch.randn(2, 3, 8, 8)


@pytest.mark.sampled(every=9)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("kind", [*CHANGED, "class"])
def test_what_a_call_changes_is_the_same_with_a_plan(kind, name):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed here")
    calls = calls_as_untouched(partial(made, kind), SERVED[name])
    assert calls.get("tuned", 0) <= 1


class Meta(type):
    factor = 1.0


class OfMeta(metaclass=Meta):
    """A class that has an attribute of its metaclass only."""


FACTORS = {
    "number": 1.0,
    "list": [1.0],
    "deque": collections.deque([1.0]),
    "set": {1.0},
    "nested": [{"a": [1.0]}],
    "object": Plain(),
}
FACTOR = 1.0
VARIABLE = contextvars.ContextVar("FACTOR", default=1.0)


def factor_of(kind):
    return FACTORS[kind]


def global_factor():
    return FACTOR


def called(read):
    """A function that calls a function that calls `read`."""

    def inner():
        return read()

    return lambda held: inner()


READ = {
    "environ": lambda held: float(os.environ.get("FACTOR", "1")),
    "getenv": lambda held: float(os.getenv("FACTOR", "1")),
    "class": lambda held: Plain.count,
    "metaclass": lambda held: OfMeta.factor,
    "context variable": lambda held: VARIABLE.get(),
    "environ in a function": called(lambda: float(os.environ.get("FACTOR", "1"))),
    "global in a function": called(global_factor),
    "dictionary in a function": called(lambda: factor_of("number")),
    "list in a function": called(lambda: factor_of("list")[0]),
    "deque in a function": called(lambda: factor_of("deque")[0]),
    "set in a function": called(lambda: next(iter(factor_of("set")))),
    "nested containers in a function": called(lambda: factor_of("nested")[0]["a"][0]),
    "object in a function": called(lambda: factor_of("object").count),
}


@pytest.fixture
def set_factor(monkeypatch):
    yield partial(_set_factor, monkeypatch)
    _set_factor(monkeypatch, 1.0)


def _set_factor(monkeypatch, factor):
    global FACTOR
    monkeypatch.setenv("FACTOR", str(factor))
    monkeypatch.setattr(Plain, "count", factor)
    monkeypatch.setattr(Scaled, "rate", factor)
    FACTOR = FACTORS["number"] = FACTORS["object"].count = Meta.factor = factor
    FACTORS["list"][0] = FACTORS["deque"][0] = FACTORS["nested"][0]["a"][0] = factor
    FACTORS["set"].clear()
    FACTORS["set"].add(factor)
    VARIABLE.set(factor)


@pytest.mark.parametrize("kind", READ)
def test_a_change_of_what_a_call_reads_is_a_change_of_the_model(kind, set_factor):
    model = Scaled(None, READ[kind]).eval()
    set_factor(1.0)
    state = State([model])
    model(torch.randn(2, 3, 8, 8))
    assert not state.changed()
    set_factor(3.0)
    assert state.changed()


@pytest.mark.sampled(every=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("kind", [*READ, "class of the model"])
def test_what_a_call_reads_may_change_between_calls(kind, name, set_factor):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed here")
    torch.manual_seed(0)
    read = READ.get(kind, lambda held: held.rate)
    model = Scaled(None, read).eval()
    if kind == "class of the model":
        model.forward = lambda x: model.norm(model.convolution(x)) * Scaled.rate
    x = torch.randn(2, 3, 8, 8)
    set_factor(1.0)
    tuned = TunedModule(model, always(SERVED[name]))
    for factor in (1.0, 1.0, 3.0, 5.0):
        set_factor(factor)
        close = {"rtol": 0.05, "atol": 0.05 * factor}
        torch.testing.assert_close(answer(tuned, x), answer(model, x), **close)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("nest", [lambda array: array, lambda array: [{"a": array}]])
def test_an_array_may_be_written_between_calls(nest, name):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed here")
    torch.manual_seed(0)
    array = np.ones(2)
    model = Scaled(nest(array), lambda held: float(array_in(held)[0])).eval()
    x = torch.randn(2, 3, 8, 8)
    tuned = TunedModule(model, always(SERVED[name]))
    for factor in (1.0, 1.0, 3.0, 5.0):
        array[0] = factor
        close = {"rtol": 0.05, "atol": 0.05 * factor}
        torch.testing.assert_close(answer(tuned, x), answer(model, x), **close)


def array_in(held):
    return held[0]["a"] if isinstance(held, list) else held


def test_a_bytearray_may_grow_while_it_is_watched():
    def grow(held):
        held.append(1)
        return float(len(held))

    def grown():
        torch.manual_seed(0)
        return Scaled(bytearray(b"a"), grow).eval(), torch.randn(2, 3, 8, 8)

    assert calls_as_untouched(grown, SERVED["inference_mode"]).get("tuned", 0) <= 1


@pytest.mark.parametrize("value", [np.ones(3), bytearray(b"ab"), array.array("i", [1, 2])])
def test_a_write_to_an_array_is_another_version(value):
    before = contents(value)
    assert same(before, contents(value))
    memory_of(value)[0] ^= 1
    assert not same(before, contents(value))


def test_equal_variables_and_those_of_compilers_are_no_change(monkeypatch):
    for name in ("FACTOR", "ADDED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("ADDED")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    model = Scaled(None, READ["environ"])
    weights, state = Weights(model), State([model])
    weights.remember()
    os.environ["FACTOR"] = "".join(["1"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "after"
    assert not weights.changed()
    assert not state.changed()
    os.environ["FACTOR"] = "2"
    os.environ["ADDED"] = "2"
    assert weights.changed()
    assert state.changed()
    state.restore()
    assert (os.environ["FACTOR"], os.getenv("ADDED")) == ("1", None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "after"
    assert not weights.changed()


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
def test_compiled_code_serves_a_model_that_reads_the_environment(set_factor):
    set_factor(1.0)
    torch.manual_seed(0)
    model, x = Scaled(None, READ["environ"]).eval(), torch.randn(2, 3, 8, 8)
    tuned = TunedModule(model, always(FROZEN))
    for _ in range(3):
        torch.testing.assert_close(answer(tuned, x), answer(model, x))
    assert tuned.report().calls == {"tuned": 3}
    set_factor(3.0)
    assert torch.equal(answer(tuned, x), answer(model, x))


DENSE = np.arange(24.0).reshape(2, 3, 4)
LAYOUTS = {
    "contiguous": DENSE,
    "Fortran": np.asfortranarray(DENSE),
    "permuted": DENSE.transpose(1, 0, 2),
    "reversed": DENSE[::-1],
    "gaps": DENSE[:, :, ::2],
    "complex": DENSE.T * 1j,
    "field": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])["b"],
    "objects": np.array([1, [2], None], dtype=object),
    "transposed objects": np.array([[1, [2]], [None, 3]], dtype=object).T,
    "large": np.zeros(100_000),
    "large with gaps": np.zeros((400, 400))[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_to_an_array_of_any_layout_is_seen_and_undone(layout):
    array = LAYOUTS[layout]
    model = Scaled(array, None)
    weights, state = Weights(model), State([model], keep=True)
    weights.remember()
    before = array.copy()
    assert not weights.changed()
    assert not state.changed()
    array[-1] = 9
    assert weights.changed()
    assert state.changed()
    state.restore()
    assert np.array_equal(array, before)
    assert not weights.changed()


@pytest.mark.parametrize("hold", [np.ones, lambda n: array.array("d", [1.0] * n), bytearray])
def test_a_write_far_behind_in_an_array_is_seen(hold):
    model = Scaled(hold(1_000_000), None)
    weights = Weights(model)
    weights.remember()
    memory_of(model.held)[900_000:990_000] = b"a" * 90_000
    assert weights.changed()
    weights.remember()
    memory_of(model.held)[-1] ^= 1
    assert weights.changed()


@pytest.mark.parametrize("value", [iter([1]), (n for n in [1]), io.StringIO("a"), queue.Queue()])
def test_an_iterator_is_never_known_to_be_as_it_was(value):
    assert version(value) != version(value)


@pytest.mark.parametrize("value", [None, 1, "a", b"a", [1], {}, collections.deque(), object()])
def test_other_values_have_no_version(value):
    assert version(value) is None
