"""Another implementation of the optimizer takes the same step and leaves the optimizer alone."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from steadytorch.workload.update import (
    COMPILED,
    FOREACH,
    FUSED,
    MOST_COMPILED,
    OWN,
    GroupRates,
    Update,
    hyper_parameters,
    merged,
)

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def trained(optimizer, implementation, merge, groups=True, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parameters = [{"params": [p]} for p in model.parameters()] if groups else model.parameters()
    made = OPTIMIZERS[optimizer](parameters)
    update = Update(made, implementation, merge)
    x = torch.randn(5, 6)
    for _ in range(steps):
        made.zero_grad()
        model(x).square().mean().backward()
        update()
        for group in made.param_groups:
            group["lr"] *= 0.9
    return model, made


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("implementation", [OWN, FUSED, FOREACH])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_the_same_update(optimizer, implementation, merge):
    expected, own = trained(optimizer, OWN, False)
    found, made = trained(optimizer, implementation, merge)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
    states = [o.state_dict()["state"] for o in (made, own)]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-7)


def converted(model, optimizer):
    model.to(memory_format=torch.channels_last)


def loaded(model, optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            if value.dim() == 4:
                state[name] = value.to(memory_format=torch.channels_last)


def expanded(model, optimizer):
    model[0].weight.grad = torch.arange(3.0).expand(4, 3, 3, 3).mT


def sparse(model, optimizer):
    model[0].weight.grad = model[0].weight.grad.to_sparse()


def overlapping(model, optimizer):
    model[0].weight.data = torch.randn(4, 3, 3, 6)[..., ::2]


UNLIKE = [
    *product(["adamw", "sgd", "adagrad"], [converted, loaded, expanded, overlapping]),
    *product(["plain sgd", "adagrad"], [sparse]),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("optimizer", "change"), UNLIKE)
def test_a_fused_step_needs_the_layout_of_the_parameters(optimizer, change):
    weights = []
    for implementation in (OWN, FUSED):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
        made = OPTIMIZERS[optimizer](model.parameters())
        update = Update(made, implementation)
        x = torch.randn(5, 3, 6, 6)
        for number in range(6):
            made.zero_grad()
            model(x).square().mean().backward()
            if number == 3 or (number > 3 and change in (expanded, sparse)):
                change(model, made)
            update()
            assert (update.fallback is None) is (number < 3 or implementation == OWN)
        weights.append(model.state_dict())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


def test_a_compiled_step_ends_with_the_layout_of_its_parameters(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, dynamic: step)
    model = nn.Conv2d(3, 4, 3)
    update = Update(torch.optim.AdamW(model.parameters()), COMPILED)
    x = torch.randn(2, 3, 6, 6)
    for layout, kept in ((torch.contiguous_format, True), (torch.channels_last, False)):
        model.to(memory_format=layout)
        update.optimizer.zero_grad()
        model(x).square().mean().backward()
        update.optimizer.state.clear()  # its new tensors have the new layout
        update()
        assert (update.fallback is None) is kept


def test_a_step_that_cannot_be_compiled_is_the_optimizers_own(monkeypatch):
    def refuse():
        raise torch._dynamo.exc.Unsupported("a graph break")

    monkeypatch.setattr(torch, "compile", lambda step, dynamic: refuse)
    (expected, _), (found, made) = trained("adamw", OWN, False), trained("adamw", COMPILED, False)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
    assert not made.param_groups[0]["foreach"]


def test_strides_of_dimensions_of_one_element_are_no_layout():
    weight = nn.Parameter(torch.randn(4, 3, 1, 1))
    weight.grad = torch.randn(4, 1, 1, 3).permute(0, 3, 1, 2)
    assert weight.stride() != weight.grad.stride()
    update = Update(torch.optim.AdamW([weight]), FUSED)
    update()
    assert update.fallback is None


@pytest.mark.parametrize("cycle", [False, True])
def test_schedules_of_momentum_do_not_compile_at_every_step(monkeypatch, cycle):
    calls = []

    def compiled(step, dynamic):
        return lambda: (calls.append(1), step())

    monkeypatch.setattr(torch, "compile", compiled)
    weights = []
    for implementation in (COMPILED, OWN):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        update = Update(optimizer, implementation)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=20, cycle_momentum=cycle
        )
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            update()
            schedule.step()
        weights.append(model.weight)
        assert (update.fallback is not None) is (cycle and implementation == COMPILED)
    assert len(calls) == (MOST_COMPILED if cycle else 6)
    torch.testing.assert_close(*weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_compiled_update_is_the_same_update():
    expected, _ = trained("adamw", OWN, False)
    found, _ = trained("adamw", COMPILED, True)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", [OWN, FUSED, FOREACH])
def test_groups_and_switches_stay_the_callers(implementation):
    _, untouched = trained("adamw", OWN, False)
    _, made = trained("adamw", implementation, True)
    assert [hyper_parameters(g) for g in made.param_groups] == [
        hyper_parameters(g) for g in untouched.param_groups
    ]
    assert vars(made).keys() == vars(untouched).keys()


def test_switches_are_put_back_when_the_step_raises():
    model = nn.Linear(2, 2)
    made = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    before = copy.deepcopy([hyper_parameters(g) for g in made.param_groups])

    def fail(optimizer, args, kwargs):
        raise RuntimeError("in the step")

    made.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the step"):
        Update(made, FUSED, merge=True)()
    assert [hyper_parameters(g) for g in made.param_groups] == before
    assert len(made.param_groups) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_a_learning_rate_that_a_hook_sets_stays(in_place):
    model = nn.Linear(2, 2)
    made = torch.optim.AdamW(model.parameters(), lr=0.5)

    def halve(optimizer, args, kwargs):
        (group,) = optimizer.param_groups
        group["lr"] = group["lr"].mul_(0.5) if in_place else float(group["lr"]) * 0.5

    made.register_step_pre_hook(halve)
    update = Update(made, FUSED)
    rates = GroupRates(made)
    for expected in (0.25, 0.125):
        model(torch.ones(1, 2)).sum().backward()
        update(rates.refreshed())
        assert made.param_groups[0]["lr"] == expected


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_a_merging_step_see_the_callers_groups(of_all):
    model = nn.Linear(2, 2)
    made = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    update, counts = Update(made, FOREACH, merge=True), []

    def count(optimizer, args, kwargs):
        counts.append(len(optimizer.param_groups))

    register = register_optimizer_step_pre_hook if of_all else made.register_step_pre_hook
    handle = register(count)
    try:
        model(torch.ones(1, 2)).sum().backward()
        update()
    finally:
        handle.remove()
    assert counts == [2]


def test_groups_are_merged_beside_our_own_hooks():
    model, counts = nn.Linear(2, 2), []
    made = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])

    def watch(optimizer, args, kwargs):
        counts.append(len(optimizer.param_groups))

    watch.__module__ = "steadytorch.watching.watch"
    handle = register_optimizer_step_pre_hook(watch)
    try:
        model(torch.ones(1, 2)).sum().backward()
        Update(made, FOREACH, merge=True)()
    finally:
        handle.remove()
    assert counts == [1]


def test_rates_of_float64_parameters_are_float64():
    layers = nn.Linear(2, 2).double(), nn.Linear(2, 2)
    made = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1} for layer in layers])
    assert [rate.dtype for rate in GroupRates(made).tensors] == [torch.float64, torch.float32]


def test_only_groups_with_equal_hyper_parameters_are_merged():
    one, two, three = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    made = torch.optim.AdamW(
        [{"params": [one]}, {"params": [two], "weight_decay": 0.5}, {"params": [three]}]
    )
    found = merged(made.param_groups)
    assert [len(group["params"]) for group in found] == [2, 1]
    assert [len(group["params"]) for group in made.param_groups] == [1, 1, 1]


def test_rates_on_the_device_stand_for_the_numbers():
    torch.manual_seed(0)
    one = nn.Linear(3, 3)
    other = copy.deepcopy(one)
    x, results = torch.randn(4, 3), []
    for model, from_tensor in ((one, False), (other, True)):
        made = torch.optim.SGD(model.parameters(), lr=0.25)
        model(x).square().sum().backward()
        update = Update(made, FUSED)
        update(GroupRates(update.optimizer).tensors if from_tensor else None)
        results.append(model.state_dict())
        assert made.param_groups[0]["lr"] == 0.25
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_rates_are_written_where_they_changed_alone():
    made = torch.optim.SGD(
        [{"params": nn.Linear(2, 2).parameters(), "lr": lr} for lr in (0.25, 0.5)]
    )
    rates = GroupRates(made)
    versions = [rate._version for rate in rates.tensors]
    made.param_groups[1]["lr"] = 0.125
    assert [float(rate) for rate in rates.refreshed()] == [0.25, 0.125]
    assert [rate._version for rate in rates.tensors] == [versions[0], versions[1] + 1]
    made.load_state_dict(made.state_dict())  # replaces the list of groups
    made.param_groups[0]["lr"] = 1.0
    assert [float(rate) for rate in rates.refreshed()] == [1.0, 0.125]


@pytest.mark.parametrize(("implementation", "merge"), [(FOREACH, False), (FOREACH, True)])
def test_what_a_step_writes_to_its_groups_stays(implementation, merge):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] += 1
            return super().step(closure)

    model = nn.Linear(2, 2)
    groups = [
        {"params": [p], "count": 0, "initial_lr": i} for i, p in enumerate(model.parameters())
    ]
    made = Counting(groups, lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        Update(made, implementation, merge)()
    assert [group["count"] for group in made.param_groups] == [3, 3]
    assert [group["initial_lr"] for group in made.param_groups] == [0, 1]
    assert {group["foreach"] for group in made.param_groups} == {None}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("implementation", [OWN, FUSED, FOREACH])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_learning_rate_may_be_a_tensor(kind, implementation, shape):
    model = nn.Linear(2, 2)
    made = kind(model.parameters(), lr=torch.full(shape, 0.1))
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    Update(made, implementation)()
    assert not torch.equal(before, model.weight)
    assert [rate.shape for rate in GroupRates(made).tensors] == [()]


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("merge", [False, True])
def test_momentum_begins_for_each_parameter_by_itself(dampening, merge):
    found = []
    for implementation in (OWN, FUSED):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        made = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9, dampening=dampening)
        update = Update(made, implementation, merge)
        for i in range(6):
            if i == 3:
                model[0].requires_grad_(True)
                made.add_param_group({"params": list(model[0].parameters())})
            made.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            update()
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_begins_after_the_steps_that_a_scaler_skips(dampening):
    found = []
    for implementation in (OWN, FUSED):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
        update = Update(made, implementation)
        for _ in range(8):
            made.zero_grad()
            scaler.scale(model(torch.ones(2, 6)).square().mean() * 16).backward()
            with update.switched():
                scaler.step(made)
            scaler.update()
        assert scaler.get_scale() < 2.0**126
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
