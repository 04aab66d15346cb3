from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from steadytorch.workload.start import (
    Start,
    buffers_of,
    optimizer_of,
    parameters_of,
    with_optimizer,
)
from steadytorch.workload.workload import Workload

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


class Net(nn.Module):
    """Tied weights, a batch norm, and a buffer that each call replaces by a longer one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, self.seen])
        return self.norm(self.second(self.first(x)))


class Learned(nn.Module):
    """A loss with its own weight and buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, output):
        self.calls += 1
        return (output * self.scale).square().mean()


def training(optimizer="sgd", loss=None):
    torch.manual_seed(0)
    model = Net().train()
    given = OPTIMIZERS.get(optimizer, optimizer)
    made = Workload.training(model, torch.randn(8, 4), loss or torch.sum, given)
    return with_optimizer(made)


def standing(workload):
    found = {**parameters_of(workload), **buffers_of(workload)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_steps_can_be_taken_again_and_again(optimizer):
    workload = training(optimizer)
    start, step = Start(workload), workload.step_function()
    losses, ends = [], []
    for _ in range(2):
        losses.append([step() for _ in range(3)])
        ends.append(standing(workload))
        start.restore()
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
    assert equal(*ends)


def test_restoring_undoes_every_tensor_in_its_place():
    workload = training("adam")
    before, addresses = standing(workload), [p.data_ptr() for p in workload.model.parameters()]
    start, step = Start(workload), workload.step_function()
    step()
    assert not equal(standing(workload), before)
    start.restore()
    assert equal(standing(workload), before)
    assert [p.data_ptr() for p in workload.model.parameters()] == addresses
    assert all(p.grad is None for p in workload.model.parameters())
    assert not optimizer_of(workload).state


def test_the_state_and_the_rates_of_a_running_optimizer_are_put_back():
    model = Net().train()
    running = OPTIMIZERS["adam"](model.parameters())
    workload = with_optimizer(Workload.training(model, torch.randn(8, 4), torch.sum, running))
    workload.step_function()()
    before = copy.deepcopy(running.state_dict())
    start = Start(workload)
    for group in running.param_groups:
        group["lr"] = 5.0
    for _ in range(2):
        workload.step_function()()
        start.restore()
        now = running.state_dict()
        assert now["param_groups"] == before["param_groups"]
        for index, state in before["state"].items():
            assert equal(state, now["state"][index])


def test_tied_weights_are_one_and_keep_their_first_name():
    assert list(parameters_of(training())) == [
        *("first.weight", "first.bias", "norm.weight", "norm.bias"),
    ]


def test_the_weights_and_buffers_of_a_loss_are_a_part_of_it():
    loss = Learned()
    workload = training(lambda p: torch.optim.SGD([*p, *loss.parameters()], lr=0.1), loss)
    start = Start(workload)
    workload.step_function()()
    assert {"loss:scale"} == set(parameters_of(workload)) - set(parameters_of(training()))
    assert loss.calls == 1
    start.restore()
    assert loss.calls == 0
    assert torch.equal(loss.scale, torch.ones(4))


def test_weights_that_only_the_optimizer_knows_are_put_back():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    workload = with_optimizer(
        Workload.training(lambda x: x * weight, torch.ones(3), torch.sum, optimizer)
    )
    start = Start(workload)
    workload.step_function()()
    assert list(parameters_of(workload)) == ["optimizer.0.0"]
    assert not torch.equal(weight, torch.ones(3))
    start.restore()
    assert torch.equal(weight, torch.ones(3))


def test_the_state_of_an_optimizer_follows_its_weights():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = Workload.training(model, torch.ones(1, 2), torch.sum, optimizer)
    made.step_function()()
    model.double()
    workload = with_optimizer(made)
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.float64}
    assert optimizer_of(workload) is optimizer


def test_inference_is_left_alone():
    workload = Workload(nn.BatchNorm1d(4).train(), torch.randn(8, 4))
    assert with_optimizer(workload) is workload
    start = Start(workload)
    workload.model(*workload.inputs)
    after = workload.model.running_mean.clone()
    start.restore()
    assert torch.equal(workload.model.running_mean, after)
