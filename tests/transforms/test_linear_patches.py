from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.conv.module import engine_convolutions
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.base import Applicable, applied_in_order
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.cudnn_engines import CudnnEngines
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.transforms.linear_patches import (
    LinearPatches,
    PatchConv2d,
    PatchConv3d,
    conv_of_patches,
    patch_layers,
)
from steadytorch.workload.bundled.vit import VisionTransformer
from steadytorch.workload.workload import Workload

contract: Any = sys.modules["steadytorch_transforms_contract"]

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = ["NCHW", "NHWC"]
# One unit in the last place for 16-bit types, because libraries may round before they add the bias.
# Otherwise the rounding of a sum of a few hundred terms.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# shape of the images, of the weight
CASES = {
    "embedding": ((2, 3, 64, 64), (48, 3, 16, 16)),
    "downsampling": ((3, 24, 14, 14), (32, 24, 2, 2)),
    "one image, one patch": ((1, 3, 16, 16), (8, 3, 16, 16)),
    "something left over": ((2, 3, 19, 23), (8, 3, 4, 4)),
    "oblong": ((2, 5, 12, 11), (7, 5, 3, 2)),
    "lines": ((2, 5, 12, 11), (7, 5, 1, 4)),
    "grey": ((2, 1, 12, 12), (8, 1, 4, 4)),
    "one feature": ((2, 3, 12, 12), (1, 3, 4, 4)),
    "volumes": ((2, 3, 5, 12, 13), (8, 3, 2, 4, 4)),
}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    format = FORMATS[tensor.dim()] if layout == "NHWC" else torch.contiguous_format
    return tensor.contiguous(memory_format=format)


def operands(case: str, of_images: str, of_weight: str, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    shape, kernel = CASES[case]
    x, weight = (torch.randn(sizes, generator=generator).to(dtype) for sizes in (shape, kernel))
    bias = torch.randn(kernel[0], generator=generator).to(dtype)
    return laid_out(x, of_images), laid_out(weight, of_weight), bias


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return (F.conv2d if weight.dim() == 4 else F.conv3d)(x, weight, bias, weight.shape[2:])


def told(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides, ignoring the arbitrary strides of axes of length one."""
    return [(n, s if n > 1 else 0) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


STRANGE = {
    "one image whose channels lie innermost": lambda x: (
        x[:1].permute(0, 2, 3, 1).contiguous()[0].permute(2, 0, 1)[None]
    ),
    "spread over a batch": lambda x: laid_out(x[:1], "NHWC").expand(3, -1, -1, -1),
    "no batch, channels innermost": lambda x: laid_out(x[:1], "NHWC")[0],
    "one channel, taken for channels last": lambda x: laid_out(x[:, :1], "NHWC").as_strided(
        (2, 1, 12, 12), (144, 1, 12, 1)
    ),
    "one patch": lambda x: x[..., :4, :4].contiguous(),
}


@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("made", STRANGE.values(), ids=STRANGE)
def test_results_lie_as_the_convolutions_do_however_the_images_lie(made, of_weight):
    x = made(torch.randn(2, 3, 12, 12))
    weight = laid_out(torch.randn(8, x.shape[-3], 4, 4), of_weight)
    found, expected = conv_of_patches(x, weight, None), convolved(x, weight, None)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


every_layout = pytest.mark.parametrize(
    ("of_images", "of_weight"), [(one, other) for one in LAYOUTS for other in LAYOUTS]
)


# -- the operator --------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@every_layout
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_convolution_up_to_rounding(case, of_images, of_weight, dtype, biased):
    x, weight, bias = operands(case, of_images, of_weight, dtype)
    bias = bias if biased else None
    exact = convolved(x.double(), weight.double(), None if bias is None else bias.double())
    found = conv_of_patches(x, weight, bias)
    assert found.dtype == dtype
    assert error(found, exact) <= ROUNDING[dtype]


@every_layout
@pytest.mark.parametrize("case", CASES)
def test_results_lie_in_memory_as_those_of_the_convolution(case, of_images, of_weight):
    given = operands(case, of_images, of_weight)
    assert told(conv_of_patches(*given)) == told(convolved(*given))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :1].expand(-1, 3, -1, -1),
        lambda x: x.mT,
        lambda x: x[:, :, 1:, 1:],
        lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        lambda x: laid_out(x, "NHWC").mT,
        lambda x: laid_out(x, "NHWC")[:, :, 1:, 1:],
        lambda x: x[0],
        lambda x: x[:0],
    ],
    ids=[
        *("grey, spread", "transposed", "cut out", "rows inside", "transposed NHWC"),
        *("cut out of NHWC", "no batch", "no image"),
    ],
)
def test_images_may_be_views(view):
    x, weight, bias = operands("something left over", "NCHW", "NCHW")
    given = view(x), weight, bias
    found, expected = conv_of_patches(*given), convolved(*given)
    torch.testing.assert_close(found, expected)
    assert found.numel() == 0 or told(found) == told(expected)


class Copies(TorchDispatchMode):
    """Records the sizes of copies made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.found.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("of_images", "of_weight", "copied"),
    [
        ("NHWC", "NHWC", ["images"]),
        ("NCHW", "NCHW", ["images", "result"]),
        ("NHWC", "NCHW", ["images", "weight"]),
        ("NCHW", "NHWC", ["images", "weight"]),
    ],
)
def test_nothing_is_copied_but_images_where_layouts_agree_and_are_channels_last(
    of_images, of_weight, copied
):
    given = operands("embedding", of_images, of_weight)
    with torch.no_grad(), Copies() as copies:
        result = conv_of_patches(*given)
    sizes = {"images": given[0], "weight": given[1], "result": result}
    assert copies.found == [sizes[name].numel() for name in copied]


def test_autocast_casts_it_as_it_casts_a_convolution():
    given = operands("embedding", "NCHW", "NCHW")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = conv_of_patches(*given), convolved(*given)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


# -- the transform -------------------------------------------------------------------------------


TAKEN = {
    "embedding": nn.Conv2d(3, 8, 16, 16),
    "no bias": nn.Conv2d(3, 8, 2, 2, bias=False),
    "oblong": nn.Conv2d(3, 8, (4, 2), (4, 2)),
    "valid": nn.Conv2d(3, 8, 4, 4, padding="valid"),
    "no padding to mirror": nn.Conv2d(3, 8, 4, 4, padding_mode="reflect"),
    "volumes": nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)),
}
LEFT = {
    "overlapping": nn.Conv2d(3, 8, 7, 4),
    "apart": nn.Conv2d(3, 8, 2, 4),
    "pixels": nn.Conv2d(3, 8, 1, 1),
    "strided pixels": nn.Conv2d(3, 8, 1, 2),
    "padded": nn.Conv2d(3, 8, 4, 4, 1),
    "same": nn.Conv2d(3, 8, 1, 1, "same"),
    "dilated": nn.Conv2d(3, 8, 2, 2, dilation=2),
    "grouped": nn.Conv2d(4, 8, 2, 2, groups=2),
    "transposed": nn.ConvTranspose2d(3, 8, 2, 2),
    "one dimension": nn.Conv1d(3, 8, 4, 4),
    "parametrised": parametrizations.weight_norm(nn.Conv2d(3, 8, 4, 4)),
    "subclass": type("Own", (nn.Conv2d,), {})(3, 8, 4, 4),
    "lazy": nn.LazyConv2d(8, 4, 4),
}


@pytest.mark.parametrize("name", TAKEN)
def test_layers_over_patches_that_touch_are_taken(name):
    assert patch_layers(nn.Sequential(TAKEN[name])) == [TAKEN[name]]


@pytest.mark.parametrize("name", LEFT)
def test_other_layers_are_left_alone(name):
    assert patch_layers(nn.Sequential(LEFT[name])) == []


def test_it_is_for_inference_on_cuda_of_models_with_such_layers(cpu, gpu, on_gpu):
    there = on_gpu(nn.Sequential(nn.Conv2d(3, 8, 4, 4)))
    assert LinearPatches().applies_to(there, gpu) == Applicable()
    assert LinearPatches().applies_to(there, cpu).reason == "no CUDA device"
    other = on_gpu(nn.Sequential(nn.Conv2d(3, 8, 4, 2)))
    assert (
        "no convolution over non-overlapping patches"
        in LinearPatches().applies_to(other, gpu).reason
    )
    function = there.with_model(there.model.forward)
    assert "plain callable" in LinearPatches().applies_to(function, gpu).reason
    model = there.model.train()
    training = Workload.training(model, there.inputs, torch.sum, torch.optim.SGD)
    assert LinearPatches().applies_to(training, gpu).reason == "inference only"


def linear(model: nn.Module) -> list[str]:
    """Names of the layers that are matrix products."""
    kinds = (PatchConv2d, PatchConv3d)
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds)]


@pytest.fixture
def made() -> Workload:
    return contract.patch_workload()


def test_layers_keep_their_places_attributes_and_weights(made):
    with LinearPatches().applied(made) as changed:
        assert linear(changed.model) == ["stem", "down"]
        for name in ("stem", "down"):
            mine, own = (w.model.get_submodule(name) for w in (changed, made))
            assert isinstance(mine, nn.Conv2d)
            assert mine.weight is own.weight
            assert (mine.bias, mine.kernel_size) == (own.bias, own.kernel_size)
        assert changed.model.state_dict().keys() == made.model.state_dict().keys()
    assert linear(made.model) == []


def test_a_transformer_is_close_to_its_own_in_float64():
    torch.manual_seed(0)
    model = VisionTransformer(image=32, patch=8, layers=2, width=48, heads=4).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), LinearPatches().applied(Workload(model, x)) as changed:
        assert linear(changed.model) == ["patches"]
        exact = copy.deepcopy(model).double()(x.double())
        assert error(changed.model(x), exact) <= 1e-5


def test_one_weight_of_two_layers_stays_one():
    model = nn.Sequential(nn.Conv2d(3, 3, 2, 2), nn.Conv2d(3, 3, 2, 2)).eval()
    model[1].weight = model[0].weight
    made = Workload(model, torch.randn(2, 3, 8, 8))
    with torch.no_grad(), LinearPatches().applied(made) as changed:
        assert changed.model[0].weight is changed.model[1].weight
        torch.testing.assert_close(changed.model(*made.inputs), model(*made.inputs))


def test_weights_that_are_computed_at_each_call_are_read_at_each_call():
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(weight_norm(nn.Conv2d(3, 8, 4, 4))).eval()
    made = Workload(model, torch.randn(2, 3, 8, 8))
    with torch.no_grad(), LinearPatches().applied(made) as changed:
        assert linear(changed.model) == ["0"]
        for _ in range(2):
            torch.testing.assert_close(changed.model(*made.inputs), model(*made.inputs))
            model[0].weight_g.mul_(2)


def test_hooks_of_such_a_layer_see_and_replace_what_they_would(made):
    seen = []

    def double(layer, given, result):
        seen.append((layer.kernel_size, given[0], told(result)))
        return 2 * result

    made.model.stem.register_forward_hook(double)
    with torch.no_grad(), LinearPatches().applied(made) as changed:
        assert linear(changed.model) == ["stem", "down"]
        found, expected = (w.model(*made.inputs) for w in (changed, made))
    torch.testing.assert_close(found, expected)
    assert seen[0][0] == seen[1][0] == (4, 4)
    assert seen[0][1] is seen[1][1] is made.inputs[0]
    assert seen[0][2] == seen[1][2]


def test_engines_take_what_is_left(made):
    transforms = (ChannelsLast(), LinearPatches(), CudnnEngines())
    with torch.no_grad(), applied_in_order(transforms, made) as changed:
        assert [conv.label for conv in engine_convolutions(changed.model)] == ["mix"]
        targets = [node.target for node in changed.model.inner.graph.nodes]
        assert targets.count(conv_of_patches) == 2
        torch.testing.assert_close(changed.model(*made.inputs), made.model(*made.inputs))


def test_kernels_that_were_fused_before_stay():
    layers = nn.Conv2d(3, 8, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 2, 2)
    made = Workload(nn.Sequential(*layers).eval(), torch.randn(2, 3, 16, 16))
    with torch.no_grad(), applied_in_order((FusedKernels(), LinearPatches()), made) as changed:
        assert linear(changed.model) == ["0", "3"]
        assert any("relu_max_pool2d" in node.name for node in changed.model.graph.nodes)
        torch.testing.assert_close(changed.model(*made.inputs), made.model(*made.inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("freezing", [True, False])
def test_compiled_code_has_matrix_products_alone(made, freezing):
    from torch._dynamo.utils import counters

    from steadytorch.transforms import create

    counters.clear()
    compiled = create(TransformSpec("compile", (("mode", "default"), ("freezing", freezing))))
    model = nn.Sequential(made.model.stem, nn.GELU(), made.model.down)
    stack = (ChannelsLast(), LinearPatches(), compiled)
    with torch.no_grad(), applied_in_order(stack, made.with_model(model.eval())) as changed:
        found, expected = changed.model(*made.inputs), model(*made.inputs)
        torch.testing.assert_close(found, expected)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        with torch.profiler.profile() as seen:
            changed.model(*made.inputs)
    assert not any("conv" in event.name for event in seen.events())
