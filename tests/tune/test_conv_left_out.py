from __future__ import annotations

import pytest
import torch
from msgspec import convert
from torch import Tensor, nn

from steadytorch.tune.conv import (
    ConvReport,
)
from steadytorch.workload.workload import Workload

from .choosing import chooser, loaded


@pytest.fixture
def handler(monkeypatch, tmp_path):
    return chooser(monkeypatch, tmp_path)


class Several(nn.Module):
    """Convolutions of many kinds, only one of which engines support; `dtype` is that of `other`."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype
        self.plain = nn.Conv2d(3, 4, 3)
        self.reflect = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.uneven = nn.Conv2d(4, 4, 2, padding="same")
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.up_again = nn.ConvTranspose2d(4, 4, 2)
        self.other = nn.Conv1d(4, 4, 1, bias=False)
        self.other.weight = nn.Parameter(torch.ones(4, 4, 1).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up_again(self.up(self.uneven(self.reflect(self.plain(x)))))
        z = y.mean(-1) + self.plain(x)[0].mean(-1)[:, :1]
        return self.other(z.to(self.dtype)).to(x.dtype)


OF_LAYERS = {
    ("reflect",): "padding_mode 'reflect': engines pad with zeros",
    ("uneven",): "different padding on the two sides of a dimension",
    ("up", "up_again"): "a ConvTranspose2d: engines are for Conv1d, Conv2d and Conv3d",
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.usefixtures("handler")
def test_convolutions_that_no_engine_can_run_are_named_with_the_reason(training, tmp_path):
    model, inputs = Several(torch.int32), torch.randn(2, 3, 8, 8)
    given = Workload(model.eval(), inputs)
    if training:
        optimizer = torch.optim.SGD([model.plain.weight], lr=0.1)
        given = Workload.training(model.train(), inputs, torch.Tensor.sum, optimizer)
    answer = loaded(given, tmp_path).choose([], 60.0, {}, {})
    report = convert(answer, ConvReport)
    assert {name for layer in report.layers for name in layer.names} == {"plain"}
    found = {left.names: left.reason for left in report.left_out}
    assert "no engines for torch.int32" in found.pop(("other",))
    assert found == OF_LAYERS


class Called(nn.Module):
    """Convolutions that are called in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.unbatched, self.hooked = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.hooked.register_forward_hook(kept)

    def forward(self, x: Tensor) -> Tensor:
        called = nn.functional.conv2d(x, self.hooked.weight)
        return self.unbatched(x[0]) + self.hooked(x) + called


def kept(module: nn.Module, inputs: object, output: Tensor) -> None:
    return None


@pytest.mark.usefixtures("handler")
def test_where_nothing_can_be_chosen_every_convolution_is_named(tmp_path):
    given = Workload(Called().eval(), torch.randn(2, 3, 8, 8))
    report = convert(loaded(given, tmp_path).choose([], 60.0, {}, {}), ConvReport)
    assert report.layers == ()
    assert {left.names: left.reason for left in report.left_out} == {
        ("unbatched",): "an input of 3 dimensions: engines need 4",
        ("hooked",): "a hook",
        ("conv2d",): "a call of a function: engines are for layers",
    }


def test_where_engines_can_run_all_none_is_left_out(handler):
    assert convert(handler.choose([], 60.0, {}, {}), ConvReport).left_out == ()
