from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import executors
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.served_inputs import (
    NOT_FINITE,
    OUT_OF_RANGE,
    OUT_OF_RANGE_OR_WIDE,
    WIDE,
    Guarded,
    NotServedError,
    are_finite,
    are_narrow,
)
from steadytorch.runtime.trained import TrainedModule
from steadytorch.workload.index_ranges import Range
from steadytorch.workload.indices import Indices

from .conftest import FROZEN, always, answer

ENGINES = {name: (TransformSpec(name),) for name in ("onnxruntime", "openvino")}
WAYS = {"frozen": FROZEN, **ENGINES}
UNTOUCHED = f"untouched: {NOT_FINITE}"


class Clamped(nn.Module):
    """Layers behind which some of fused code loses NaN."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x, mask=None):
        x = nn.functional.max_pool2d(torch.relu(self.convolution(x)), 2).amax((2, 3))
        x = self.head(x)
        return x if mask is None else (x + mask).softmax(1)


def given(value=None, place=5):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    if value is not None:
        x.view(-1)[place] = value
    return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Clamped().eval()


def tuned_by(model, name, **options):
    if name in ENGINES:
        pytest.importorskip(name, reason=f"{name} is not installed here")
    return TunedModule(model, always(WAYS[name]), options=ServingOptions(**options))


def assert_same(tuned, model, *args):
    torch.testing.assert_close(
        answer(tuned, *args), answer(model, *args), rtol=1e-4, atol=1e-5, equal_nan=True
    )


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize(
    ("name", "canary"),
    [("frozen", True), ("frozen", False), ("onnxruntime", False), ("openvino", True)],
)
def test_nan_and_infinity_run_untouched_and_the_plan_stays(model, name, canary):
    tuned = tuned_by(model, name, canary=canary)
    for value in (math.nan, None, None, math.nan, None, math.inf, -math.inf, None):
        assert_same(tuned, model, given(value))
    calls = tuned.report().calls
    assert calls[UNTOUCHED] == 4
    assert calls.get("tuned", 0) + calls.get("untouched: the canary is checking the plan", 0) == 4
    assert answer(model, given(math.nan)).isnan().any()  # else nothing was at stake


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["frozen", "openvino"])
@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_a_mask_with_infinities_is_served_but_not_one_with_nan(model, name, lowest):
    tuned, mask = tuned_by(model, name, canary=False), torch.tensor([[0.0, lowest]] * 2)
    for _ in range(3):
        assert_same(tuned, model, given(), mask)
    assert_same(tuned, model, given(), torch.tensor([[0.0, math.nan]]))
    assert tuned.report().calls == {"tuned": 3, UNTOUCHED: 1}


@pytest.mark.filterwarnings("ignore")
def test_checks_of_later_calls_leave_nan_to_the_model(model):
    tuned = tuned_by(model, "frozen", canary=False, verify_every=2)
    for value in (None, math.nan, math.nan, None, math.nan, math.nan):
        assert_same(tuned, model, given(value))
    assert tuned.report().calls == {"tuned": 2, UNTOUCHED: 4}


def returned(*args, **kwargs):
    return args, kwargs


def finite(args, kwargs=None):
    return Guarded(returned, args, kwargs or {}, are_finite(args, kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_finite_values_are_let_through(dtype):
    x = torch.full((64, 64), 1e4, dtype=dtype)
    call = finite((x,))
    assert call(x) == ((x,), {})
    x[3, 4] = math.nan
    with pytest.raises(NotServedError, match="NaN or infinities"):
        call(x)


def test_nan_in_8_bits_is_refused():
    x = torch.ones(3).to(torch.float8_e4m3fn)
    call = finite((x,))
    assert not call.refuses((x,), {})
    assert call.refuses((torch.full((3,), math.nan).to(torch.float8_e4m3fn),), {})


def test_nested_inputs_are_watched_and_integers_are_not():
    x, number = torch.ones(3), torch.arange(3)
    call = finite((number, {"x": [x]}), {"y": x + 1})
    call(number, {"x": [x]}, y=x + 1)
    assert call.refuses((number, {"x": [x * math.inf]}), {"y": x})
    assert call.refuses((number, {"x": [x]}), {"y": x * math.nan})
    assert are_finite((number,), {"flag": True}) == []


class Embedded(nn.Module):
    """Looks rows up, as models of tokens do."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(1000, 64), nn.Linear(64, 4)
        self.register_buffer("places", torch.arange(64))

    def forward(self, ids):
        return self.head(self.rows(ids) + self.places).relu()


def ids(*changed):
    found = torch.arange(64 * 64).view(64, 64) % 1000
    for value in changed:
        found[3, 5] = value
    return found


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize(("name", "canary"), [(name, name == "frozen") for name in WAYS])
def test_an_index_out_of_range_raises_as_in_the_model(name, canary):
    """Compiled code would end the process, and other engines would return something."""
    model = Embedded().eval()
    tuned = tuned_by(model, name, canary=canary)
    for _ in range(3):
        answer(tuned, ids())
    for wrong in (1000, 1 << 40, -1):
        with pytest.raises(IndexError):
            answer(tuned, ids(wrong))
    assert_same(tuned, model, ids(999))
    calls = tuned.report().calls
    assert calls[f"untouched: {OUT_OF_RANGE}"] == 3
    assert calls["tuned"] == 4


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
def test_training_leaves_an_index_out_of_range_to_the_model(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph)
    model = Embedded().train()
    plan = always((TransformSpec("compile"),))
    tuned = TrainedModule(model, plan, None, ServingOptions(trains=True))
    for wrong in ((), (), (5000,), ()):
        with pytest.raises(IndexError) if wrong else nullcontext():
            tuned(ids(*wrong)).sum().backward()
    assert tuned.report().calls == {"tuned": 3, f"untouched: {OUT_OF_RANGE}": 1}


def test_a_plan_whose_first_call_is_at_fault_leaves_the_error_to_the_model():
    tuned = TunedModule(Embedded().eval(), always(FROZEN))
    for _ in range(2):
        with pytest.raises(IndexError):
            answer(tuned, ids(5000))


class Plain(Embedded):
    """Refuses to run while its operators are recorded."""

    def forward(self, ids):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("no mode is wanted")
        return super().forward(ids)


class Features(nn.Module):
    """Looks up a category of each column, as models of tables do."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(30, 8)
        self.register_buffer("offsets", torch.tensor([0, 10, 20]))

    def forward(self, x):
        return self.rows(x.long() + self.offsets).relu().sum(1)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", WAYS)
def test_an_index_that_the_model_computes_raises_as_in_the_model(name):
    model, x = Features().eval(), torch.rand(4, 3) * 10
    tuned = tuned_by(model, name)
    for _ in range(3):
        answer(tuned, x)
    for wrong in (1000.0, 10.0, -1.0):
        bad = x.clone()
        bad[0] = wrong
        with pytest.raises(IndexError):
            answer(tuned, bad)
    model.offsets -= 10
    with pytest.raises(IndexError):
        answer(tuned, x)
    model.offsets += 10
    assert_same(tuned, model, x)
    calls = tuned.report().calls
    reason = OUT_OF_RANGE_OR_WIDE if name in ENGINES else OUT_OF_RANGE
    assert calls[f"untouched: {reason}"] == 4


class Times(nn.Module):
    """Computes with times in milliseconds, which exceed 2^24."""

    def forward(self, times):
        return (times - times.min()) % 1000 + 1


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", WAYS)
def test_large_integers_are_those_of_the_model(name):
    """Engines compute in float32, which holds integers up to 2^24."""
    model, times = Times().eval(), torch.arange(64) * 37
    tuned = tuned_by(model, name)
    for _ in range(2):
        answer(tuned, times)
    for later in (times + 1_700_000_000_000, times - (1 << 40)):
        assert torch.equal(answer(tuned, later), model(later))
    assert answer(tuned, times) is not None
    calls = tuned.report().calls
    narrow = name in ENGINES
    assert calls == ({"tuned": 3, f"untouched: {WIDE}": 2} if narrow else {"tuned": 5})


class Hashed(nn.Module):
    """Looks ids up by their hash, whose products may exceed 2^24."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 4)

    def forward(self, ids):
        return self.rows(ids * 1_000_003 % 50)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", WAYS)
def test_large_integers_that_a_model_computes_are_its_own(name):
    torch.manual_seed(0)
    model, ids = Hashed().eval(), torch.arange(16)
    tuned = tuned_by(model, name)
    for _ in range(2):
        answer(tuned, ids)
    for later in (ids + 5_000, ids * 1_000, ids - 100_000):
        assert torch.equal(answer(tuned, later), model(later))
    assert answer(tuned, ids) is not None
    untouched = {f"untouched: {OUT_OF_RANGE_OR_WIDE}": 3} if name in ENGINES else {}
    assert tuned.report().calls == {"tuned": 6 - sum(untouched.values())} | untouched


def test_an_input_is_tested_once_for_what_it_must_be():
    given = ids(), torch.arange(3), torch.ones(3)
    found = are_narrow(given, {}, Indices({0: Range(0, 9, -100)}))
    assert [test.fails([None, torch.tensor([1 << 31]), None]) for test in found] == [True]
    assert len(are_narrow(given, {}, Indices({0: Range(0, 1 << 40)}))) == 2


class Held(nn.Module):
    """Holds what shifts its indices in a buffer, a plain tensor and a scripted module."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.tensor([1]))
        self.plain = torch.tensor([1])
        self.scripted = torch.jit.script(nn.Linear(4, 4))
        self.rows = nn.Embedding(9, 4)

    def forward(self, x):
        return self.scripted(self.rows((x + 0.5).long() + self.buffer + self.plain))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["buffer", "plain"])
def test_what_a_model_holds_is_read_where_it_is(name):
    model, x = Held(), torch.rand(3)
    found = executors._indices(model, (x,), {}, torch.device("cpu"))
    assert not found.out_of_range([x])
    getattr(model, name).add_(8)
    assert found.out_of_range([x])


def test_indices_are_unknown_where_the_model_cannot_be_recorded():
    device = torch.device("cpu")
    assert executors._indices(Embedded(), (ids(),), {}, device)
    assert not executors._indices(Plain(), (ids(),), {}, device)
    with pytest.raises(IndexError):
        executors._indices(Plain(), (ids(5000),), {}, device)
