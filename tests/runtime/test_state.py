from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.state import Draws, State, writes_of

from .conftest import CANDIDATES, answer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("memory", torch.zeros(2))
        self.calls, self.rate = 0, 0.5
        self.cache, self.table, self.hidden = [], {}, torch.zeros(1)
        self.last, self.window = deque([torch.zeros(1)]), deque([0, 1], maxlen=2)

    def forward(self, x):
        return self.layer(x)


CHANGES = {
    "number": lambda m: setattr(m, "calls", m.calls + 1),
    "new attribute": lambda m: setattr(m, "fresh", 1),
    "gone": lambda m: delattr(m, "rate"),
    "list": lambda m: m.cache.append(1),
    "dictionary": lambda m: m.table.update(a=1),
    "deque": lambda m: m.window.append(2),
    "tensor written in a deque": lambda m: m.last[0].add_(1),
    "tensor replaced": lambda m: setattr(m, "hidden", torch.ones(1)),
    "tensor written": lambda m: m.hidden.add_(1),
    "buffer replaced": lambda m: setattr(m, "memory", m.memory + 1),
    "buffer written": lambda m: m.memory.add_(1),
    "of a submodule": lambda m: setattr(m.layer, "last", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_left_by_a_call_is_detected_and_restored(change):
    model = Model()
    memory = model.memory
    state = State([model], keep=True)
    assert not state.changed()
    CHANGES[change](model)
    assert state.changed()
    state.restore()
    assert model.memory is memory
    assert memory.tolist() == [0, 0]
    assert (model.calls, model.rate, model.cache, model.table) == (0, 0.5, [], {})
    assert (model.last, model.window, model.window.maxlen) == (deque([0]), deque([0, 1]), 2)
    assert model.hidden.tolist() == [0]
    assert not hasattr(model, "fresh")
    assert not hasattr(model.layer, "last")


def test_restoring_writes_to_what_changed_alone():
    model = Model()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    state, before = State([model], keep=True), model.hidden._version
    model.calls += 1
    model.memory.add_(1)
    state.restore()
    assert model.hidden._version == before
    assert model.memory.tolist() == [0, 0]
    assert torch.equal(model.graph.to_dense(), torch.eye(3))


def test_no_more_is_kept_than_is_allowed_wherever_it_is_held():
    model = Model()
    model.cache = [torch.zeros(100)]
    held = (model.memory, model.hidden, *model.last, *model.cache)
    size = sum(tensor.nbytes for tensor in held)
    assert State([model], keep=True, most=size).restorable
    for state in (State([model], keep=True, most=size - 1), State([model])):
        assert (state.restorable, state._copies) == (False, [])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_state_left_in_a_copy_is_detected(change, mode):
    model = Model()
    wrote = writes_of(model)
    model(torch.ones(2))
    assert not wrote()
    with mode():
        CHANGES[change](model)
    # A layer of PyTorch's own is known to assign nothing.
    assert wrote() is (change != "of a submodule")


def test_assigning_an_equal_value_is_not_state():
    model = Model()
    model.sizes, model.odd = (1000, 2000), [torch.ones(3)]
    wrote = writes_of(model)
    model.sizes = tuple([1000, 2000])
    assert not wrote()
    model.odd = [torch.ones(3)]
    assert wrote()


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.layer(torch.ones(2)),
        lambda m: setattr(m, "rate", float("0.5")),
        lambda m: m.zero_grad(),
    ],
)
def test_a_call_that_leaves_nothing_behind_changes_nothing(call):
    model = Model()
    state = State([model])
    call(model)
    assert not state.changed()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_weights_recomputed_at_each_call_are_not_state():
    model = nn.utils.weight_norm(nn.Linear(2, 2))
    state = State([model])
    model(torch.ones(2))
    assert not state.changed()


class PrunedByUser(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (t > 0)


def pruned_twice(model, name):
    prune.l1_unstructured(model, name, 0.5)
    prune.random_unstructured(model, name, 0.5)


PRUNED = [lambda *of: prune.l1_unstructured(*of, 0.5), pruned_twice, PrunedByUser.apply]


@pytest.mark.parametrize("pruned", PRUNED)
def test_weights_that_pruning_recomputes_are_not_state(pruned):
    model = nn.Linear(2, 2)
    pruned(model, "weight")
    state = State([model])
    model(torch.ones(2))
    assert not state.changed()
    model.rate = 1
    assert state.changed()


def test_a_pruned_model_is_served(serving):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    prune.l1_unstructured(model[0], "weight", 0.5)
    tuned = TunedModule(model, serving(CANDIDATES["channels_last"], x))
    for _ in range(2):
        torch.testing.assert_close(answer(tuned, x), answer(model, x))
    assert tuned.report().calls == {"tuned": 2}
    with torch.no_grad():
        model[0].weight_mask.zero_()
    assert torch.equal(answer(tuned, x), answer(model, x))


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += int(x.sum() > 9)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm]
)
def test_state_left_in_a_copy_with_a_norm_is_detected(norm):
    model = norm(Counting()).eval()
    wrote = writes_of(model)
    model(torch.ones(2))
    assert not wrote()
    model(10 * torch.ones(2))
    assert wrote()


def test_tensors_that_inference_mode_left_behind_become_ordinary():
    model = Model()
    state = State([model])
    with torch.inference_mode():
        model.memory = model.memory + 1
        model.hidden = model.hidden + 1
    state.mend()
    assert not model.memory.is_inference()
    assert not model.hidden.is_inference()
    assert model.memory.tolist() == [1, 1]


def test_tensors_that_inference_mode_left_in_containers_become_ordinary():
    model = Model()
    state = State([model])
    window, made = model.window, torch.ones(1)
    with torch.inference_mode():
        model.table[8] = made + 1, {"sine": made + 2}
        model.cache.append(made + 3)
        model.window.extend([made + 4] * 2)
        model.layer.pair = made + 5, None
    state.mend()
    (cosine, deeper), (first, second) = model.table[8], model.window
    found = [cosine, deeper["sine"], *model.cache, first, model.layer.pair[0]]
    assert [tensor.tolist() for tensor in found] == [[2], [3], [4], [5], [6]]
    assert not any(tensor.is_inference() for tensor in found)
    assert model.window is window
    assert first is second
    assert model.layer.pair[1] is None


def test_random_numbers_that_were_drawn_are_seen_and_drawn_again():
    draws = Draws(torch.device("cpu"))
    assert not draws.happened()
    first = torch.rand(3)
    assert draws.happened()
    draws.undo()
    assert not draws.happened()
    assert torch.equal(torch.rand(3), first)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.total += 1
        return x + self.calls


class Holder:
    outside = Outside()


class Nested(nn.Module):
    def forward(self, x):
        return Holder.outside(x)


NESTED = Nested()


class ReadsModules(nn.Module):
    def forward(self, x):
        return NESTED(x)


def test_state_of_modules_that_code_reads_elsewhere_is_seen_and_restored():
    model, outside = ReadsModules(), Holder.outside
    before = outside.calls, float(outside.total)
    state = State([model], keep=True)
    model(torch.ones(1))
    assert state.changed()
    state.restore()
    assert (outside.calls, float(outside.total)) == before
