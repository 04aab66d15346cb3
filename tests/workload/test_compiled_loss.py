"""A compiled loss gives what the loss gives, whatever that reads, writes or raises."""

from __future__ import annotations

import os
import random
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from steadytorch.transforms.autocast import AutocastModel
from steadytorch.workload.compiled_loss import CompiledLoss
from steadytorch.workload.narrow_output import narrow_output
from steadytorch.workload.step import EagerStep

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method`", "ignore:The .grad attribute"
)
STEPS = 6
SOFT = 0.1


@pytest.fixture
def uncompiled(monkeypatch):
    """Dynamo traces and guards as always; the traced graph runs as it is, so nothing is built."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, targets):
        self.calls += 1
        return F.cross_entropy(output, targets) * self.calls


class Centres(nn.Module):
    """Moves a buffer, keeps a value, and has a weight and a dropout of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))
        self.scale, self.drop, self.last = nn.Parameter(torch.ones(())), nn.Dropout(0.3), None

    def forward(self, output, targets):
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        loss = F.cross_entropy(self.drop(output - self.centre) * self.scale, targets)
        self.last = loss.detach()
        return loss


def of_its_own_numbers():
    numbers = random.Random(3)
    return (lambda o, t: F.cross_entropy(o, t) * numbers.uniform(0.5, 1.5)), None


def of_a_cached_projection():
    @lru_cache
    def projection(size):
        return torch.randn(size, size)

    return (lambda o, t: F.cross_entropy(o @ projection(10), t)), None


def with_probabilities(o, t):
    return F.binary_cross_entropy(o.sigmoid(), F.one_hot(t, 10).float())


def annealed():
    held = {"weight": 1.0}
    return (lambda o, t: F.cross_entropy(o, t) * held["weight"]), held


def optional():
    held: dict[str, float] = {}
    return (lambda o, t: F.cross_entropy(o, t) * held.get("weight", 1.0)), held


class Optional(nn.Module):
    def forward(self, output, targets):
        return F.cross_entropy(output, targets) * getattr(self, "weight", 1.0)


def logging():
    log: list[float] = []

    def loss(o, t):
        found = F.cross_entropy(o, t)
        log.append(found.item())
        return found

    return loss, log


def failing():
    held = {"step": 0}

    def loss(o, t):
        if held["step"] == 3:
            raise ValueError("step 3 is not wanted")
        return F.cross_entropy(o, t)

    return loss, held


def asserting():
    def loss(o, t):
        found = F.cross_entropy(o, t)
        assert torch.isfinite(found), "not finite"
        return found

    return loss, None


def module(kind, *args, **kwargs):
    def make():
        made = kind(*args, **kwargs)
        return made, made

    return make


def function(loss):
    return lambda: (loss, None)


def later(change):
    """Changes what the loss reads before the third step."""
    return lambda held, i: change(held) if i == 2 else None


def hooked(held):
    held.register_forward_hook(lambda _module, _given, output: output * 2)


def hooked_inside(held):
    held.drop.register_forward_hook(lambda _module, _given, output: output * 2)


def random_state(output):
    return output + 0.1 * torch.randn_like(output)


LOSSES = {
    "a function": (function(F.cross_entropy), None),
    "a module": (module(nn.CrossEntropyLoss, label_smoothing=SOFT), None),
    "weights replaced": (
        module(nn.CrossEntropyLoss, weight=torch.ones(10)),
        later(lambda held: setattr(held, "weight", torch.linspace(1, 2, 10))),
    ),
    "a rate that changes once": (
        module(nn.CrossEntropyLoss, label_smoothing=SOFT),
        later(lambda held: setattr(held, "label_smoothing", 3 * SOFT)),
    ),
    "a weight that changes": (annealed, lambda held, i: held.update(weight=1.0 + i)),
    "a hook": (module(nn.CrossEntropyLoss), later(hooked)),
    "a hook inside": (module(Centres), later(hooked_inside)),
    "another mode": (module(Centres), later(lambda held: held.eval())),
    "another forward": (
        module(Centres),
        later(lambda held: setattr(held, "forward", F.cross_entropy)),
    ),
    "a log": (logging, None),
    "a counter": (module(Counts), None),
    "noise": (function(lambda o, t: F.cross_entropy(random_state(o), t)), None),
    "NumPy's numbers": (
        function(lambda o, t: F.cross_entropy(o, t) * float(np.random.beta(0.5, 0.5))),
        None,
    ),
    "numbers of its own": (of_its_own_numbers, None),
    "a cached projection": (of_a_cached_projection, None),
    "probabilities": (function(with_probabilities), None),
    "Python's numbers": (function(lambda o, t: F.cross_entropy(o, t) * random.random()), None),
    "an assertion": (asserting, None),
    "an assertion that fails": (asserting, later(lambda _: None)),
    "an error": (failing, lambda held, i: held.update(step=i)),
    "a branch": (
        function(lambda o, t: F.cross_entropy(o, t) if o.sum() > 0 else o.square().mean()),
        None,
    ),
    "in-place": (function(lambda o, t: F.cross_entropy(o.div_(2), t)), None),
    "the environment": (
        function(lambda o, t: F.cross_entropy(o, t) * float(os.environ.get("A_SCALE", "1"))),
        later(lambda _: os.environ.update(A_SCALE="3")),
    ),
    "an entry that was not there": (optional, later(lambda held: held.update(weight=3.0))),
    "an attribute that was not there": (
        module(Optional),
        later(lambda held: setattr(held, "weight", 3.0)),
    ),
}


def converting(loss):
    """A loss of 16-bit outputs that converts them first, as a compiled loss does when told to."""
    return lambda output, targets: loss(output.float(), targets)


def trained(make, change, given, compiles, narrow=False):
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    loss, held = make()
    called = CompiledLoss(loss) if compiles else loss
    found = SimpleNamespace(values=[], errors=[], called=called)
    if narrow:
        called = partial(called, dtype=torch.float32) if compiles else converting(loss)
    for i, (x, targets) in enumerate(given):
        if change is not None:
            change(held, i)
        x = x.clone().requires_grad_()
        try:
            value = called(x.bfloat16() if narrow else x * 1.0, targets)
            value.backward()
            found.values += [value.detach(), x.grad]
        except (ValueError, AssertionError) as error:
            found.errors.append((i, type(error), str(error)))
    found.random = torch.get_rng_state().tolist(), np.random.random(), random.random()
    if isinstance(loss, nn.Module):
        found.values += [v.detach() for v in loss.state_dict().values()]
        found.values += [p.grad for p in loss.parameters()]
        found.values.append(torch.tensor(float(getattr(loss, "calls", 0))))
        found.values.append(torch.as_tensor(getattr(loss, "last", 0.0)))
    found.held = held if isinstance(held, list) else None
    return found


CHANGES = "values that it reads change"
DEPENDS = "it cannot be compiled: Unsupported: Data-dependent"
CALLED = {
    "a weight that changes": CHANGES,
    "a counter": CHANGES,
    "a log": "",
    "NumPy's numbers": "it cannot be compiled: ",
    "Python's numbers": "it cannot be compiled: ",
    "numbers of its own": "it cannot be compiled: ",
    "a cached projection": "it cannot be compiled: ",
    "probabilities": "it cannot be compiled: ",
    "an assertion": DEPENDS,
    "an assertion that fails": DEPENDS,
    "a branch": DEPENDS,
    "an error": "",
    "the environment": "it reads the environment",
}
"""How the reason begins why some are called as they are."""


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16 output"])
@pytest.mark.parametrize("name", LOSSES)
def test_it_gives_what_the_loss_gives(name, narrow, uncompiled, monkeypatch):
    make, change = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    given = [(torch.randn(8, 10, generator=generator), torch.arange(8) % 10) for _ in range(STEPS)]
    if name == "an assertion that fails":
        given[2][0].fill_(float("inf"))
    found = []
    for compiles in (False, True):
        monkeypatch.delenv("A_SCALE", raising=False)
        found.append(trained(make, change, given, compiles, narrow))
    one, other = found
    assert one.errors == other.errors
    assert (name in ("an error", "an assertion that fails")) is bool(one.errors)
    torch.testing.assert_close(other.values, one.values, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert one.random == other.random
    assert one.held == other.held
    fallback = other.called.fallback
    assert (fallback is not None) is (name in CALLED)
    assert fallback is None or (fallback.startswith(CALLED[name]) and "\n" not in fallback)


def test_cached_functions_are_refused_by_each_loss(uncompiled):
    """Dynamo's warning comes once in a process."""
    for _ in range(2):
        made, _ = of_a_cached_projection()
        loss = CompiledLoss(made)
        loss(torch.randn(4, 10), torch.arange(4))
        assert "lru_cache" in loss.fallback


@pytest.mark.parametrize("zero", [0, 0.0])
def test_not_a_number_times_zero_is_none(zero):
    def loss(o, t):
        return F.cross_entropy(o, t) + (o.log() * zero).mean()

    x = -torch.ones(4, 10)
    called = CompiledLoss(loss)
    assert called(x, torch.arange(4)).isnan()
    assert called.fallback is None


def test_hooks_on_all_modules_are_called(uncompiled):
    called = CompiledLoss(nn.CrossEntropyLoss())
    given = torch.randn(4, 10), torch.arange(4)

    def doubled(module, args, loss):
        return 2 * loss if isinstance(module, nn.CrossEntropyLoss) else None

    before = called(*given)
    handle = register_module_forward_hook(doubled)
    try:
        hooked = called(*given)
    finally:
        handle.remove()
    torch.testing.assert_close(hooked, 2 * before)
    torch.testing.assert_close(called(*given), before)
    assert called.fallback is None


def test_our_own_hooks_leave_it_compiled(uncompiled, monkeypatch):
    """A run may be watched, which puts hooks on all modules."""
    called = CompiledLoss(nn.CrossEntropyLoss())
    monkeypatch.setattr(called, "_own", None)

    def watch(module, args, output):
        return None

    watch.__module__ = "steadytorch.watching.watch"
    handle = register_module_forward_hook(watch)
    try:
        assert called(torch.randn(4, 10), torch.arange(4)).isfinite()
    finally:
        handle.remove()


@pytest.mark.parametrize("prints", [False, True])
def test_views_of_one_output_stay_views(uncompiled, prints):
    def loss(outputs, targets):
        print(end="") if prints else None
        outputs[1].mul_(2)
        return F.cross_entropy(outputs[0], targets)

    x, targets = torch.randn(4, 10), torch.arange(4)
    expected = loss((one := x.clone(), one[:, :3]), targets)
    called = CompiledLoss(loss)
    found = called((other := x.clone(), other[:, :3]), targets)
    assert (called.fallback is not None) is prints
    torch.testing.assert_close(found, expected)


def test_other_shapes_are_not_compiled(uncompiled):
    sizes = []
    loss = CompiledLoss(lambda o, t: (sizes.append(len(o)), F.cross_entropy(o, t))[1])
    for size in (8, 4, 2, 6):
        x = torch.randn(size, 10)
        torch.testing.assert_close(
            loss(x, torch.arange(size)), F.cross_entropy(x, torch.arange(size))
        )
    assert loss.fallback is None
    assert sizes == [8, 4, 2, 6]


@pytest.mark.slow  # the contract of transforms builds one, too
def test_inductor_builds_it_with_the_same_random_numbers():
    def noisy(output, targets):
        return F.cross_entropy(F.dropout(output, 0.5), targets, label_smoothing=SOFT)

    given = [(torch.randn(64, 50), torch.arange(64) % 50)] * 3
    one, other = (trained(function(noisy), None, given, compiles) for compiles in (False, True))
    assert other.called.fallback is None
    torch.testing.assert_close(other.values, one.values)
    assert one.random == other.random


def test_a_loss_may_branch_by_an_operator_that_takes_functions(uncompiled):
    def loss(output, targets):
        own = F.cross_entropy
        return torch.cond(targets.sum() > 9, own, lambda o, t: 2 * own(o, t), (output, targets))

    compiled, output = CompiledLoss(loss), torch.randn(4, 10, requires_grad=True)
    for targets in (torch.tensor([1, 2, 3, 0]), torch.tensor([9, 2, 3, 0])):
        assert compiled(output, targets) == loss(output, targets)
    assert compiled.fallback is None


class Watched(CompiledLoss):
    """Notes the dtypes of the outputs that it is given."""

    def __call__(self, output, *targets, dtype=None):
        held = output["logits"] if isinstance(output, dict) else output
        self.seen = [*getattr(self, "seen", []), held.dtype]
        return super().__call__(output, *targets, dtype=dtype)


def wide_loss(output, targets):
    logits = output["logits"] if isinstance(output, dict) else output
    assert logits.dtype == torch.float32
    return F.cross_entropy(logits, targets)


def printing_loss(output, targets):
    print(end="")
    return wide_loss(output, targets)


def train_under_autocast(loss, compiled, keys=False):
    """Losses and weights of three steps in bf16 autocast; with `keys` the model returns a dict."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 10)
    model = AutocastModel(
        (lambda x: {"logits": layer(x)}) if keys else layer, "cpu", torch.bfloat16, torch.float32
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = EagerStep(model, loss, optimizer, compiled_loss=compiled, autocast=True)
    x = torch.randn(4, 8)
    losses = [step((x,), {}, (torch.arange(4),)) for _ in range(3)]
    return [*losses, *map(torch.Tensor.detach, layer.parameters())]


@pytest.mark.parametrize(
    ("loss", "keys", "expected"),
    [
        (wide_loss, False, torch.bfloat16),
        (printing_loss, False, torch.bfloat16),  # is not compiled, and converted all the same
        (wide_loss, True, torch.float32),
    ],
    ids=["tensor", "fallback", "dict"],
)
def test_an_output_in_16_bits_is_converted_by_the_compiled_loss(uncompiled, loss, keys, expected):
    compiled = Watched(loss)
    found = train_under_autocast(loss, compiled, keys)
    right = train_under_autocast(loss, None, keys)
    assert compiled.seen == [expected] * 3
    assert (compiled.fallback is None) is (loss is wide_loss)
    assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("in_list", [False, True])
def test_a_model_inside_returns_what_it_does_elsewhere(uncompiled, in_list):
    """Only the plan's own autocast may leave its output to the loss."""
    inner = AutocastModel(nn.Linear(8, 10), "cpu", torch.bfloat16, torch.float32)
    seen = []

    class Outer(nn.Module):
        def forward(self, given):
            x = given[0] if in_list else given
            seen.append(inner(x).dtype)
            return inner(x)

    for autocast in (False, True):
        model: Any = Outer()
        if autocast:
            model = AutocastModel(model, "cpu", torch.bfloat16, torch.float32)
        optimizer = torch.optim.SGD(inner.model.parameters(), lr=0.1)
        compiled = Watched(wide_loss)
        step = EagerStep(model, wide_loss, optimizer, compiled_loss=compiled, autocast=autocast)
        x = torch.randn(4, 8)
        step(([x] if in_list else x,), {}, (torch.arange(4),))
        assert compiled.seen == [torch.float32]
    assert seen == [torch.float32] * 2


def test_outputs_are_converted_where_no_loss_asks(uncompiled):
    model = AutocastModel(nn.Linear(8, 10), "cpu", torch.bfloat16, torch.float32)
    x = torch.randn(4, 8)
    assert model(x).dtype == torch.float32
    with narrow_output(allowed=True) as narrow:
        assert model(x).dtype == torch.bfloat16
        with narrow_output(allowed=False):
            assert model(x).dtype == torch.float32
    assert narrow.dtype == torch.float32
    assert model(x).dtype == torch.float32
