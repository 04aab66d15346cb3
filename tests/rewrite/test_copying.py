from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from steadytorch.rewrite.copying import copy_with, twin


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4))

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def halve(tensor):
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def test_unchanged_tensors_are_shared():
    model = Tied()
    copy = copy_with(model, halve)
    assert copy.positions is model.positions


def test_apart_buffers_are_the_copys_own_and_weights_are_shared():
    model = Tied()
    copy = copy_with(model, lambda tensor: tensor, apart=True)
    copy.positions.add_(1)
    assert model.positions.tolist() == [0, 1, 2, 3]
    assert copy.head.weight is model.head.weight


def test_buffers_that_are_weights_in_disguise_are_shared_all_the_same(monkeypatch):
    monkeypatch.setattr("steadytorch.rewrite.copying.MOST_OWN_BYTES", 31)
    model = Tied()
    assert copy_with(model, halve, apart=True).positions is model.positions


def test_changed_tensors_are_new_and_the_originals_keep_their_type():
    model = Tied()
    copy = copy_with(model, halve)
    assert copy.head.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32


def test_tied_weights_stay_tied():
    copy = copy_with(Tied(), halve)
    assert copy.head.weight is copy.embedding.weight


def test_a_converted_parameter_stays_a_parameter_with_its_need_of_gradients():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    copy = copy_with(model, halve)
    assert isinstance(copy.weight, nn.Parameter)
    assert (copy.weight.requires_grad, copy.bias.requires_grad) == (True, False)


def test_layers_of_the_copy_can_be_replaced_without_changing_the_original():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    copy = copy_with(model, lambda tensor: tensor)
    copy[1] = nn.Identity()
    assert isinstance(model[1], nn.ReLU)


def test_training_mode_is_kept_layer_by_layer():
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    copy = copy_with(model, halve)
    assert [layer.training for layer in copy] == [True, False]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_computed_at_each_call_are_computed_in_the_copy_too():
    model = nn.utils.weight_norm(nn.Linear(4, 4))
    copy = copy_with(model, halve)
    assert copy(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
    assert model(torch.randn(2, 4)).dtype == torch.float32


def test_parametrized_weights_are_copied():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    assert torch.equal(copy_with(model, lambda tensor: tensor)(x), model(x))


def test_a_copy_made_in_inference_mode_has_ordinary_weights():
    with torch.inference_mode():
        copy = copy_with(nn.Linear(2, 2), halve)
    assert not copy.weight.is_inference()


def test_a_twin_has_modules_of_its_own_and_tensors_in_common():
    model = Tied()
    other = twin(model)
    assert other.head is not model.head
    assert type(other) is Tied
    assert all(a is b for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert other.positions is model.positions


def test_what_is_assigned_to_either_twin_is_seen_by_both():
    model = Tied()
    other = twin(model)
    other.positions = torch.zeros(4)
    model.embedding.weight = nn.Parameter(torch.ones(8, 4))
    assert model.positions is other.positions
    assert other.embedding.weight is model.embedding.weight
    model.double()
    assert other.head.weight.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_twin_of_a_model_with_a_scripted_part_runs():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    x = torch.randn(1, 2)
    torch.testing.assert_close(twin(model)(x), model(x))


# -- hooks --------------------------------------------------------------------------------------


class Notes:
    """Notes that it was called, as a hook or by one; cannot be copied."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *given):
        self.calls += 1

    def __deepcopy__(self, memo):
        raise AssertionError("the caller's own was copied")


def note(notes, *given):
    notes()


HOOKS = {
    "method": lambda notes: notes.__call__,
    "object": lambda notes: notes,
    "partial": lambda notes: partial(note, notes),
    "keyword": lambda notes: partial(lambda *given, notes: notes(), notes=notes),
    "partial of a method": lambda notes: partial(notes.__call__, "more"),
    "closure": lambda notes: lambda *given: notes(),
}
REGISTER = {
    "after": nn.Module.register_forward_hook,
    "before": nn.Module.register_forward_pre_hook,
    "back": nn.Module.register_full_backward_hook,
    "before back": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("copied", [partial(copy_with, convert=lambda tensor: tensor), twin])
@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("kind", HOOKS)
def test_the_callers_hooks_are_told_of_calls_of_the_copy(kind, register, copied):
    model, notes = nn.Sequential(nn.Linear(2, 2)), Notes()
    for module in model.modules():
        REGISTER[register](module, HOOKS[kind](notes))
    copied(model)(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert notes.calls == 2


class Collects(nn.Module):
    """Reads in `forward` what its hooks wrote, to an object and a list that it holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.found, self.held = nn.Linear(2, 2), [], HoldsLast()
        self.layer.register_forward_hook(partial(self.collect, "of itself"))
        self.layer.register_forward_hook(partial(put, self.found))
        self.layer.register_forward_hook(self.held.put)

    def collect(self, name, module, args, output):
        self.last = output

    def forward(self, x):
        self.layer(x)
        return self.last + self.found.pop() + self.held.last


class HoldsLast:
    def put(self, module, args, output):
        self.last = output


def put(found, module, args, output):
    found.append(output)


def test_what_a_model_and_its_hooks_hold_is_the_copys_own_in_both():
    model = Collects()
    copy = copy_with(model, halve)
    assert torch.equal(copy(torch.ones(1, 2).bfloat16()), 3 * copy.last)
    assert (model.found, vars(model.held)) == ([], {})
    assert not hasattr(model, "last")


def test_a_hook_that_is_taken_off_the_copy_stays_on_the_model():
    model, notes = nn.Linear(2, 2), Notes()
    model.handle = model.register_forward_hook(notes)
    copy = copy_with(model, halve)
    copy.handle.remove()
    assert (len(copy._forward_hooks), len(model._forward_hooks)) == (0, 1)


def test_hooks_of_a_graph_are_copied():
    model, notes = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), Notes()
    model.register_forward_hook(notes)
    model.get_submodule("0").register_forward_hook(notes)
    copy_with(model, lambda tensor: tensor)(torch.ones(1, 2))
    assert notes.calls == 2
