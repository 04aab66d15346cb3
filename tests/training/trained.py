"""Small training workloads, and faults of candidates."""

from __future__ import annotations

import copy
import time

import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.workload.start import Start, with_optimizer
from steadytorch.workload.workload import Workload


class Net(nn.Module):
    """A convolution, a batch norm, an unused layer and a head; smooth or with kinks."""

    def __init__(self, activation=F.silu):
        super().__init__()
        self.activation = activation
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.activation(self.norm(self.conv(x))).mean((2, 3)))


class Slow(Net):
    """Sleeps in every call."""

    def __init__(self):
        super().__init__()
        self.delay_s = 0.01

    def forward(self, x):
        time.sleep(self.delay_s)
        return super().forward(x)


class Loss(nn.Module):
    """Cross-entropy of a tensor, or of one in a list, against fixed targets."""

    def __init__(self, targets):
        super().__init__()
        self.register_buffer("targets", targets)

    def forward(self, output):
        return F.cross_entropy(output[0] if isinstance(output, list) else output, self.targets)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def workload(model=None, loss=None, optimizer=momentum):
    """A workload with its optimizer made, and its start."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = (model or Net)().train()
        loss = loss or Loss(torch.randint(4, (16,)))
        made = Workload.training(model, torch.randn(16, 3, 8, 8), loss, optimizer)
    made = with_optimizer(made)
    return made, Start(made)


class Candidate:
    """Calls the model with the fault that its name says; picklable for workers."""

    def __init__(self, kind, model):
        self.kind, self.model = kind, model
        self.copy = copy.deepcopy(model)
        self.calls = 0
        self.kept = {}

    def __call__(self, x):
        self.calls += 1
        return getattr(self, self.kind)(x)

    def honest(self, x):
        return self.model(x)

    def awake(self, x):
        """Removes the sleep, which is an honest improvement."""
        return Net.forward(self.model, x)

    def detached(self, x):
        with torch.no_grad():
            return self.model(x).requires_grad_()

    def head_only(self, x):
        with torch.no_grad():
            features = self.model.activation(self.model.norm(self.model.conv(x))).mean((2, 3))
        return self.model.head(features)

    def copied(self, x):
        """Trains its own copy of the weights."""
        return torch.func.functional_call(self.copy, dict(self.model.named_buffers()), x)

    def stale(self, x):
        """Computes with the weights of its first call, but sends gradients to the model's."""
        return torch.func.functional_call(self.copy, self._standing_in(), x)

    def _standing_in(self):
        # Adds a zero through which gradients flow.
        mine, theirs = dict(self.copy.named_parameters()), dict(self.model.named_parameters())
        found = {n: p.detach() + (theirs[n] - theirs[n].detach()) for n, p in mine.items()}
        return found | dict(self.model.named_buffers())

    def all_get_one(self, x):
        return self.model(x) + 0 * self.model.unused(x.new_ones(2)).sum()

    def nan_gradient(self, x):
        return through(self.model(x), lambda g: g * float("nan"))

    def large_gradient(self, x):
        return through(self.model(x), lambda g: 3 * g)

    def no_gradient_value(self, x):
        return through(self.model(x), lambda g: 0 * g)

    def coarse_gradient(self, x):
        return through(self.model(x), lambda g: g.bfloat16().float())

    def other_gradient(self, x):
        return through(self.model(x), lambda g: g.flip(0))

    def wrong_loss(self, x):
        return self.model(x) * 1.001

    def statistics_twice(self, x):
        self.model(x)
        return self.model(x)

    def no_statistics(self, x):
        statistics = {f"norm.running_{of}": torch.ones(8) for of in ("mean", "var")}
        return torch.func.functional_call(self.model, statistics, x)

    def writes_weights(self, x):
        output = self.model(x)
        with torch.no_grad():
            self.model.unused.weight.mul_(0.5)
        return output

    def writes_inputs(self, x):
        output = self.model(x)
        x.data.zero_()
        return output

    def nests(self, x):
        return [self.model(x)]

    def one_buffer_for_outputs(self, x):
        return _InOneBuffer.apply(self.model(x), self.kept)

    def one_buffer_for_gradients(self, x):
        weight = _Stolen.apply(self.model.head.weight, self.kept)
        others = {"weight": weight, "bias": self.model.head.bias}
        features = self.model.activation(self.model.norm(self.model.conv(x))).mean((2, 3))
        return torch.func.functional_call(self.model.head, others, features)


def through(output, change):
    output.register_hook(change)
    return output


class _InOneBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, kept):
        return kept.setdefault("output", torch.empty_like(output)).copy_(output).detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Stolen(torch.autograd.Function):
    """The identity, with its gradient in the same memory in each step."""

    @staticmethod
    def forward(ctx, weight, kept):
        ctx.kept = kept
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return ctx.kept.setdefault("grad", torch.empty_like(grad)).copy_(grad).detach(), None
