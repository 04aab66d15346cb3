from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import load_facts
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.entries import STALE
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.weights import Weights
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
    entries_of,
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
    "attribute of a layer": lambda model, x: setattr(model.norm, "eps", 2.0),
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


@pytest.mark.sampled(every=5)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize("change", ["optimizer step", "load_state_dict", "to", "copy_", "replaced"])
def test_a_changed_model_is_never_served_from_frozen_code(model, x, serving, change):
    _check_never_stale(model, x, serving(FROZEN, x), CHANGES[change])


SLOW = ("compile", "openvino", "onnxruntime")
"""They compile or convert at each refresh."""


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in names()]
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


UNCOUNTED = {
    "data": lambda p: p.data.mul_(2),
    "numpy": lambda p: p.detach().numpy().fill(0.5),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).fill_(0.5),
    "storage": lambda p: p.untyped_storage().copy_((p.detach() + 1).untyped_storage()),
}


@pytest.mark.parametrize("name", COPYING)
@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_that_raise_no_version_end_the_use_of_copies(model, x, serving, write, name):
    tuned = TunedModule(model, serving(CANDIDATES[name], x))
    before = tuned(x)
    weight, version = model.convolution.weight, model.convolution.weight._version
    UNCOUNTED[write](weight)
    assert weight._version == version
    expected = answer(model, x)
    assert not torch.allclose(before, expected, rtol=0.05, atol=0.05)
    assert torch.equal(tuned(x), expected)
    assert tuned.report().fallbacks == {STALE: 1}
    tuned.refresh()
    loose = {"rtol": 0.05, "atol": 0.05} if name == "cast_weights" else {}
    torch.testing.assert_close(answer(tuned, x), expected, **loose)
    assert tuned.report().hits == 2


class Stemmed(nn.Module):
    """A stem, a residual block and a pointwise convolution, which are folded and packed."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.third, self.third_norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.fourth = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 2)
        for norm in (self.norm, self.second_norm, self.third_norm):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.convolution(x))), 3, 2, 1)
        x = torch.relu(self.second_norm(self.second(x)) + x)
        x = x + F.silu(self.third_norm(self.third(x)))
        return self.head(x.mean((2, 3)) + self.fourth(x).mean((2, 3)))


def _stem_by(choice):
    """The same choice at any float32 precision of the process."""
    key = "fprop/bias_relu/{}/first/i2x3x32x32/w8x3x7x7/s2x2/p3x3/d1x1/g1"
    return {"choices": json.dumps({key.format(number): choice for number in ("fp32", "tf32")})}


FUSING = {
    "engines": ("cudnn_engines", {}),
    "engines, aten": ("cudnn_engines", _stem_by("aten")),
    "engines, packed": ("cudnn_engines", _stem_by("c4:eng0")),
    "pooling": ("fused_kernels", {}),
    "stem": ("fused_kernels", {"stem": True}),
    "stem and sums": ("fused_kernels", {"stem": True, "residual": True}),
    "separable": ("fused_kernels", {"separable": True}),
}


def _fused_into(executor):
    """What the last of an executor's models has in the place of the model's own layers."""
    names = " ".join(node.name for node in executor.modules[-1].graph.nodes)
    shapes = [list(p.shape) for p in executor.modules[-1].parameters()]
    return {
        "engines": names.count("steady_conv_") == 4,
        "engines, aten": names.count("steady_conv_") == 4,
        "engines, packed": [8, 4, 7, 7] in shapes,
        "pooling": "relu_max_pool2d" in names and "conv_relu" not in names,
        "stem": "conv_relu_max_pool2d" in names,
        "stem and sums": "conv_relu_max_pool2d" in names and "bias_add_relu" in names,
        "separable": "pointwise_conv2d" in names and "depthwise_conv2d" in names,
    }


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    "change", ["load_state_dict", "copy_", "optimizer step", "statistics", "to", "replaced"]
)
@pytest.mark.parametrize("name", FUSING)
def test_folded_and_packed_weights_are_never_served_stale(name, change):
    transform, parameters = FUSING[name]
    torch.manual_seed(0)
    model, x = Stemmed().eval(), torch.randn(2, 3, 32, 32)
    tuned = TunedModule(model, always((TransformSpec(transform, tuple(parameters.items())),)))
    before = answer(model, x)
    torch.testing.assert_close(tuned(x), before)
    (entry,) = entries_of(tuned)
    assert _fused_into(entry.executor)[name]
    CHANGES[change](model, x)
    expected = answer(copy.deepcopy(model), x)
    assert not torch.allclose(before, expected, rtol=0.05, atol=0.05)
    for _ in range(2):
        assert torch.equal(answer(tuned, x), expected)
    assert tuned.report().hits == 1
    tuned.refresh()
    torch.testing.assert_close(answer(tuned, x), expected)
    assert tuned.report().hits == 2


class Patched(nn.Module):
    """Patches for the changes above."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).mean((2, 3)))


@pytest.mark.parametrize("change", CHANGES)
def test_patches_are_never_multiplied_by_stale_weights(x, serving, change):
    torch.manual_seed(0)
    candidate = (TransformSpec("linear_patches"),)
    _check_never_stale(Patched().eval(), x, serving(candidate, x), CHANGES[change])


def test_a_hook_added_later_is_called(model, x, tuned):
    tuned(x)
    model.head.register_forward_hook(lambda module, args, output: output * 0)
    assert tuned(x).abs().max() == 0
    assert tuned.report().hits == 1


class Holding(nn.Module):
    """Holds a module where `modules()` does not find it."""

    def __init__(self, module):
        super().__init__()
        self.held = [module]

    def forward(self, x):
        return self.held[0](x)


def _doubled(module, args, output):
    return 2 * output


ON_PROXY = {
    "hook": lambda inner: inner.register_forward_hook(_doubled),
    "hook before": lambda inner: inner.register_forward_pre_hook(lambda module, args: 2 * args[0]),
    "forward": lambda inner: setattr(inner, "forward", lambda x: 9 * x.mean((2, 3))[:, :2]),
}
NESTED = {
    "child": lambda inner: nn.Sequential(inner, nn.Tanh()),
    "itself": lambda inner: inner,
    "in a list": Holding,
}


@pytest.mark.parametrize("nest", NESTED)
@pytest.mark.parametrize("change", ON_PROXY)
def test_a_change_of_a_served_model_inside_another_is_seen(model, x, change, nest):
    inner = TunedModule(TunedModule(model, always(())), always(()))
    outer = NESTED[nest](inner).eval()
    weights = Weights(outer)
    weights.remember()
    outer(x)
    assert not weights.changed()
    ON_PROXY[change](inner)
    assert weights.changed()
    weights.remember()
    assert not weights.changed()
    ON_PROXY[change](inner.__wrapped__)
    assert weights.changed()


def test_a_hook_on_a_served_model_inside_another_is_called(model, x):
    inner = TunedModule(model, always(CANDIDATES["inference_mode"]))
    outer = nn.Sequential(inner, nn.Tanh()).eval()
    tuned = TunedModule(outer, always(CANDIDATES["channels_last"]))
    before = answer(tuned, x)
    inner.register_forward_hook(_doubled)
    for _ in range(2):
        assert torch.equal(answer(tuned, x), answer(outer, x))
    assert not torch.allclose(before, answer(outer, x))
    assert tuned.report().calls == {"tuned": 1, f"untouched: {STALE}": 2}


def test_a_hook_on_all_modules_is_not_left_out_either(model, x, tuned):
    before = tuned(x)

    def double(module, args, output):
        return 2 * output if module is model.head else output

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert torch.equal(tuned(x), answer(model, x))
    finally:
        handle.remove()
    assert tuned.report().hits == 1
    torch.testing.assert_close(tuned(x), before)


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
        lambda tuned: setattr(tuned, "head", nn.Linear(4, 2)),
        lambda tuned: tuned.apply(lambda m: [p.data.add_(1) for p in m.parameters(recurse=False)]),
    ],
    ids=["load_state_dict", "double", "attribute", "apply"],
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
