from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from steadytorch.compiled import prebuilt
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import executors, settings
from steadytorch.runtime.executors import build
from steadytorch.transforms.cuda_graph import CudaGraph

from .conftest import CANDIDATES, FROZEN, answer


@pytest.mark.parametrize("name", CANDIDATES)
def test_an_executor_answers_like_the_model_and_knows_its_weights(model, x, name):
    executor = build(model, (x,), {}, CANDIDATES[name])
    loose = {"rtol": 0.05, "atol": 0.05} if name == "cast_weights" else {}
    torch.testing.assert_close(answer(executor.call, x), answer(model, x), **loose)
    assert executor.is_live == (name == "inference_mode")
    assert executor.modules[0] is model
    assert len(executor.modules) == {"all": 3, "inference_mode": 1}.get(name, 2)
    assert executor.static is None
    executor.close()


class Extracts:
    """What a caller hooks into a model, to have the values of a layer."""

    def __init__(self, model):
        self.model, self.found = model, []
        model.head.register_forward_hook(self.extract)

    def extract(self, module, args, output):
        self.found.append(output)


KEEPING_TYPES = [
    *[name for name in CANDIDATES if name != "cast_weights"],
    pytest.param("compile", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("name", KEEPING_TYPES)
@pytest.mark.usefixtures("hooked_anyway")
def test_the_hooks_of_the_caller_are_told_of_each_call(model, x, name):
    compiled = {"compile": (TransformSpec("compile", (("mode", "default"),)),)}
    extracts = Extracts(model)
    executor = build(model, (x,), {}, {**CANDIDATES, **compiled}[name])
    for each in (x, x + 1):
        extracts.found.clear()
        answer(executor.call, each)
        (found,) = extracts.found
        torch.testing.assert_close(found, answer(model, each))
    executor.close()


def test_code_that_would_freeze_what_hooks_know_is_refused(model, x):
    Extracts(model)
    with pytest.raises(UnsupportedError, match="freezing would fix their state"):
        build(model, (x,), {}, FROZEN)


def test_casting_weights_under_hooks_is_refused(model, x):
    Extracts(model)
    with pytest.raises(UnsupportedError, match="hooks"):
        build(model, (x,), {}, CANDIDATES["cast_weights"])


@pytest.mark.parametrize(
    "candidate",
    [(TransformSpec("channels_last"),) * 2, (TransformSpec("nothing_known"),)],
)
def test_conflicting_transforms_are_refused(model, x, candidate):
    with pytest.raises(UsageError):
        build(model, (x,), {}, candidate)


class Recording(executors.Transform):
    """Runs the model while it is applied, as recording a graph does."""

    name, risk, records = CudaGraph.name, None, True

    def applies_to(self, workload, facts):
        raise AssertionError

    @contextmanager
    def applied(self, workload):
        for _ in range(3):
            workload.model(*workload.inputs)

        def replay(x):
            return workload.model(x)

        vars(replay).update(static_inputs=((1,), {}), aliasing=lambda x: "aliased")
        yield workload.with_model(replay)


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(executors.transforms, "create", lambda spec: Recording())
    monkeypatch.setattr(executors.transforms, "conflict", lambda candidate: None)
    return (TransformSpec(CudaGraph.name),)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.total += 1
        self.calls += 1
        return x + self.total


def test_recording_a_model_with_a_memory_is_refused_and_undone(recording):
    model = Counting().eval()
    with pytest.raises(UnsupportedError, match="keeps state"):
        build(model, (torch.ones(1),), {}, recording)
    assert (model.calls, model.total.item()) == (0, 0)


def test_static_inputs_and_aliased_outputs_are_there_where_they_were_asked_for(recording):
    model, x = nn.ReLU().eval(), torch.ones(1)
    executor = build(model, (x,), {}, recording)
    assert executor.static == ((1,), {})
    assert not executor.is_live
    assert executor.call(x).item() == 1
    assert build(model, (x,), {}, recording, alias_outputs=True).call(x) == "aliased"


def test_supplied_code_replaces_compiling_and_counts_as_frozen(model, x):
    tasks = []

    def source(task):
        tasks.append(task)
        return lambda *args: "made before"

    candidate = (TransformSpec("channels_last"), *FROZEN, TransformSpec("inference_mode"))
    executor = build(model, (x,), {}, candidate, source=source)
    assert executor.call(x) == "made before"
    assert not executor.is_live
    assert executor.modules[0] is model
    (task,) = tasks
    assert task.workload.untouched is model
    assert task.workload.inputs[0] is x
    executor.close()
    assert prebuilt.find(task) is None


def test_a_source_that_fails_leaves_nothing_behind(model, x):
    def source(task):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build(model, (x,), {}, FROZEN, source=source)


def test_an_executor_that_trains_sends_gradients_to_the_models_own_weights(model, x):
    model.train()
    strides = [p.stride() for p in model.parameters()]
    executor = build(model, (x,), {}, CANDIDATES["channels_last"], trains=True)
    executor.call(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert [p.stride() for p in model.parameters()] == strides
    executor.close()


def test_no_transform_asks_for_the_loss_or_the_optimizer(model, x, monkeypatch):
    seen = []
    applied = executors.transforms.channels_last.ChannelsLast.applied

    def watched(self, workload):
        seen.append(workload)
        return applied(self, workload)

    monkeypatch.setattr(executors.transforms.channels_last.ChannelsLast, "applied", watched)
    build(model, (x,), {}, CANDIDATES["channels_last"], trains=True).close()
    assert seen[0].is_training
    with pytest.raises(UsageError, match="the caller's"):
        seen[0].training_step.loss(x)


def test_flags_that_are_set_while_something_is_recorded_hold_for_that_time_alone(monkeypatch):
    here, there = os.pipe()  # a list would count as state of the model

    class Looking(nn.Module):
        def forward(self, x):
            os.write(there, bytes([settings.needed.alive]))
            return x

    create = executors.transforms.create
    parts = {"cudnn_deterministic": create, CudaGraph.name: lambda spec: Recording()}
    monkeypatch.setattr(executors.transforms, "create", lambda spec: parts[spec.name](spec))
    candidate = (TransformSpec("cudnn_deterministic"), TransformSpec(CudaGraph.name))
    executor = build(Looking().eval(), (torch.ones(1),), {}, candidate)
    assert os.read(here, 100) == bytes([1, 1, 1])
    os.close(here)
    assert settings.needed.alive == 0
    executor.close()
    executor = build(Looking().eval(), (torch.ones(1),), {}, candidate[:1])
    assert settings.needed.alive == 1
    executor.close()
    assert settings.needed.alive == 0


@pytest.mark.parametrize("grad", [False, True])
def test_building_in_inference_mode_makes_ordinary_tensors(grad):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return torch.relu(self.layer(x)), torch.arange(3) * 2.0

    x = torch.ones(1, 3, 4, 4)
    for name in ("fused_kernels", "cast_weights", "channels_last"):
        with torch.inference_mode(), torch.set_grad_enabled(grad):
            executor = build(Returns().eval(), (x,), {}, (TransformSpec(name),))
            assert torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled() is grad
        with torch.no_grad():
            assert not any(tensor.is_inference() for tensor in executor.call(x))
