from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import pytest
import torch
from torch import Tensor, fx, nn

from steadytorch.errors import UsageError
from steadytorch.workload import bundled
from steadytorch.workload.bundled.transformer import SelfAttention

Layer = TypeVar("Layer", bound=nn.Module)

NAMES = bundled.names()
RESNETS = ("resnet18", "resnet50")
OUTPUT_SHAPES = {
    "resnet18": (2, 1000),
    "resnet50": (2, 1000),
    "mobilenet_v3_large": (2, 1000),
    "vit_b_16": (2, 1000),
    "unet": (2, 2, 388, 388),
    "gpt2": (2, 256, 50257),
}


def unet_parameters() -> int:
    def double_convolution(inputs: int, outputs: int) -> int:
        return (9 * inputs * outputs + outputs) + (9 * outputs * outputs + outputs)

    contracting = sum(
        double_convolution(inputs, outputs)
        for inputs, outputs in ((1, 64), (64, 128), (128, 256), (256, 512), (512, 1024))
    )
    expanding = sum(
        (4 * 2 * width * width + width) + double_convolution(2 * width, width)
        for width in (512, 256, 128, 64)
    )
    return contracting + expanding + (64 * 2 + 2)


PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v3_large": 5_483_032,
    "vit_b_16": 86_567_656,
    "unet": unet_parameters(),
    "gpt2": 124_439_808,
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build_on_meta(name: str) -> nn.Module:
    """The architecture without weights, for tests of shapes."""
    with torch.device("meta"):
        return bundled.build(name)


def meta_inputs(name: str) -> tuple[Tensor, ...]:
    return tuple(x.to("meta") for x in bundled.example_inputs(name, 2, generator()))


def small_inputs(name: str, seed: int = 0) -> Tensor:
    """The smallest inputs that reach every layer, for fast tests on a CPU."""
    (inputs,) = bundled.example_inputs(name, 2, generator(seed))
    if name == "gpt2":
        return inputs[:, :16]
    side = {"vit_b_16": 224, "unet": 188}.get(name, 64)
    return inputs[..., :side, :side]


def layers_of(model: nn.Module, kind: type[Layer]) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, kind)]


def build_seeded(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return bundled.build(name)


@pytest.fixture(scope="module")
def built() -> Callable[[str], nn.Module]:
    """Models with seed 0, each built once, since drawing weights takes seconds."""
    return cache(build_seeded)


@pytest.fixture(params=NAMES)
def seeded(request: pytest.FixtureRequest, built) -> tuple[str, nn.Module]:
    return request.param, built(request.param)


def test_names_lists_the_architectures_in_order():
    assert NAMES == ("resnet18", "resnet50", "mobilenet_v3_large", "vit_b_16", "unet", "gpt2")


def test_listing_the_names_does_not_import_torch():
    code = (
        "import sys; from steadytorch.workload import bundled; bundled.names(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_build_of_an_unknown_name_raises_key_error():
    with pytest.raises(KeyError, match="resnet51"):
        bundled.build("resnet51")


def test_example_inputs_of_an_unknown_name_raise_key_error():
    with pytest.raises(KeyError, match="resnet51"):
        bundled.example_inputs("resnet51", 1, generator())


@pytest.mark.parametrize("batch", [0, -3])
def test_example_inputs_refuse_an_empty_batch(batch):
    with pytest.raises(UsageError, match=f"at least 1, got {batch}"):
        bundled.example_inputs("resnet18", batch, generator())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2"])
def test_image_inputs_are_standard_normal(name):
    (images,) = bundled.example_inputs(name, 2, generator())
    assert images.shape == ((2, 1, 572, 572) if name == "unet" else (2, 3, 224, 224))
    assert images.dtype == torch.float32
    assert abs(images.mean().item()) < 0.01
    assert abs(images.std().item() - 1) < 0.01


def test_token_inputs_span_the_vocabulary():
    (ids,) = bundled.example_inputs("gpt2", 64, generator())
    assert (ids.shape, ids.dtype) == ((64, 256), torch.int64)
    assert 0 <= ids.min() < 100
    assert 50157 < ids.max() < 50257


@pytest.mark.parametrize("name", NAMES)
def test_example_inputs_follow_their_generator(name):
    (first,) = bundled.example_inputs(name, 1, generator(3))
    (again,) = bundled.example_inputs(name, 1, generator(3))
    (other,) = bundled.example_inputs(name, 1, generator(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count_is_the_published_one(name):
    model = build_on_meta(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_output_shape(name):
    assert build_on_meta(name)(*meta_inputs(name)).shape == OUTPUT_SHAPES[name]


@pytest.mark.parametrize("name", NAMES)
def test_symbolic_trace_keeps_the_output_shape(name):
    traced = fx.symbolic_trace(build_on_meta(name))
    assert traced(*meta_inputs(name)).shape == OUTPUT_SHAPES[name]


@pytest.mark.sampled(every=6)
def test_models_come_in_eval_mode(seeded):
    _, model = seeded
    assert not any(module.training for module in model.modules())


@pytest.mark.sampled(every=6)
def test_the_same_seed_gives_the_same_weights(seeded):
    name, model = seeded
    again = build_seeded(name).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())


@pytest.mark.sampled(every=6)
def test_another_seed_gives_other_weights(seeded):
    name, model = seeded
    other = build_seeded(name, seed=1)
    matrices = [
        (ours, theirs)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True)
        if ours.dim() > 1
    ]
    assert matrices
    assert not any(torch.equal(ours, theirs) for ours, theirs in matrices)


@torch.inference_mode()
@pytest.mark.sampled(every=6)
def test_outputs_are_finite(seeded):
    name, model = seeded
    assert torch.isfinite(model(small_inputs(name))).all()


@torch.inference_mode()
@pytest.mark.sampled(every=6)
def test_outputs_are_of_a_size_that_half_precision_can_hold(seeded):
    name, model = seeded
    output = model(small_inputs(name))
    lost = output - output.half().float()
    assert lost.norm() < torch.finfo(torch.float16).eps * output.norm()


@torch.inference_mode()
@pytest.mark.sampled(every=6)
def test_outputs_depend_on_the_inputs(seeded):
    name, model = seeded
    first, second = model(small_inputs(name, seed=0)), model(small_inputs(name, seed=1))
    assert (first - second).norm() > 0.05 * first.norm()


@pytest.mark.sampled(every=6)
def test_training_reaches_every_parameter(seeded):
    name, model = seeded
    trained = copy.deepcopy(model).train()
    trained(small_inputs(name)).square().mean().backward()
    for parameter in trained.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.count_nonzero() > 0


@pytest.mark.sampled(every=6)
def test_the_whole_model_is_one_graph(seeded):
    name, model = seeded
    torch.compiler.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    inputs = small_inputs(name)
    with torch.inference_mode():
        torch.testing.assert_close(whole(inputs), model(inputs))


def test_resnet50_strides_in_the_3x3():
    convolutions = layers_of(build_on_meta("resnet50"), nn.Conv2d)
    strided = [layer.kernel_size for layer in convolutions if layer.stride == (2, 2)]
    # The stem, then per later stage a 3x3 in the branch and a 1x1 in the shortcut.
    assert strided == [(7, 7)] + 3 * [(3, 3), (1, 1)]


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_convolutions_are_he_normal_over_the_outputs(built, name):
    convolutions = layers_of(built(name), nn.Conv2d)
    for layer in convolutions:
        expected = (2 / (layer.out_channels * layer.weight[0, 0].numel())) ** 0.5
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.05)


def test_mobilenet_normalisation_and_dropout_are_those_of_the_paper():
    model = build_on_meta("mobilenet_v3_large")
    norms = layers_of(model, nn.BatchNorm2d)
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}
    assert [layer.p for layer in layers_of(model, nn.Dropout)] == [0.2]


def test_vit_weights_stay_within_two_deviations(built):
    for layer in layers_of(built("vit_b_16"), nn.Linear):
        assert layer.weight.abs().max().item() <= 0.04 * (1 + 1e-6)
        # The deviation of a standard normal cut off at +-2 is 0.8796.
        assert layer.weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.01)


def test_vit_layer_norms_use_the_published_epsilon():
    norms = layers_of(build_on_meta("vit_b_16"), nn.LayerNorm)
    assert [norm.eps for norm in norms] == 25 * [1e-6]


def test_unet_maps_have_the_sizes_of_the_figure():
    model = build_on_meta("unet")
    shapes: list[tuple[int, ...]] = []
    convolutions = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) and layer.kernel_size != (1, 1)
    ]
    for layer in convolutions:
        layer.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:3])))
    model(*meta_inputs("unet"))
    assert shapes == [
        *((64, 570), (64, 568)),
        *((128, 282), (128, 280)),
        *((256, 138), (256, 136)),
        *((512, 66), (512, 64)),
        *((1024, 30), (1024, 28)),
        *((512, 56), (512, 54), (512, 52)),
        *((256, 104), (256, 102), (256, 100)),
        *((128, 200), (128, 198), (128, 196)),
        *((64, 392), (64, 390), (64, 388)),
    ]


@torch.inference_mode()
def test_unet_crops_the_middle_of_each_skip(built):
    model = built("unet")
    images = small_inputs("unet")
    # With mirrored kernels, a mirrored image must give mirrored scores; an off-centre crop would
    # shift them.
    mirrored = copy.deepcopy(model)
    for layer in mirrored.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            layer.weight.copy_(layer.weight.flip(2, 3))
    torch.testing.assert_close(
        mirrored(images.flip(2, 3)), model(images).flip(2, 3), rtol=1e-4, atol=1e-3
    )


def test_unet_drops_out_only_at_the_end_of_the_contracting_path():
    model = build_on_meta("unet")
    rates = [[layer.p for layer in layers_of(level, nn.Dropout)] for level in model.children()]
    assert rates == [[0.5, 0.5], [], [], []]


def test_gpt2_head_stays_tied_in_a_copy():
    model = copy.deepcopy(build_on_meta("gpt2"))
    weights = model.state_dict(keep_vars=True)
    assert weights["head.weight"] is weights["tokens.weight"]


def test_gpt2_drops_out_the_embedding_the_attention_and_each_branch():
    model = build_on_meta("gpt2")
    assert [layer.p for layer in layers_of(model, nn.Dropout)] == (1 + 2 * 12) * [0.1]
    assert [layer.dropout for layer in layers_of(model, SelfAttention)] == 12 * [0.1]


def test_gpt2_residual_projections_start_smaller(built):
    deviations = {
        name: parameter.std().item()
        for name, parameter in built("gpt2").named_parameters()
        if parameter.dim() > 1
    }
    scaled = [deviation for deviation in deviations.values() if deviation < 0.01]
    others = [deviation for deviation in deviations.values() if deviation >= 0.01]
    assert scaled == pytest.approx(24 * [0.02 / 24**0.5], rel=0.01)
    assert others == pytest.approx((2 + 24) * [0.02], rel=0.01)


@torch.inference_mode()
def test_gpt2_tokens_do_not_see_later_ones(built):
    model = built("gpt2")
    ids = small_inputs("gpt2")
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50257
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])
