from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import probation
from steadytorch.runtime.canary import Canary
from steadytorch.runtime.executors import build
from steadytorch.runtime.probation import WRITES, CanaryProbation, FirstCall
from steadytorch.runtime.state import DRAWS, KEEPS_STATE, writes_of
from steadytorch.runtime.weights import Weights

LIVE = (TransformSpec("inference_mode"),)
COPY = (TransformSpec("channels_last"),)
CPU = torch.device("cpu")
X = torch.ones(1, 3, 4, 4)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.before()
        return self.layer(x) * 0 + self.total + self.calls

    def before(self):
        pass


class Writes(Base):
    def before(self):
        self.total += 1


class Replaces(Base):
    def before(self):
        self.total = self.total + 1


class Counts(Base):
    def before(self):
        self.calls += 1


class Draws(Base):
    def before(self):
        torch.rand(1)


FAULTS = [(Base, None), (Writes, WRITES), (Counts, KEEPS_STATE), (Draws, DRAWS)]


def watched(model, candidate, canary=None):
    weights = Weights(model)
    weights.remember()
    executor = build(model, (X,), {}, candidate)
    if canary is None:
        watch = FirstCall(executor, weights, CPU)
    else:
        _, *copies = executor.modules
        outdated = writes_of(copies[-1]) if copies else None
        watch = CanaryProbation(executor, weights, CPU, canary, outdated)

    def answer():
        with torch.no_grad():
            return watch.answer(lambda: executor.call(X), lambda: model(X), [X])

    return answer


@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_the_first_call_shows_what_the_model_does(kind, fault, candidate):
    model = kind().eval()
    outcome = watched(model, candidate)()
    if candidate is COPY and kind is Writes:
        fault = KEEPS_STATE  # the buffer is the copy's own
    assert (outcome.fault, outcome.settled, outcome.of_model) == (fault, True, fault is not None)
    assert outcome.result.max() == model.total + model.calls
    assert model.total + model.calls == (kind in (Writes, Counts))


@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
def test_a_buffer_that_is_replaced_stays_an_ordinary_tensor(candidate):
    model = Replaces().eval()
    outcome = watched(model, candidate)()
    assert outcome.fault in (WRITES, KEEPS_STATE)
    assert outcome.result.max() == model.total == 1
    assert not model.total.is_inference()


class Caches(Base):
    """Keeps tables in a dictionary, as models do of positions."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def before(self):
        if not self.tables:
            self.tables[4] = torch.arange(4.0), torch.ones(4)

    def forward(self, x):
        self.before()
        return self.layer(x) * self.tables[4][0]


@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
def test_a_model_that_cached_tensors_in_a_tuned_call_can_be_trained(candidate):
    model = Caches().eval()
    outcome = watched(model, candidate)()
    assert outcome.fault == KEEPS_STATE
    assert torch.equal(outcome.result, model(X))
    model(X).sum().backward()
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
def test_random_numbers_are_those_that_the_untouched_model_would_draw(candidate):
    answer, other = watched(Draws().eval(), candidate), Draws().eval()
    torch.manual_seed(2)
    answer()
    found = torch.rand(1)
    torch.manual_seed(2)
    other(X)
    assert torch.equal(found, torch.rand(1))


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_the_canary_runs_a_model_with_a_memory_once_a_call(kind, fault):
    model = kind().eval()
    outcome = watched(model, COPY, Canary(1e-4))()
    assert (outcome.fault, outcome.of_model) == (fault, fault is not None)
    assert outcome.tuned == (fault is None)
    assert outcome.result.max() == model.total + model.calls
    assert model.total + model.calls == (kind in (Writes, Counts))


def test_on_trial_what_either_side_writes_is_written_once():
    """Probes run both in random order."""
    model = Late().eval()
    answer = watched(model, COPY, Canary(1e-4, spacing=1))
    for _ in range(8):
        assert answer().fault is None
    model.calls = 100  # from outside, between calls
    outcome = answer()
    assert (outcome.fault, outcome.tuned, outcome.of_model) == (WRITES, False, True)
    assert outcome.result.max() - model.calls == model.total == 1


class Late(Base):
    def before(self):
        if self.calls:
            self.total += 1


def test_on_trial_a_live_executor_between_probes_leaves_a_write_once():
    model = Late().eval()
    answer = watched(model, LIVE, Canary(1e-4, spacing=2))
    answer()
    for _ in range(4):
        assert answer().fault is None
    model.calls = 1
    outcome = answer()
    assert outcome.fault == WRITES
    assert model.total == 1


@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
def test_on_trial_only_calls_that_both_answer_are_watched(candidate, monkeypatch):
    begun = []

    class Watch(probation.StateWatch):
        def __init__(self, *given):
            super().__init__(*given)
            begun.append(True)

    monkeypatch.setattr(probation, "StateWatch", Watch)
    answer, watches = watched(Base().eval(), candidate, Canary(1e-4, spacing=3)), []
    for _ in range(8):
        assert answer().fault is None
        watches.append(len(begun))
    assert watches == [1, 1, 1, 2, 2, 2, 3, 3]


def test_on_trial_it_goes_on_until_the_canary_has_found_something():
    answer = watched(Base().eval(), COPY, Canary(1e-4, looks=(12,), spacing=1))
    outcomes = [answer() for _ in range(13)]
    assert [outcome.settled for outcome in outcomes] == [False] * 12 + [True]
    assert outcomes[-1].finding is not None
    assert outcomes[-1].finding.judgement.pairs == 12


def test_the_model_answers_for_a_wrong_executor():
    model = Base().eval()
    executor = build(model, (X,), {}, LIVE)
    weights = Weights(model)
    weights.remember()
    watched = CanaryProbation(executor, weights, CPU, Canary(1e-4), None)
    outcome = watched.answer(lambda: model(X) + 1, lambda: model(X), [X])
    assert torch.equal(outcome.result, model(X))
    assert outcome.fault.startswith("wrong")
    assert not outcome.of_model


class Reads(Base):
    """A hook writes an attribute of this module, not of its copy; forward reads it."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = {"calls": -1}, torch.zeros(())
        self.layer.register_forward_hook(lambda *given: self.note())

    def note(self):
        self.found["calls"] += 1
        self.seen += 1

    def forward(self, x):
        self.layer(x)
        return self.found["calls"] + 10 * self.seen


@pytest.mark.parametrize("most", [64 << 20, 0], ids=["kept", "too much to keep"])
@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
@pytest.mark.usefixtures("hooked_anyway")
def test_hook_writes_happen_once_restorable_or_not(candidate, most, monkeypatch):
    monkeypatch.setattr(probation, "MOST_OWN_BYTES", most)
    model = Reads().eval()
    outcome = watched(model, candidate)()
    assert (outcome.fault, outcome.of_model) == (KEEPS_STATE, True)
    assert (model.found, model.seen) == ({"calls": 0}, 1)


@pytest.mark.parametrize("candidate", [LIVE, COPY], ids=["live", "copy"])
@pytest.mark.usefixtures("hooked_anyway")
def test_hook_writes_that_the_model_reads_happen_once(candidate):
    model = Reads().eval()
    outcome = watched(model, candidate)()
    assert (outcome.fault, outcome.of_model) == (KEEPS_STATE, True)
    assert outcome.result == 10
    assert (model.found, model.seen) == ({"calls": 0}, 1)
