"""Recorded training steps take the eager steps; recordings are tapes of operators on the CPU."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections import OrderedDict, deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.graphs import step as recorded
from steadytorch.graphs.checks import Snapshot
from steadytorch.graphs.step import (
    BACKWARD,
    CLOSED,
    HOST_RANDOM,
    KEEPS_STATE,
    MODE,
    MOVING,
    NEEDS_GRADIENT,
    NOT_STRIDED,
    SET,
    SETTING,
    STEP,
    UPDATE,
    WARMING,
    CapturedStep,
)
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import Update

from . import taped

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


@pytest.fixture(autouse=True)
def _tapes(monkeypatch):
    taped.install(monkeypatch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.one(x)))))


def batches(count, size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 6, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def made(scope=STEP, optimizer="adamw", model=Net, groups=None, merge=False, check=True, **options):
    """A step that records; without a scope the eager step that it is to equal."""
    torch.manual_seed(0)
    net = model()
    parameters = net.parameters() if groups is None else groups(net)
    inner = OPTIMIZERS[optimizer](parameters)
    loss = options.pop("loss", functional.cross_entropy)
    eager = EagerStep(net, loss, inner, update=Update(inner, "fused", merge), **options)
    step = eager if scope is None else CapturedStep(eager, scope, [net], check=check)
    return step, net, inner


def train(step, data, between=lambda i: None):
    torch.manual_seed(7)
    losses = []
    for i, (x, y) in enumerate(data):
        losses.append(step((x,), {}, (y,)))
        between(i)
    return torch.stack(losses)


def both(data, between=lambda net, inner: lambda i: None, **options):
    found = []
    for scope in (options.pop("scope", STEP), None):
        step, net, inner = made(scope, **options)
        found.append((step, net, inner, train(step, data, between(net, inner))))
    return found


def assert_same(one, other):
    (_, net, inner, losses), (_, net2, inner2, losses2) = one, other
    torch.testing.assert_close(losses, losses2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.state_dict(), net2.state_dict(), rtol=1e-5, atol=1e-6)
    states = [o.state_dict()["state"] for o in (inner, inner2)]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", [BACKWARD, UPDATE, STEP])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_those_of_the_eager_loop(scope, optimizer, accumulate):
    def schedule(net, inner):
        def lower(i):
            for group in inner.param_groups:
                group["lr"] *= 0.97

        return lower

    one, other = both(
        batches(15), schedule, scope=scope, optimizer=optimizer, accumulate=accumulate, clip=1.0
    )
    assert one[0].replays >= 9, one[0].eager
    assert_same(one, other)


class FunctionMode(TorchFunctionMode):
    """Doubles losses, which a replay would not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is functional.cross_entropy else result


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
def test_steps_inside_a_mode_run_eagerly(mode):
    data, losses = batches(17), []
    (recording, _, _), (eager, _, _) = made(), made(None)
    for step in (recording, eager):
        train(step, data[:15])
        with mode():
            losses.append(train(step, data[15:16]))
        losses.append(train(step, data[16:]))
    assert recording.replays >= 3
    assert recording.eager[MODE] == 1
    torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-5, atol=1e-6)


def reasons(step):
    return set(step.eager) - {WARMING}


@pytest.mark.parametrize("scope", [UPDATE, STEP])
def test_merged_groups_whose_rates_part_are_recorded_anew(scope):
    def part(net, inner):
        def at(i):
            if i == 8:
                inner.param_groups[0]["lr"] = 0.0
            elif i > 8:
                inner.param_groups[1]["lr"] *= 0.9

        return at

    one, other = both(
        batches(18),
        part,
        scope=scope,
        optimizer="sgd",
        merge=True,
        groups=lambda net: [{"params": [p]} for p in net.parameters()],
    )
    assert one[0].replays >= 12, one[0].eager
    assert_same(one, other)


@pytest.mark.parametrize("at_call", [1, 8])
@pytest.mark.parametrize("trains", [False, True])
def test_groups_may_be_added_later(at_call, trains):
    def groups(net):
        net.one.requires_grad_(False)
        return [{"params": [*net.norm.parameters(), *net.head.parameters()]}]

    def unfreeze(net, inner):
        def at(i):
            if i == at_call:
                inner.add_param_group({"params": list(net.one.parameters()), "lr": 0.01})
                net.one.requires_grad_(trains)

        return at

    one, other = both(batches(20), unfreeze, groups=groups)
    assert one[0].replays >= 12, one[0].eager
    assert_same(one, other)


def test_parameters_taken_from_a_group_are_no_longer_updated():
    def remove(net, inner):
        def at(i):
            if i == 8:
                group = inner.param_groups[0]
                group["params"] = [p for p in group["params"] if p is not net.norm.bias]
                del inner.state[net.norm.bias]

        return at

    one, other = both(batches(16), remove)
    assert_same(one, other)


def test_hooks_of_the_optimizer_are_called_when_they_come_later():
    calls = []

    def hook(net, inner):
        def at(i):
            if i == 8:
                inner.register_step_post_hook(lambda *args: calls.append(inner))

        return at

    one, other = both(batches(16), hook)
    assert calls == [one[2]] * 7 + [other[2]] * 7
    assert one[0].replays >= 10
    assert_same(one, other)


def test_global_hooks_hear_of_each_step_once():
    seen = []
    handle = register_optimizer_step_post_hook(lambda *args: seen.append(args))
    try:
        step, _, inner = made()
        train(step, batches(10))
    finally:
        handle.remove()
    assert step.replays
    assert seen == [(inner, (inner,), {})] * 10


def test_a_scaler_is_updated_once_a_step():
    found = []
    for scope in (STEP, None):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
        step, net, inner = made(scope, scaler=scaler)
        found.append((step, net, inner, train(step, batches(12))))
        found[-1] += (scaler.state_dict(),)
    assert found[0][0].replays >= 6
    assert found[0][4] == found[1][4]
    assert_same(found[0][:4], found[1][:4])


def test_an_update_that_waits_for_the_gpu_is_taken_once(monkeypatch):
    step, net, inner = made()
    data = batches(8) + batches(4, size=5)
    losses = [train(step, data[:8])]
    kept = []

    def synchronisations(watched=True):
        kept.append(watched)
        return nullcontext(["it waits"] if watched and len(kept) % 2 == 0 else [])

    monkeypatch.setattr(recorded, "synchronisations", synchronisations)
    losses.append(train(step, data[8:]))
    assert step.update_reason == "it waits"
    losses.append(train(step, data[:8]))
    plain, net2, inner2 = made(None)
    right = [train(plain, part) for part in (data[:8], data[8:], data[:8])]
    assert step.replays >= 8
    assert_same((step, net, inner, torch.cat(losses)), (plain, net2, inner2, torch.cat(right)))


@pytest.mark.parametrize(("fails_at", "error"), [(2, "memory"), (3, "memory"), (2, "other")])
def test_a_comparison_that_fails_takes_no_step(monkeypatch, fails_at, error):
    taken, calls = Snapshot.taken, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("full") if error == "memory" else KeyboardInterrupt
        return taken(self, *args)

    monkeypatch.setattr(Snapshot, "taken", failing)
    step, net, inner = made()
    data = batches(8)
    if error == "memory":
        losses = train(step, data)
    else:
        losses = [train(step, data[:3])]
        random = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            step((data[3][0],), {}, (data[3][1],))
        assert torch.equal(torch.get_rng_state(), random)
        losses = torch.cat([losses[0], torch.stack([step((x,), {}, (y,)) for x, y in data[3:]])])
        assert step.replays == 5
    plain, net2, inner2 = made(None)
    assert_same((step, net, inner, losses), (plain, net2, inner2, train(plain, data)))


def test_the_eager_steps_of_a_comparison_come_before_the_recording(monkeypatch):
    """A graph keeps the memory of a step, which eager steps would need a second time."""
    done = []
    taken, record = Snapshot.taken, CapturedStep._record

    def noted_step(self, *args):
        done.append("step")
        taken(self, *args)

    def noted_recording(self, *args, **options):
        done.append("recording")
        return record(self, *args, **options)

    monkeypatch.setattr(Snapshot, "taken", noted_step)
    monkeypatch.setattr(CapturedStep, "_record", noted_recording)
    step, _, _ = made()
    train(step, batches(6))
    assert done == ["step", "step", "recording", "step"]


class Large(Net):
    """Memory runs out where a batch of three comes beside recorded graphs, in forward."""

    step: CapturedStep | None = None

    def forward(self, x):
        out = super().forward(x)
        if self.step is not None and x.shape[0] == 3 and self.step._has_graphs():
            raise torch.OutOfMemoryError("full")
        return out


@pytest.mark.parametrize("shortfalls", [1, 6])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_finds_no_memory_beside_graphs_is_taken_without_them(shortfalls, accumulate):
    found = []
    for scope in (STEP, None):
        step, net, inner = made(scope, model=Large, accumulate=accumulate)
        if scope is not None:
            net.step = step
        data = [b for _ in range(shortfalls) for b in (*batches(16), *batches(2, 3))]
        found.append((step, net, inner, train(step, data)))
    step = found[0][0]
    assert (recorded.FULL in step.eager) is (shortfalls > 1)
    assert step.replays >= 8
    assert_same(*found)


def test_a_step_repaid_its_recordings_if_memory_runs_out_seldom(monkeypatch):
    monkeypatch.setattr(recorded, "REPAID", 8)
    step, net, _ = made(model=Large)
    net.step = step
    train(step, [b for _ in range(6) for b in (*batches(16), *batches(2, 3))])
    assert recorded.FULL not in step.eager
    assert step.graphs == 6


def test_gradients_that_overflow_are_compared_too():
    def loss(output, target):
        return functional.cross_entropy(output, target) * 1e38 * 1e38

    step, _, _ = made(loss=loss, model=lambda: nn.Linear(6, 3))
    train(step, batches(8))
    assert step.replays >= 4, step.eager


class Weighted(Net):
    weight = 1.0

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_values_of_python_that_change_are_seen():
    def change(net, inner):
        def at(i):
            if i == 8:
                net.scale = 0.5
            if i == 14:
                net.drop.p = 0.6

        return at

    one, other = both(batches(24), change, model=Weighted)
    assert one[0].replays >= 12, one[0].eager
    assert_same(one, other)


def test_values_that_change_at_each_step_leave_it_to_python():
    weight = {"now": 0.0}
    beta = 0.0

    def loss(output, target):
        return functional.cross_entropy(output, target) + beta * output.square().mean()

    def anneal(net, inner):
        nonlocal beta
        beta = 0.0

        def at(i):
            nonlocal beta
            beta = weight["now"] = i / 10

        return at

    one, other = both(batches(20), anneal, loss=loss)
    assert reasons(one[0]) == {SET, SETTING}
    assert_same(one, other)


def test_what_a_module_in_the_loss_function_reads_may_change():
    criterion = nn.CrossEntropyLoss(torch.ones(3))

    def loss(output, target):
        return criterion(output, target)

    def change(net, inner):
        criterion.label_smoothing, criterion.weight = 0.0, torch.ones(3)

        def at(i):
            if i == 10:
                criterion.label_smoothing = 0.3
            elif i == 18:
                criterion.weight = torch.tensor([1.0, 2.0, 3.0])

        return at

    one, other = both(batches(28), change, loss=loss)
    assert one[0].replays >= 12, one[0].eager
    assert_same(one, other)


def test_attributes_that_the_step_sets_are_no_change():
    class Sized(Net):
        size = 0

        def forward(self, x):
            self.size = x.shape[0]
            return super().forward(x)

    data = [*batches(5, 8), *batches(4, 5)]
    data += [b for i in range(5) for b in (*batches(1, 8, i), *batches(1, 5, i))]
    one, other = both(data, model=Sized)
    assert one[0].replays >= 12, one[0].eager
    assert_same(one, other)


def test_attributes_that_a_validation_sets_keep_the_graphs():
    class Sized(Net):
        def forward(self, x):
            self.size = x.shape[0]
            return super().forward(x)

    step, net, _ = made(model=Sized)
    for _ in range(6):
        train(step, batches(6))
        net(torch.randn(3, 6))
    assert step.graphs == 1
    assert step.eager[SET] == 5


class Kept:
    """What a step may keep in an object."""

    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.calls, self.mean, self.slot = 0, torch.zeros(()), 0
        self.seen = {}


class KeepsInObject(Net):
    def __init__(self):
        super().__init__()
        self.kept = Kept()

    def forward(self, x):
        self.kept.calls += 1
        return super().forward(x) / self.kept.calls


class KeepsInSlot(KeepsInObject):
    def forward(self, x):
        self.kept.slot += 1
        return Net.forward(self, x) / self.kept.slot


class KeepsInDictionary(Net):
    def __init__(self):
        super().__init__()
        self.held = {"calls": 0}

    def forward(self, x):
        self.held["calls"] += 1
        return super().forward(x) / self.held["calls"]


class KeepsInDeque(Net):
    def __init__(self):
        super().__init__()
        self.window = deque([1.0, 1.0], maxlen=2)

    def forward(self, x):
        self.window.append(self.window[-1] + 1)
        return super().forward(x) / self.window[0]


class KeepsMean(Net):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x):
        out = super().forward(x)
        old, self.mean = self.mean, None
        value = 0.9 * old + 0.1 * out.detach().mean()
        del old
        self.mean = value
        return out - self.mean


class ReplacesBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        out = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean()
        return out - self.mean


def _loss_of_object():
    kept = Kept()

    def loss(output, target):
        kept.mean = 0.9 * kept.mean + 0.1 * output.detach().mean()
        return functional.cross_entropy(output, target) + (output.mean() - kept.mean).square()

    return loss


def _loss_of_closure():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        return functional.cross_entropy(output, target) / calls

    return loss


def _loss_of_list():
    history = []

    def loss(output, target):
        history.append(functional.cross_entropy(output, target))
        return history[-1] + sum(old.detach() for old in history[-3:])

    return loss


def _loss_of_dictionary():
    kept = Kept()

    def loss(output, target):
        kept.seen["mean"] = 0.9 * kept.seen.get("mean", 0.0) + output.detach().mean()
        return functional.cross_entropy(output, target) + (output.mean() - kept.seen["mean"]) ** 2

    return loss


class Criterion:
    """A callable with state in an attribute."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return functional.cross_entropy(output, target) / self.calls


STATE = {
    "object": {"model": KeepsInObject},
    "slot": {"model": KeepsInSlot},
    "dictionary": {"model": KeepsInDictionary},
    "deque": {"model": KeepsInDeque},
    "mean": {"model": KeepsMean},
    "buffer": {"model": ReplacesBuffer},
    "object of the loss": {"loss": _loss_of_object},
    "closure": {"loss": _loss_of_closure},
    "list": {"loss": _loss_of_list},
    "dictionary of the loss": {"loss": _loss_of_dictionary},
    "criterion": {"loss": Criterion},
}


@pytest.mark.parametrize("kept", STATE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_python_state_that_the_step_changes_is_not_frozen(kept, accumulate):
    found = []
    for scope in (STEP, None):
        options = dict(STATE[kept])
        if "loss" in options:
            options["loss"] = options["loss"]()
        step, net, inner = made(scope, accumulate=accumulate, **options)
        found.append((step, net, inner, train(step, batches(12))))
    assert reasons(found[0][0])
    assert reasons(found[0][0]) <= {KEEPS_STATE, MOVING}
    assert_same(*found)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.mean


def _normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = nn.utils.weight_norm(nn.Linear(8, 3))
    return nn.Sequential(nn.Linear(6, 8), normed)


@pytest.mark.parametrize(
    "model", [lambda: nn.Sequential(Net(), Mean()), _normed], ids=["in place", "weight norm"]
)
def test_state_in_tensors_that_a_graph_writes_is_recorded(model):
    one, other = both(batches(12), model=model)
    assert one[0].replays == 9, one[0].eager
    assert_same(one, other)


def test_random_numbers_of_the_host_are_not_fixed():
    def loss(output, target):
        return functional.cross_entropy(output, target) * random.random()

    found = []
    for scope in (STEP, None):
        step, net, inner = made(scope, loss=loss)
        random.seed(3)
        found.append((step, net, inner, train(step, batches(10))))
    assert reasons(found[0][0]) == {HOST_RANDOM}
    assert_same(*found)


class Opaque:
    def __init__(self, target):
        self.target = target


def test_inputs_that_a_key_cannot_hold_run_eagerly():
    def loss(output, target):
        return functional.cross_entropy(output, getattr(target, "target", target))

    found = []
    for scope in (STEP, None):
        step, net, inner = made(scope, loss=loss)
        held, losses = Opaque(None), []
        torch.manual_seed(7)
        for x, y in batches(10):
            held.target = y
            losses.append(step((x,), {}, (held,)))
        found.append((step, net, inner, torch.stack(losses)))
    assert reasons(found[0][0]) == {"an input holds a Opaque, which a graph would fix"}
    assert_same(*found)


@pytest.mark.parametrize("odd", [{1, 2}, slice(0, 2), [1, {2}]])
def test_unhashable_inputs_do_not_raise(odd):
    step, _, _ = made(loss=lambda output, target, odd: functional.cross_entropy(output, target))
    for x, y in batches(6):
        step((x,), {}, (y, odd))
    assert step.replays == 0


def test_sparse_inputs_do_not_raise():
    step, _, _ = made(model=lambda: SparseIn(6, 3))
    for x, y in batches(6):
        step((x.to_sparse(),), {}, (y,))
    assert reasons(step) == {"an input is not a strided tensor"}


class SparseIn(nn.Linear):
    def forward(self, x):
        return torch.sparse.mm(x, self.weight.t()) + self.bias


def test_gradients_of_inputs_are_the_callers():
    step, _, _ = made()
    for x, y in batches(8):
        x.requires_grad_()
        step((x,), {}, (y,))
        assert x.grad is not None
    assert reasons(step) == {NEEDS_GRADIENT}


def test_ordered_and_plain_dictionaries_are_other_signatures():
    step, _, _ = made(
        loss=lambda output, target: functional.cross_entropy(output, target["target"])
    )
    for i, (x, y) in enumerate(batches(12)):
        step((x,), {}, ((OrderedDict if i % 2 else dict)(target=y),))
    assert step.replays


def test_sparse_buffers_do_not_raise():
    class Adjacent(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(6).to_sparse())

        def forward(self, x):
            return super().forward(torch.sparse.mm(self.adjacency, x.t()).t())

    step, _, _ = made(model=Adjacent)
    train(step, batches(6))
    assert reasons(step) == {NOT_STRIDED}


def test_sparse_gradients_run_eagerly():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.table((x[:, 0].abs() * 3).long().clamp(max=8)))

    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        net = Embedded()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        step = EagerStep(net, functional.cross_entropy, inner, accumulate=2)
        if captured:
            step = CapturedStep(step, STEP, [net], check=True)
        found.append((step, net, inner, train(step, batches(16))))
    assert_same(*found)


def test_a_scheduler_made_late_knows_that_steps_are_taken():
    step, _, inner = made()
    train(step, batches(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 3)
        train(step, batches(1))
        scheduler.step()


def test_state_that_another_signature_has_made_is_loaded_too():
    class Twofold(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(6, 3, bias=False)

        def forward(self, x):
            out = super().forward(x)
            return out + self.other(x) if x.shape[0] == 5 else out

    def resume(net, inner):
        kept = {}

        def at(i):
            if i == 17:
                kept["state"] = copy.deepcopy(inner.state_dict())
            if i == 21:
                inner.load_state_dict(copy.deepcopy(kept["state"]))

        return at

    data = [*batches(8), *batches(10, 5), *batches(12, 5, 2)]
    one, other = both(data, resume, model=Twofold)
    assert one[0].replays >= 16, one[0].eager
    assert_same(one, other)


def test_complex_parameters_train():
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 6, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight.t()).abs()

    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        net = Phases()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        step = EagerStep(net, functional.cross_entropy, inner)
        if captured:
            step = CapturedStep(step, STEP, [net], check=True)
        found.append((step, net, inner, train(step, batches(10))))
    assert found[0][0].replays >= 6, found[0][0].eager
    assert_same(*found)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_may_become_a_tensor(shape):
    def change(net, inner):
        def at(i):
            inner.param_groups[0]["lr"] = torch.full(shape, 0.01 + i / 1000) if i > 8 else 0.01

        return at

    one, other = both(batches(16), change)
    assert one[0].replays >= 10, one[0].eager
    assert_same(one, other)


def test_a_closed_step_goes_on_eagerly():
    def close(i):
        if i == 8:
            step.close()

    step, net, inner = made()
    found = (step, net, inner, train(step, batches(12), close))
    plain, net2, inner2 = made(None)
    assert reasons(step) == {CLOSED}
    assert_same(found, (plain, net2, inner2, train(plain, batches(12))))


@pytest.mark.parametrize(("sizes", "recordings"), [((4, 5, 6), 5), ((6, 5, 4), 3)])
def test_graphs_of_smaller_batches_are_recorded_anew_after_larger_ones(sizes, recordings):
    data = [batch for size in (*sizes, *sizes) for batch in batches(8, size)]
    one, other = both(data)
    step = one[0]
    assert reasons(step) == set()
    assert step.graphs == recordings
    assert_same(one, other)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exception_while_recording_leaves_no_gradients(accumulate, tmp_path):
    calls = os.open(tmp_path / "calls", os.O_WRONLY | os.O_CREAT)  # no state of the loss

    def loss(output, target):
        os.write(calls, b".")
        if os.lseek(calls, 0, os.SEEK_CUR) == fails_at:
            raise KeyboardInterrupt
        return functional.cross_entropy(output, target)

    fails_at = 4 if accumulate == 1 else 5
    step, net, inner = made(loss=loss, accumulate=accumulate, check=False)
    data = batches(16)
    losses = list(train(step, data[: fails_at - 1]))
    with pytest.raises(KeyboardInterrupt):
        step((data[fails_at - 1][0],), {}, (data[fails_at - 1][1],))
    losses += [step((x,), {}, (y,)) for x, y in data[fails_at - 1 :]]
    plain, net2, inner2 = made(None, accumulate=accumulate)
    os.close(calls)
    assert step.replays >= 8
    right = train(plain, data)
    assert_same((step, net, inner, torch.stack(losses)), (plain, net2, inner2, right))


@pytest.mark.parametrize(("scope", "accumulate"), [(UPDATE, 1), (STEP, 2)])
def test_a_backward_that_cannot_be_recorded_leaves_updates_recorded(scope, accumulate):
    def loss(output, target):
        if len(target) == 3:
            output.sum().item()
        return functional.cross_entropy(output, target)

    data = [*batches(8), *batches(8, size=3), *batches(4)]
    one, other = both(data, scope=scope, loss=loss, accumulate=accumulate)
    step = one[0]
    assert step.update_reason is None
    assert any("not permitted" in reason for reason in reasons(step))
    assert step.replays >= 8
    assert_same(one, other)
