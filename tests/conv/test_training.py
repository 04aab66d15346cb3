from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadytorch.conv.choices import Choice, read_choice
from steadytorch.conv.executables import number_of
from steadytorch.conv.problem import parse
from steadytorch.conv.training import Engines, ProblemRecorder, equip

CHANNELS_LAST = torch.channels_last
KEYS = {
    "fprop": "fprop/bias/tf32/first/i2x3x8x8/w8x3x3x3/s1x1/p1x1/d1x1/g1",
    "dgrad": "dgrad/none/tf32/first/i2x3x8x8/w8x3x3x3/s1x1/p1x1/d1x1/g1",
    "wgrad": "wgrad/none/tf32/first/i2x3x8x8/w8x3x3x3/s1x1/p1x1/d1x1/g1",
}


class Net(nn.Module):
    """Bias and none, groups, a stride, a dilation, and `padding='same'`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mixed = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, bias=False)
        self.wide = nn.Conv2d(8, 4, 3, padding="same", dilation=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.mixed(torch.relu_(self.norm(self.stem(x)))))


@pytest.fixture(autouse=True)
def tf32() -> None:
    """Checks that TF32 is allowed, PyTorch's default, as the keys above assume."""
    assert number_of(torch.float32) == "tf32"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Records the engines passed to the operator by each call."""
    from steadytorch.conv import training

    calls, run = [], training.conv_engine_eagerly

    def noted(*given: Any) -> torch.Tensor:
        calls.append(given[-3:])
        return run(*given)

    monkeypatch.setattr(training, "conv_engine_eagerly", noted)
    return calls


def net(layout: torch.memory_format = torch.contiguous_format) -> Net:
    torch.manual_seed(0)
    return Net().to(memory_format=layout)  # type: ignore[call-overload]


def image(layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 8, 8).contiguous(memory_format=layout)


def gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    call().float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("weights", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize("images", [torch.contiguous_format, CHANNELS_LAST])
def test_gradients_are_those_of_pytorch_in_every_layout(weights, images, asked):
    own, x = net(weights), image(images)
    made = equip(copy.deepcopy(own), Engines({}))
    expected = gradients(own, lambda: own(x))
    found = gradients(made, lambda: made(x))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert [g.stride() for g in found] == [g.stride() for g in expected]
    assert asked == [("", "", "")] * 3


def test_under_autocast_types_and_gradients_are_those_of_pytorch(asked):
    own, x = net(), image()
    made = equip(copy.deepcopy(own), Engines({}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(x).dtype == own(x).dtype == torch.bfloat16
        expected = gradients(own, lambda: own(x))
        found = gradients(made, lambda: made(x))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert {g.dtype for g in found} == {torch.float32}
    assert len(asked) == 6


def test_gradients_of_gradients_are_those_of_pytorch():
    own = net()
    made = equip(copy.deepcopy(own), Engines({}))

    def penalty(model: nn.Module) -> torch.Tensor:
        x = image().requires_grad_()
        (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return found

    expected = gradients(own, lambda: penalty(own))
    found = gradients(made, lambda: penalty(made))
    assert len(found) == len(expected)
    # The bias before the batch norm has a gradient of rounding errors alone.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_layers_that_are_run_again_in_the_backward_pass_are_run_alike(asked):
    own, x = net(), image().requires_grad_()
    made = equip(copy.deepcopy(own), Engines({}))
    expected = gradients(own, lambda: checkpoint(own, x, use_reentrant=False))
    found = gradients(made, lambda: checkpoint(made, x, use_reentrant=False))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert len(asked) == 6


@pytest.mark.parametrize("spatial", [1, 3])
def test_one_and_three_dimensions(spatial, asked):
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[spatial]
    own = kind(2, 4, 3, padding="valid")
    made, x = equip(copy.deepcopy(own), Engines({})), torch.randn(2, 2, *[5] * spatial)
    expected = gradients(own, lambda: own(x))
    torch.testing.assert_close(gradients(made, lambda: made(x)), expected, rtol=1e-6, atol=1e-6)
    assert len(asked) == 1


def test_names_parameters_buffers_and_hooks_stay(asked):
    model = net()
    keys, held, seen = list(model.state_dict()), list(model.parameters()), []
    model.stem.register_forward_hook(lambda *given: seen.append(given))
    equip(model, Engines({}))
    assert list(model.state_dict()) == keys
    assert all(map(lambda a, b: a is b, model.parameters(), held))
    assert isinstance(model.stem, nn.Conv2d)
    model(image())
    assert len(seen) == 1
    assert len(asked) == 3


def test_each_pass_is_run_by_the_engine_of_its_own_key(asked):
    names = {"fprop": "eng1", "dgrad": "eng2_k1=0", "wgrad": "eng3"}
    layer = equip(net().stem, Engines({KEYS[n]: Choice(e) for n, e in names.items()}))
    layer(image())
    assert asked == [("eng1", "eng2_k1=0", "eng3")]


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_have_the_same_engines_with_a_bias_and_without(biased, asked):
    layer = nn.Conv2d(3, 8, 3, padding=1, bias=biased)
    equip(layer, Engines({KEYS["wgrad"]: Choice("eng3")}))(image())
    assert asked == [("aten", "aten", "eng3")]


def test_a_shape_for_which_none_was_chosen_is_run_by_pytorch(asked):
    model = equip(net(), Engines({KEYS["fprop"]: Choice("eng1")}))
    model(image()[:1])
    assert asked == []
    model(image())
    assert asked == [("eng1", "aten", "aten")]


@pytest.mark.parametrize("choice", ["c4:eng1", "bf16:eng1", "c8:bf16:eng1"])
def test_choices_that_need_other_weights_are_left_out(choice, asked):
    equip(net(), Engines({KEYS["fprop"]: read_choice(choice)}))(image())
    assert asked == []


def test_choices_that_fuse_more_than_the_bias_are_left_out(asked):
    fused = KEYS["fprop"].replace("bias", "bias_relu")
    equip(net(), Engines({fused: Choice("eng1")}))(image())
    assert asked == []


def test_gradients_leave_the_engines_where_another_precision_is_allowed_by_then(monkeypatch):
    from steadytorch.conv import operator

    ran, run = [], operator.grad_runner
    monkeypatch.setattr(
        operator, "grad_runner", lambda *given: ran.append(given[-1]) or run(*given)
    )
    layer = equip(nn.Conv2d(3, 5, 3), Engines({}))
    expected = gradients(layer, lambda: layer(image()))
    assert ran == [""]
    y = layer(image()).square().sum()
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    layer.zero_grad()
    conv.fp32_precision = "ieee"
    try:
        y.backward()
    finally:
        conv.fp32_precision = "tf32"
    assert ran == [""]
    torch.testing.assert_close([p.grad for p in layer.parameters()], expected)


class Odd(nn.Conv2d):
    """A subclass that may compute anything."""


@pytest.mark.parametrize(
    "layer",
    [
        Odd(3, 8, 3),
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 8, 2, padding="same"),
        nn.ConvTranspose2d(3, 8, 3),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)),
    ],
    ids=["subclass", "reflect", "uneven", "transposed", "parametrised"],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_layers_of_another_kind_are_left_alone(layer, asked):
    kind = type(layer)
    equip(layer, Engines({}))(image())
    assert type(layer) is kind
    assert asked == []


@pytest.mark.parametrize("given", [image()[0], image()[:0], image().double()])
def test_what_engines_do_not_take_is_run_by_pytorch(given, asked):
    own = nn.Conv2d(3, 8, 3, dtype=given.dtype)
    expected = own(given)
    torch.testing.assert_close(equip(own, Engines({}))(given), expected)
    assert asked == []


def test_what_pytorch_refuses_it_refuses_in_the_same_words():
    layer = equip(nn.Conv2d(3, 8, 3), Engines({}))
    with pytest.raises(RuntimeError, match="should be the same"):
        layer(image().bfloat16())


def test_the_recorder_notes_each_pass_that_a_step_takes():
    recorder, model = ProblemRecorder(), net()
    model.wide.requires_grad_(False)
    equip(model, recorder)(image())
    noted = [(p.operation, p.epilogue, *names) for p, names in recorder.found.items()]
    assert noted == [
        ("fprop", "bias", "stem"),
        ("wgrad", "none", "stem"),
        *((operation, "none", "mixed") for operation in ("fprop", "dgrad", "wgrad")),
        ("fprop", "bias", "wide"),
        ("dgrad", "none", "wide"),
    ]


def test_what_was_recorded_is_what_is_looked_up(asked):
    recorder, model = ProblemRecorder(), net(CHANNELS_LAST)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equip(copy.deepcopy(model), recorder)(image())
        choices = {problem.key: Choice(f"eng{n}") for n, problem in enumerate(recorder.found)}
        assert all(parse(key).number == "bf16" for key in choices)
        equip(model, Engines(choices))(image())
    assert asked == [("eng0", "aten", "eng1"), ("eng2", "eng3", "eng4"), ("eng5", "eng6", "eng7")]


def test_a_copy_of_a_model_reports_to_the_same_recorder():
    recorder = ProblemRecorder()
    copy.deepcopy(equip(net(), recorder))(image())
    assert len(recorder.found) == 8


def test_without_gradients_the_forward_pass_alone_is_noted():
    recorder = ProblemRecorder()
    with torch.no_grad():
        equip(net(), recorder)(image())
    assert {problem.operation for problem in recorder.found} == {"fprop"}


@pytest.mark.filterwarnings("ignore")
def test_sixteen_bits_pass_through_the_compiler_whole():
    model, x = equip(net(), Engines({})), image()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(call: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    expected = gradients(model, lambda: run(model))
    torch.testing.assert_close(gradients(model, lambda: run(compiled)), expected)
