"""Strides of outputs and gradients of compiled code; Inductor is told to pad products on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch.nn import functional as F

from steadytorch import Workload
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.step import TunedStep
from steadytorch.runtime.trained import TrainedModule
from steadytorch.transforms import create
from steadytorch.transforms.base import applied_in_order
from steadytorch.transforms.compile import Compile

# Importing the padding imports parts of PyTorch that warn in some versions.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ODD = 13


class Head(nn.Module):
    """Hidden states and logits of an odd number of tokens, flat or not."""

    def __init__(self, bias=False, keep=ODD):
        super().__init__()
        self.body, self.head, self.keep = nn.Linear(8, 8), nn.Linear(8, ODD, bias=bias), keep

    def forward(self, x):
        hidden = self.body(x).relu()
        return hidden, self.head(hidden)[..., : self.keep]


@pytest.fixture(autouse=True)
def padding(monkeypatch):
    padded = []

    def pads(*args, **kwargs):
        padded.append(args)
        return True

    monkeypatch.setattr(pad_mm, "can_pad", lambda *args, **kwargs: True)
    monkeypatch.setattr(pad_mm, "should_pad", pads)
    torch.compiler.reset()
    with config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        yield padded


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)], ids=["flat", "of tokens"])
@pytest.mark.parametrize("bias", [False, True], ids=["mm", "addmm"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_logits_keep_their_strides(padding, shape, bias, train):
    torch.manual_seed(0)
    model, x = Head(bias), torch.randn(*shape)
    workload = Workload(model, x)
    with torch.set_grad_enabled(train), Compile().applied(workload) as compiled:
        own, found = model(x), compiled.model(x)
        assert padding, "Inductor did not pad"
        assert [out.stride() for out in found] == [out.stride() for out in own]
        torch.testing.assert_close(found, own)
        if train:
            found[1].view(-1).square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            own[1].view(-1).square().sum().backward()
            torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


def flat(outputs, targets):
    return F.cross_entropy(outputs[1].view(-1, ODD), targets.view(-1))


def branching(outputs, targets):
    """Cannot be compiled, and fails for padded logits."""
    loss = flat(outputs, targets)
    return loss if loss > 0 else -loss


def test_a_loss_that_does_not_compile_takes_padded_logits(padding):
    found = []
    for names in ((), ("compile_loss", "compile")):
        torch.manual_seed(0)
        model, x, targets = Head(), torch.randn(2, 3, 8), torch.arange(6).view(2, 3) % ODD
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workload = Workload.training(model, x, branching, optimizer, targets=targets)
        with applied_in_order([create(TransformSpec(name)) for name in names], workload) as given:
            step = given.step_function()
            found.append([step() for _ in range(4)] + [p.detach() for p in model.parameters()])
            strides = given.model(x)[1].stride()
    assert padding, "Inductor did not pad"
    assert strides[1] > ODD
    torch.testing.assert_close(found[1], found[0])


def test_a_plan_serves_padded_logits_to_a_compiled_loss_alone(padding):
    plan = (TransformSpec("compile_loss"), TransformSpec("compile"))
    found = []
    for candidate in ((), plan):
        torch.manual_seed(0)
        model, x, targets = Head(), torch.randn(2, 3, 8), torch.arange(6).view(2, 3) % ODD
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = ServingOptions(trains=True, pads=bool(candidate))
        fast = TrainedModule(model, lambda _, c=candidate: Resolution(c), None, options)
        step = TunedStep(fast, model, optimizer, flat, candidate)
        found.append(
            [step(x, targets) for _ in range(4)] + [p.detach() for p in model.parameters()]
        )
    assert padding, "Inductor did not pad"
    assert fast.is_off is None
    assert fast.report().calls == {"tuned": 4}
    torch.testing.assert_close(found[1], found[0])
    served = TrainedModule(model, lambda _: Resolution(plan), None, ServingOptions(trains=True))
    assert served(x)[1].stride() == model(x)[1].stride()
    assert served.report().calls == {"tuned": 1}


def test_a_slice_of_the_logits_keeps_its_strides(padding):
    model, x = Head(keep=ODD - 1), torch.randn(5, 8)
    with Compile().applied(Workload(model, x)) as compiled, torch.no_grad():
        assert compiled.model(x)[1].stride() == model(x)[1].stride()
        assert padding, "Inductor did not pad"


class Images(nn.Module):
    """Two convolutions and a third whose weight is channels last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8)))
        self.layers[2].to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_gradients_have_the_strides_of_their_weights(layout):
    torch.manual_seed(0)
    model = Images()
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=layout).requires_grad_()
    wanted = [*model.parameters(), x]
    with Compile().applied(Workload(model, x)) as compiled:
        found = torch.autograd.grad(compiled.model(x).square().sum(), wanted)
    assert [g.stride() for g in found] == [w.stride() for w in wanted]
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), wanted))
