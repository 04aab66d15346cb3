from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from steadytorch.device.facts import load_facts
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms import all_variants, names
from steadytorch.transforms.base import Applicable
from steadytorch.workload.workload import Workload

from .conftest import (
    CANDIDATES,
    COPYING,
    FROZEN,
    always,
    answer,
    copy_into,
    other_weights,
)


def _sgd(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).sum().backward()
    optimizer.step()


def _copy_into_in_inference_mode(model, x):
    with torch.inference_mode():
        model.convolution.weight.copy_(model.convolution.weight + 1)


def _new_storage(model, x):
    model.convolution.weight.data = model.convolution.weight.data + 1


def _replace(model, x):
    model.convolution.weight = nn.Parameter(model.convolution.weight.detach() + 1)


def _replace_module(model, x):
    torch.manual_seed(9)
    model.head = nn.Linear(4, 2)


def _parametrize(model, x):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(model.convolution, "weight", Double())


CHANGES = {
    "optimizer step": _sgd,
    "load_state_dict": lambda model, x: model.load_state_dict(other_weights(model)),
    "assigned state dict": lambda model, x: model.load_state_dict(
        other_weights(model), assign=True
    ),
    "to": lambda model, x: _to_and_change(model),
    "copy_": copy_into,
    "copy_ in inference mode": _copy_into_in_inference_mode,
    "data": _new_storage,
    "replaced": _replace,
    "module replaced": _replace_module,
    "parametrized": _parametrize,
    "statistics": lambda model, x: model.norm.running_mean.add_(1),
    "submodule to train": lambda model, x: model.norm.train(),
}


def _to_and_change(model):
    model.to(torch.float64)
    for parameter in model.parameters():
        parameter.data.add_(1)
    model.to(torch.float32)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", COPYING)
def test_a_changed_model_is_never_served_stale(model, x, serving, name, change):
    _check_never_stale(model, x, serving(CANDIDATES[name], x), CHANGES[change])


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("change", ["optimizer step", "load_state_dict", "to", "copy_", "replaced"])
def test_a_changed_model_is_never_served_from_frozen_code(model, x, serving, change):
    _check_never_stale(model, x, serving(FROZEN, x), CHANGES[change])


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.compiles if n == "compile" else ()) for n in names()]
)
def test_no_transform_of_the_registry_serves_stale(model, x, name):
    facts = load_facts("cpu")
    usable = [
        t
        for t in all_variants(facts)
        if t.spec.name == name
        and isinstance(t.applies_to(Workload(model, (x,)), facts), Applicable)
    ]
    if not usable:
        pytest.skip("does not apply on the CPU, or does nothing here")
    tuned = TunedModule(model, always((usable[0].spec,)))
    tuned(x)
    assert tuned.report().calls == {"tuned": 1}
    loose = {} if usable[0].precision == "same" else {"rtol": 0.05, "atol": 0.05}
    for change in ("copy_", "load_state_dict", "optimizer step", "to", "statistics", "replaced"):
        before = answer(model, x)
        CHANGES[change](model, x)
        expected = answer(copy.deepcopy(model), x)
        assert not torch.allclose(before, expected, rtol=0.05, atol=0.05)
        torch.testing.assert_close(answer(tuned, x), expected, **loose)
        tuned.refresh()
        torch.testing.assert_close(answer(tuned, x), expected, **loose)
    assert tuned.report().hits >= 7
    tuned.close()


def test_a_hook_that_comes_later_is_not_left_out(model, x, tuned):
    tuned(x)
    model.head.register_forward_hook(lambda module, args, output: output * 0)
    assert tuned(x).abs().max() == 0
    assert tuned.report().hits == 1


def test_executors_that_read_the_models_weights_go_on_after_a_change(model, x, serving):
    tuned = TunedModule(model, serving(CANDIDATES["inference_mode"], x))
    tuned(x)
    for change in ("copy_", "replaced", "data", "module replaced", "submodule to train"):
        CHANGES[change](model, x)
        assert torch.equal(answer(tuned, x), answer(copy.deepcopy(model).train(False), x)) or (
            change == "submodule to train"
        )
    assert tuned.report().calls == {"tuned": 6}


def _check_never_stale(model, x, resolver, change):
    tuned = TunedModule(model, resolver)
    before = tuned(x)
    assert tuned.report().calls == {"tuned": 1}
    change(model, x)
    expected = answer(copy.deepcopy(model), x)
    assert not torch.allclose(before, expected, rtol=0.05, atol=0.05)
    for _ in range(3):
        assert torch.equal(answer(tuned, x), expected)
    assert tuned.report().calls["tuned"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tuned: tuned.load_state_dict(other_weights(tuned)),
        lambda tuned: tuned.double().float(),
        lambda tuned: tuned.to(torch.float32),
        lambda tuned: setattr(tuned, "head", nn.Linear(4, 2)),
        lambda tuned: tuned.apply(lambda m: [p.data.add_(1) for p in m.parameters(recurse=False)]),
    ],
    ids=["load_state_dict", "double", "to", "attribute", "apply"],
)
def test_a_change_through_the_wrapper_ends_the_plan(model, x, tuned, change):
    tuned(x)
    change(tuned)
    for _ in range(2):
        assert torch.equal(answer(tuned, x), answer(model, x))
    assert tuned.report().calls["tuned"] == 1


def test_weights_changed_before_the_first_call_are_the_ones_that_are_served(model, x, tuned):
    copy_into(model, x)
    torch.testing.assert_close(tuned(x), answer(model, x))
    assert tuned.report().calls == {"tuned": 1}


def test_a_second_signature_does_not_hide_a_change_from_the_first(model, x):
    tuned = TunedModule(model, always(CANDIDATES["fold_batch_norm"]))
    tuned(x)
    copy_into(model, x)
    tuned(x[:1])
    assert torch.equal(answer(tuned, x), answer(model, x))


def test_two_signatures_are_served_side_by_side(model, x):
    tuned = TunedModule(model, always(CANDIDATES["fold_batch_norm"]))
    for inputs in (x, x[:1], x, x[:1]):
        torch.testing.assert_close(tuned(inputs), answer(model, inputs))
    assert tuned.report().calls == {"tuned": 4}


def test_functional_call_takes_the_weights_it_is_given(model, x, tuned):
    tuned(x)
    other = {k: v + 1 for k, v in model.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(tuned, other, (x,))
        expected = torch.func.functional_call(model, other, (x,))
    assert torch.equal(found, expected)


class Counting(nn.Module):
    """A model whose answer depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * 0 + self.calls


def test_a_model_that_writes_to_its_buffers_counts_each_call_once(x, serving):
    tuned = TunedModule(Counting().eval(), serving(CANDIDATES["inference_mode"], x))
    assert [answer(tuned, x).max().item() for _ in range(4)] == [1, 2, 3, 4]
