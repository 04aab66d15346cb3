from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from steadytorch.transforms.base import Applicable
from steadytorch.transforms.channels_last import ChannelsLast, to_channels_last
from steadytorch.workload.workload import Workload


@pytest.mark.parametrize(
    ("conv", "shape", "layout"),
    [
        (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), torch.channels_last),
        (nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8), torch.channels_last),
        (nn.Conv3d(3, 4, 3), (2, 3, 4, 8, 8), torch.channels_last_3d),
    ],
    ids=["2d", "transposed", "3d"],
)
def test_weights_and_inputs_are_channels_last(conv, shape, layout):
    given, seen = torch.randn(shape), []
    with ChannelsLast().applied(Workload(nn.Sequential(conv).eval(), given)) as last:
        inner = last.model.inner[0]
        assert inner.weight.is_contiguous(memory_format=layout)
        inner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        last.model(*last.inputs)
        assert last.inputs[0] is given
    assert seen[0].is_contiguous(memory_format=layout)


class Windows(nn.Module):
    """Loses the layout, as attention over windows does."""

    def forward(self, x):
        return x.contiguous().view(*x.shape[:2], -1).mul(2).view(x.shape)


def seen_layouts(model, images):
    """Strides of the result of each layer."""
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: seen.append(out.stride()))
    with torch.no_grad():
        model(images)
    return seen


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older weight_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "normed",
    [
        lambda layer: layer,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
    ],
    ids=["plain", "weight norm", "spectral norm", "older weight norm"],
)
def test_layers_run_in_the_layouts_of_a_model_converted_by_hand(dtype, normed):
    def made():
        one, depthwise = normed(nn.Conv2d(3, 8, 1)), normed(nn.Conv2d(8, 8, 3, groups=8))
        pooled, squeezed = nn.AdaptiveAvgPool2d(2), nn.Conv2d(8, 4, 2)
        last = nn.Conv2d(4, 4, 1)
        layers = [Windows(), one, Windows(), depthwise, Windows(), pooled, squeezed, last]
        return nn.Sequential(*layers).to(dtype).eval()

    images = torch.randn(2, 3, 8, 8, dtype=dtype)
    with ChannelsLast().applied(Workload(made(), images)) as last:
        ours = seen_layouts(last.model.inner, images)
    by_hand = made().to(memory_format=torch.channels_last)
    assert ours == seen_layouts(by_hand, to_channels_last(images))
    assert ours != seen_layouts(made(), to_channels_last(images))


def test_weights_that_fit_both_layouts_are_reason_enough(cpu):
    model, images = nn.Conv2d(3, 4, 1), to_channels_last(torch.randn(2, 3, 8, 8))
    assert ChannelsLast().applies_to(Workload(model, images), cpu) == Applicable()
    model = model.to(memory_format=torch.channels_last)
    assert ChannelsLast().applies_to(Workload(model, images), cpu).reason == "already channels last"


def test_the_inner_model_sees_images_channels_last_whatever_it_is_given(conv_workload):
    seen = []
    with ChannelsLast().applied(conv_workload) as last:
        last.model.inner.stem.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        last.model(*conv_workload.inputs)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_other_weights_are_shared(conv_workload):
    with ChannelsLast().applied(conv_workload) as last:
        assert last.model.inner.head.weight is conv_workload.model.head.weight


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 3), torch.ones(1, 2, 2, 2, dtype=torch.int64)],
    ids=["matrix", "integers"],
)
def test_other_tensors_are_returned_as_they_are(tensor):
    assert to_channels_last(tensor) is tensor


def training(model, images):
    return Workload.training(model.train(), images, torch.sum, torch.optim.SGD)


@pytest.mark.parametrize("channels", [1, 3])
def test_training_runs_the_model_itself_channels_last(channels):
    model = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4))
    outputs, made = [], training(model, torch.randn(2, channels, 8, 8))
    strides = [p.stride() for p in model.parameters()]
    with ChannelsLast().applied(made) as last:
        model[0].register_forward_hook(lambda module, args, out: outputs.append(out))
        assert last.model.inner is model
        for given in (made.inputs, [to_channels_last(x) for x in made.inputs]):
            last.model(*given).sum().backward()
    assert all(out.is_contiguous(memory_format=torch.channels_last) for out in outputs)
    assert not any(out.is_contiguous() for out in outputs)
    assert [p.stride() for p in model.parameters()] == strides
    assert all(p.grad.is_contiguous() for p in model.parameters())


def test_what_trains_channels_last_already_is_refused(cpu):
    images = torch.randn(2, 3, 8, 8)
    plain, last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert ChannelsLast().applies_to(training(plain, images), cpu) == Applicable()
    for made in (training(plain, to_channels_last(images)), training(last, images)):
        assert ChannelsLast().applies_to(made, cpu).reason == "already channels last"


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 1, 1)], ids=["channel", "pixel"])
def test_images_that_are_both_are_not_channels_last_already(cpu, shape):
    images = torch.randn(*shape)
    assert images.is_contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(shape[1], 4, 1), nn.Conv2d(4, 4, 3, padding=1))
    assert ChannelsLast().applies_to(training(model, images), cpu) == Applicable()
    assert ChannelsLast().applies_to(Workload(model, images), cpu) == Applicable()


def test_training_on_what_is_no_image_is_refused(cpu):
    made = training(nn.Conv2d(1, 1, 1), torch.ones(2, 4))
    assert ChannelsLast().applies_to(made, cpu).reason == "the inputs contain no image"


def test_a_model_without_images_is_refused(cpu):
    answer = ChannelsLast().applies_to(Workload(nn.Conv1d(1, 1, 1), torch.ones(1, 1, 4)), cpu)
    assert answer.reason == "the model has no convolution over images or volumes"


def test_a_model_that_is_channels_last_already_is_refused(cpu, conv_workload):
    model = conv_workload.model.to(memory_format=torch.channels_last)
    images = to_channels_last(conv_workload.inputs[0])
    assert ChannelsLast().applies_to(Workload(model, images), cpu).reason == "already channels last"


def test_images_that_are_not_are_reason_enough(cpu, conv_workload):
    model = conv_workload.model.to(memory_format=torch.channels_last)
    made = Workload(model, conv_workload.inputs)
    assert ChannelsLast().applies_to(made, cpu) == Applicable()
