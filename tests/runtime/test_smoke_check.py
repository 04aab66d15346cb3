from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.runtime.executors import Executor
from steadytorch.runtime.smoke_check import TrainingSmokeCheck

CPU = torch.device("cpu")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A convolution, a batch norm, a layer that is not used, and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.unused, self.head = nn.Linear(2, 2), nn.Linear(8, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return {"scores": self.head(F.relu(self.norm(self.conv(x))).mean((2, 3))), "none": None}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().train()


def fault(model, call, *args):
    executor = Executor(call, False, [model], None, lambda: None)
    return TrainingSmokeCheck(model, executor, CPU).fault(args or (X,), {})


def through(outputs, change):
    outputs["scores"].register_hook(change)
    return outputs


def test_the_model_itself_trains_like_the_model(model):
    assert fault(model, model) is None


def test_half_precision_may_serve(model):
    def half(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
        return {**outputs, "scores": outputs["scores"].float()}

    assert fault(model, half) is None


def test_neither_leaves_anything_behind(model):
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    fault(model, model)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_gradients_that_have_been_accumulated_stay(model):
    model(X)["scores"].sum().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    fault(model, model)
    assert all(torch.equal(before[n], dict(model.named_parameters())[n].grad) for n in before)


def raises(model):
    def call(x):
        raise ArithmeticError("this\nbroke")

    return call


def backward_raises(model):
    def change(gradient):
        raise ArithmeticError("this broke on its way back")

    return lambda x: through(model(x), change)


def copied(model):
    return copy.deepcopy(model)


def part_of_it(model):
    def call(x):
        with torch.no_grad():
            features = F.relu(model.norm(model.conv(x))).mean((2, 3))
        return {"scores": model.head(features), "none": None}

    return call


def more_than_it(model):
    def call(x):
        outputs = model(x)
        return {**outputs, "scores": outputs["scores"] + 0 * model.unused.weight.sum()}

    return call


def no_statistics(model):
    def call(x):
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return torch.func.functional_call(model, buffers, x)

    return call


def counts_twice(model):
    def call(x):
        model.norm.num_batches_tracked.add_(1)
        return model(x)

    return call


FAULTS = {
    "counts twice": (counts_twice, "wrong: buffer norm.num_batches_tracked differs from"),
    "raises": (raises, "its first step raised"),
    "backward raises": (backward_raises, "its first step raised"),
    "copied": (copied, "wrong: gives conv.weight no gradient"),
    "part of it": (part_of_it, "wrong: gives conv.weight no gradient"),
    "more than it": (more_than_it, "wrong: gives unused.weight a gradient"),
    "no statistics": (no_statistics, "wrong: the movement of buffer norm.running_mean is 0 times"),
    "three times": (
        lambda model: lambda x: through(model(x), lambda g: 3 * g),
        "wrong: the gradient of conv.weight is 3 times as large",
    ),
    "NaN": (
        lambda model: lambda x: through(model(x), lambda g: g * float("nan")),
        "wrong: the gradient of conv.weight is nan times as large",
    ),
    "other outputs": (
        lambda model: lambda x: {**model(x), "scores": -model(x)["scores"]},
        "wrong: output 0 is off",
    ),
    "other nesting": (lambda model: lambda x: model(x)["scores"], "wrong: nests its outputs"),
    "other type": (
        lambda model: lambda x: {**model(x), "scores": model(x)["scores"].double()},
        "wrong: output 0 is float64, expected float32",
    ),
    "draws": (
        lambda model: lambda x: (torch.rand(1), model(x))[1],
        "its executor draws random numbers, and the model does not",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_executor_that_does_not_train_the_model_is_reported(model, name):
    make, reason = FAULTS[name]
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert fault(model, make(model)).startswith(reason)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_random_draws_are_compared_and_restored():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train()
    random = torch.get_rng_state()
    assert fault(model, model, torch.ones(2, 4)) is None
    assert torch.equal(torch.get_rng_state(), random)


def test_other_numbers_from_the_generator_are_compared_by_the_size_of_gradients():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout()).train()

    def otherwise(x, factor=1.0):
        return model[0](x) * (torch.rand(len(x), 64) < 0.5) * 2 * factor

    x = torch.ones(32, 64)
    assert fault(model, otherwise, x) is None
    assert "as large" in fault(model, lambda x: otherwise(x, 3.0), x)


def test_an_executor_that_draws_nothing_is_reported():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train()
    found = fault(model, model[0], torch.ones(2, 4))
    assert found == "the model draws random numbers, and its executor does not"


def test_a_model_that_raises_in_the_test_step_is_left_to_the_caller(model):
    reason = fault(model, model, torch.ones(1, 2))
    assert reason.startswith("a test step of the untouched model raised")


def test_weights_that_need_no_gradients_get_none(model):
    model.conv.requires_grad_(False)
    assert fault(model, model) is None


def test_a_model_without_gradients_at_all_may_serve(model):
    model.requires_grad_(False)
    assert fault(model, model) is None
