"""Exceptions that are the caller's reach the caller, once; an executor's own never do."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.faults import is_callers
from steadytorch.runtime.module import RAISED, TunedModule
from steadytorch.runtime.trained import TrainedModule

from .conftest import CANDIDATES, FAILED, Failing, Network, always, answer, replace_executor

NAMES = ("channels_last", "inference_mode", "fold_batch_norm")


class StopForward(Exception):  # noqa: N818 - as libraries name theirs
    """Of a library that ends a forward pass early."""


class Stopping(Network):
    """Raises on purpose when it is told to."""

    def forward(self, x):
        x = self.norm(self.convolution(x))
        if (x > 1e6).any():
            raise StopForward("far enough")
        return self.head(x.mean((2, 3)))


@pytest.fixture
def stopping():
    torch.manual_seed(0)
    return Stopping().eval()


@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("name", ["channels_last", "inference_mode"])
@pytest.mark.parametrize("kind", [StopForward, ValueError, RuntimeError, TimeoutError])
@pytest.mark.usefixtures("hooked_anyway")
def test_a_raising_hook_propagates_and_is_called_once(model, x, name, canary, kind):
    calls, is_on = [], []

    def hook(module, args, output):
        calls.append(1)
        if is_on:
            raise kind("enough")

    model.norm.register_forward_hook(hook)
    tuned = TunedModule(model, always(CANDIDATES[name]), options=ServingOptions(canary=canary))
    for _ in range(3):
        tuned(x)
    is_on.append(True)
    before = len(calls)
    for _ in range(2):
        with pytest.raises(kind, match="enough"):
            tuned(x)
    assert len(calls) - before == 2
    is_on.clear()
    torch.testing.assert_close(tuned(x), answer(model, x))
    assert FAILED not in tuned.report().calls
    assert tuned.report().hits >= 2


@pytest.mark.parametrize("at", ["first", "canary", "later"])
@pytest.mark.parametrize("name", ["channels_last", "inference_mode"])
@pytest.mark.parametrize("kind", [StopForward, TimeoutError])
def test_a_deadline_by_a_signal_ends_the_call(model, x, name, at, kind, monkeypatch, tmp_path):
    def expired(number, frame):
        raise kind("time is up")

    tuned = TunedModule(
        model, always(CANDIDATES[name]), options=ServingOptions(canary=at == "canary")
    )
    for _ in range(3 if at == "later" else 0):
        tuned(x)
    forward = model.head.__class__.forward
    calls = os.open(tmp_path / "calls", os.O_WRONLY | os.O_CREAT)  # no state of the model

    def slow(self, x):
        os.write(calls, b".")
        if os.lseek(calls, 0, os.SEEK_CUR) > (at == "canary"):
            signal.raise_signal(signal.SIGUSR1)
        return forward(self, x)

    before = signal.signal(signal.SIGUSR1, expired)
    try:
        monkeypatch.setattr(model.head.__class__, "forward", slow)
        with pytest.raises(kind, match="time is up"):
            tuned(x)
        monkeypatch.undo()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert os.fstat(calls).st_size == 1 + (at == "canary")
    os.close(calls)
    torch.testing.assert_close(tuned(x), answer(model, x))
    assert FAILED not in tuned.report().calls


@pytest.mark.parametrize("name", ["channels_last", "inference_mode"])
def test_an_exception_of_a_librarys_own_class_is_heard(stopping, x, name):
    tuned = TunedModule(stopping, always(CANDIDATES[name]))
    tuned(x)
    with pytest.raises(StopForward):
        tuned(x * 1e12)
    tuned(x)
    assert tuned.report().calls == {"tuned": 2, RAISED: 1}


@pytest.mark.parametrize(
    "error", [RuntimeError("out"), TypeError("no"), torch.OutOfMemoryError("memory"), KeyError(1)]
)
def test_the_model_answers_if_an_executor_raises(model, x, error):
    tuned = TunedModule(model, always(CANDIDATES["channels_last"]))
    tuned(x)
    replace_executor(tuned, Failing(model, error=error))
    assert torch.equal(tuned(x), answer(model, x))
    assert tuned.report().calls[FAILED] == 1


def test_a_raising_model_is_called_once(model, x):
    calls = []
    model.head.register_forward_pre_hook(lambda *given: calls.append(1))
    tuned = TunedModule(model, always(CANDIDATES["inference_mode"]))
    tuned(x)
    calls.clear()
    model.head.forward = lambda x: {}["missing"]
    with pytest.raises(KeyError, match="missing"):
        tuned(x)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (functools.partial(lambda word, *given: int(word), "x"), True),
        (type("Hook", (), {"__call__": lambda self, *given: int("x")})(), True),
        (type("Hook", (), {"see": lambda self, *given: int("x")})().see, True),
        (lambda *given: None, False),
    ],
)
def test_every_kind_of_hook_is_known_by_its_code(hook, found):
    layer = nn.ReLU()
    layer.register_forward_hook(hook)

    def call():
        layer(torch.ones(1))
        int("y")

    with pytest.raises(ValueError, match="invalid literal") as raised:
        call()
    assert is_callers(raised.value, [layer], is_live=False) is found


def trained(model, name):
    parameters = (("mode", "default"), ("freezing", False)) if name == "compile" else ()
    candidate = (TransformSpec(name, parameters),)
    return TrainedModule(
        model, lambda context: Resolution(candidate), options=ServingOptions(trains=True)
    )


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.convolution(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["channels_last", pytest.param("compile", marks=pytest.mark.slow)])
def test_activation_checkpointing_trains_as_without_a_plan(x, name, reentrant, warm):
    torch.manual_seed(0)
    model = Small().train()
    tuned = trained(model, name)
    if warm:
        tuned(x).sum().backward()
    gradients = []
    for called in (model, tuned):
        for _ in range(2):
            model.zero_grad()
            given = x.clone().requires_grad_(reentrant)
            checkpoint(called, given, use_reentrant=reentrant).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
    if not reentrant:
        assert tuned.report().fallbacks == {}
        # A recomputation that is ended early is no call that was answered.
        assert tuned.report().hits >= 2
