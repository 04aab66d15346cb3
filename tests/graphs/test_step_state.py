"""What a recorded step reads, keeps and writes outside of its parameters and buffers."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch.graphs.settings import Settings
from steadytorch.graphs.step import (
    KEEPS_STATE,
    OUTSIDE,
    SET,
    SETTING,
    STEP,
    WRITES_INPUTS,
    CapturedStep,
)
from steadytorch.workload.reads import set_first
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import OWN_STEP, Update

from . import taped

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
SCALE = 1.0


@pytest.fixture(autouse=True)
def _tapes(monkeypatch):
    taped.install(monkeypatch)


def batches(count, size=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def trained(scope, make, data, between, optimizer):
    """Losses of a fresh model, the step, and what `make` keeps beside model and loss."""
    torch.manual_seed(0)
    model, loss, kept = make()
    inner = optimizer(model.parameters())
    step = EagerStep(model, loss, inner, update=Update(inner))
    if scope is not None:
        step = CapturedStep(step, scope, [model], check=True)
    losses = []
    for i, (x, y) in enumerate(data):
        losses.append(step((x.clone(),), {}, (y.clone(),)))
        between(i, SimpleNamespace(model=model, optimizer=inner, kept=kept))
    return torch.stack(losses), step, kept


def both(make, data, between=lambda i, held: None, optimizer=ADAMW):
    """The recorded step and what both kept, once both have trained alike."""
    one = trained(STEP, make, data, between, optimizer)
    other = trained(None, make, data, between, optimizer)
    torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-5)
    return one[1], one[2], other[2]


def at(number, change):
    return lambda i, held: change(held) if i == number else None


class CachesTable(nn.Module):
    """Keeps a table for the last batch size, in a buffer or as a new tensor."""

    def __init__(self, in_place):
        super().__init__()
        self.head, self.size, self.in_place = nn.Linear(6, 3), 0, in_place
        self.register_buffer("table", torch.zeros(8, 1))

    def forward(self, x):
        if self.size != len(x):
            self.size = len(x)
            fresh = torch.linspace(0, 1, self.size)[:, None]
            if self.in_place:
                self.table[: self.size] = fresh
            else:
                self.rows = fresh
        return self.head(x) * (self.table[: self.size] if self.in_place else self.rows)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_table_for_the_last_batch_size_is_not_stale_after_a_short_batch(in_place):
    epochs = [batch for _ in range(4) for batch in (*batches(9), *batches(1, 3))]
    step, _, _ = both(lambda: (CachesTable(in_place), functional.cross_entropy, None), epochs)
    assert step.replays >= 8
    assert step.eager[SET] > 0


def test_what_a_graph_reads_stays_alive_after_another_shape_has_replaced_it():
    model = CachesTable(in_place=False)
    inner = ADAMW(model.parameters())
    step = CapturedStep(EagerStep(model, functional.cross_entropy, inner), STEP, [model])
    for x, y in batches(6):
        step((x,), {}, (y,))
    (entry,) = step._entries.values()
    read = weakref.ref(model.rows)
    model(torch.randn(3, 6))
    assert model.rows is not read()
    assert any(getattr(getattr(v, "tensor", None), "held", None) is read() for v in entry.fixed)


def test_a_shape_is_recorded_anew_where_its_values_are_not_restored(monkeypatch):
    epochs = [batch for _ in range(8) for batch in (*batches(5), *batches(1, 3))]
    step, _, _ = both(lambda: (CachesTable(False), functional.cross_entropy, None), epochs)
    assert SETTING in step.eager  # again and again, before the recordings were repaid


def test_attributes_that_forward_sets_first_are_its_own():
    class Sized(nn.Module):
        used = 0

        def use(self):
            return self.used

        def forward(self, x, y=None):
            self.first = x.shape[0]
            self.use()
            self.used = 1
            if self.training:
                self.maybe = 1
            self.late = self.first
            if self.late:
                return x
            self.never = 1
            return x

    model = Sized()
    assert set_first(model) == {"first", "late"}
    model.first, model.maybe = 1, 1
    settings = Settings([model], functional.mse_loss)
    before = settings.fixed
    model.first = 2
    settings.remember()
    assert settings.fixed == before
    model.maybe = 2
    settings.remember()
    assert settings.fixed != before


def test_a_loss_over_parameters_of_another_optimizer_runs_eagerly():
    def make():
        model, head = nn.Linear(6, 3), nn.Linear(3, 3)
        other = torch.optim.SGD(head.parameters(), lr=0.1)
        return model, lambda out, y: functional.cross_entropy(head(out), y), other

    def update_head(i, held):
        held.kept.step()
        held.kept.zero_grad()

    step, _, _ = both(make, batches(12), update_head)
    assert step.replays == 0
    assert step.eager[OUTSIDE] > 0


def test_plain_tensors_that_train_count_as_parameters_of_others():
    def make():
        weight = torch.ones(3, requires_grad=True)
        return nn.Linear(6, 3), lambda out, y: functional.cross_entropy(out * weight, y), weight

    step, mine, theirs = both(make, batches(8))
    assert step.eager[OUTSIDE] > 0
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_frozen_discriminators_are_recorded():
    def make():
        judge = nn.Linear(3, 3).requires_grad_(False)
        return nn.Linear(6, 3), lambda out, y: functional.cross_entropy(judge(out), y), None

    assert both(make, batches(12))[0].replays >= 8


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.config, self.weights = nn.Linear(6, 3), SimpleNamespace(w=1.0), {"w": 1.0}

    def forward(self, x):
        return self.head(x) * self.config.w

    def loss(self, out, y):
        return functional.cross_entropy(out, y) * self.config.w

    def loss_of_weights(self, out, y):
        return functional.cross_entropy(out, y) * self.weights["w"]


class Inherits(Configured):
    def forward(self, x):
        return super().forward(x)


class Trainer:
    def __init__(self):
        self.config = SimpleNamespace(w=1.0)

    def loss(self, out, y):
        return self.total(out, y)

    def total(self, out, y):
        return self.single(out, y)

    def single(self, out, y):
        return functional.cross_entropy(out, y) * self.weight()

    def weight(self):
        return self.config.w


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * SCALE


def _method(kind, name):
    model = kind()
    loss = functional.cross_entropy if name == "forward" else getattr(model, name)

    def change():
        model.config.w = model.weights["w"] = 3.0

    return model, loss, change


def _of_names(held, read, change):
    loss = lambda out, y: functional.cross_entropy(out, y) * read(held)  # noqa: E731
    return nn.Linear(6, 3), loss, partial(change, held)


def _of_trainer():
    trainer = Trainer()
    return nn.Linear(6, 3), trainer.loss, lambda: setattr(trainer.config, "w", 3.0)


def _imported(out, y):
    from tests.graphs import test_step_state as this

    return functional.cross_entropy(out, y) * this.SCALE


def _of_import(loss):
    globals()["SCALE"] = sys.modules[__name__].SCALE = 1.0
    return nn.Linear(6, 3), loss, lambda: globals().update(SCALE=3.0)


def _of_distribution():
    prior = torch.distributions.Normal(torch.zeros(()), 1.0)
    loss = lambda out, y: functional.cross_entropy(out, y) * prior.factor  # noqa: E731
    prior.factor = 1.0
    return nn.Linear(6, 3), loss, lambda: setattr(prior, "factor", 3.0)


def _later(held):
    held.w = 3.0


READS = {
    "method of the model": lambda: _method(Configured, "loss"),
    "dictionary of the model": lambda: _method(Configured, "loss_of_weights"),
    "forward of the base class": lambda: _method(Inherits, "forward"),
    "methods": _of_trainer,
    "getattr": lambda: _of_names(SimpleNamespace(w=1.0), lambda c: getattr(c, "w", 1.0), _later),
    "vars": lambda: _of_names(SimpleNamespace(w=1.0), lambda c: vars(c)["w"], _later),
    "hasattr": lambda: _of_names(
        SimpleNamespace(), lambda c: c.w if hasattr(c, "w") else 1.0, _later
    ),
    "numbers as keys": lambda: _of_names(
        {0: SimpleNamespace(w=1.0)}, lambda c: c[0].w, lambda c: _later(c[0])
    ),
    "a large dictionary": lambda: _of_names(
        {f"k{i}": 1.0 for i in range(130)}, lambda c: c["k129"], lambda c: c.update(k129=3.0)
    ),
    "an object of PyTorch": _of_distribution,
    "a global of a function": lambda: _of_import(
        lambda out, y: functional.cross_entropy(Scale.apply(out), y)
    ),
    "an import": lambda: _of_import(_imported),
}


@pytest.mark.parametrize("name", READS)
def test_values_that_the_step_reads_may_change(name):
    step, _, _ = both(READS[name], batches(16), at(8, lambda held: held.kept()))
    assert step.replays >= 6, step.eager
    assert step.eager[SET] == 1


def test_a_loss_that_reads_a_scheduler_is_left_to_python():
    held = {}

    def loss(out, y):
        return functional.cross_entropy(out, y) + held["it"].last_epoch / 10 * out.square().mean()

    def optimizer(parameters):
        inner = ADAMW(parameters)
        held["it"] = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1.0)
        return inner

    make = lambda: (nn.Linear(6, 3), loss, None)  # noqa: E731
    step, _, _ = both(make, batches(15), lambda i, _: held["it"].step(), optimizer)
    assert SETTING in step.eager


def test_counters_under_odd_keys_are_state_of_python():
    def make():
        counts = {("a", 1): {"n": 0}}

        def loss(out, y):
            counts["a", 1]["n"] += 1
            return functional.cross_entropy(out, y) / counts["a", 1]["n"]

        return nn.Linear(6, 3), loss, counts

    step, mine, theirs = both(make, batches(12))
    assert step.eager[KEEPS_STATE] > 0
    assert mine == theirs


def test_checks_leave_tensors_that_the_loss_writes_to_as_they_were():
    def make():
        seen = torch.zeros(3)

        def loss(out, y):
            seen.add_(1)
            return functional.cross_entropy(out, y)

        return nn.Linear(6, 3), loss, seen

    data = [batch for size in (4, 5, 6) for batch in batches(6, size)]
    step, mine, theirs = both(make, [*data, *data])
    assert step.replays >= 15
    torch.testing.assert_close(mine, theirs)


def test_modules_that_the_loss_gets_later_are_watched_too():
    def make():
        held = {"teacher": None}

        def loss(out, y):
            teacher = held["teacher"]
            kept = 0 if teacher is None else functional.mse_loss(out, teacher(out.detach()))
            return functional.cross_entropy(out, y) + kept

        return nn.Linear(6, 3), loss, held

    def change(i, held):
        if i == 8:
            torch.manual_seed(2)
            layers = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)
            held.kept["teacher"] = nn.Sequential(*layers).requires_grad_(False)
        if i == 18:
            teacher = held.kept["teacher"]
            state = {name: value * 5 for name, value in teacher.state_dict().items()}
            teacher.load_state_dict(state, assign=True)

    step, mine, theirs = both(make, batches(26), change)
    assert step.replays >= 8
    for one, other in zip(mine["teacher"].buffers(), theirs["teacher"].buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_step_that_writes_to_its_inputs_runs_eagerly():
    def loss(out, y):
        y -= 1
        return functional.cross_entropy(out, y)

    data = [(x, y + 1) for x, y in batches(10)]
    step, _, _ = both(lambda: (nn.Linear(6, 3), loss, None), data)
    assert step.eager[WRITES_INPUTS] > 0


class Lookahead(torch.optim.AdamW):
    """Every fifth step is averaged with slow weights; the count is deep in a dictionary."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2, fused=True)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.ahead = {"all": {"count": 0}}

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.ahead["all"]["count"] += 1
        if self.ahead["all"]["count"] % 5 == 0:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def test_a_step_of_an_optimizers_own_class_runs_eagerly():
    make = lambda: (nn.Linear(6, 3), functional.cross_entropy, None)  # noqa: E731
    step, _, _ = both(make, batches(20), optimizer=Lookahead)
    assert step.update_reason == OWN_STEP
    assert step.replays > 0  # of forward and backward


def _clamp(held):
    inner, weight = held.optimizer, held.model.weight
    before = inner.step

    def step(closure=None):
        before(closure)
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)

    inner.step = step


def test_a_step_that_was_replaced_is_called():
    make = lambda: (nn.Linear(6, 3), functional.cross_entropy, None)  # noqa: E731
    step, _, _ = both(make, batches(20), at(8, _clamp))
    assert step.update_reason == OWN_STEP


def test_a_replaced_step_is_not_compiled():
    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([parameter], lr=1e-2)
    update = Update(inner, "compiled")
    torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1.0)  # wraps the step as well
    parameter.grad = torch.ones(2)
    assert not update._changes()
    _clamp(SimpleNamespace(optimizer=inner, model=SimpleNamespace(weight=parameter)))
    update()
    assert update.fallback == OWN_STEP
    assert float(parameter.detach().abs().max()) < 0.11
