"""Convolutions over patches as matrix products on a GPU: equal, laid out alike, and products."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from steadytorch.device.facts import DeviceFacts
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import create, order
from steadytorch.transforms.base import Applicable, applied_in_order
from steadytorch.transforms.linear_patches import LinearPatches, conv_of_patches
from steadytorch.workload.bundled.vit import VisionTransformer
from steadytorch.workload.workload import Workload

contract: Any = sys.modules["steadytorch_transforms_contract"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("ieee"),
]

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = ["NCHW", "NHWC"]
# A unit in the last place of the 16-bit types, and what a sum of 768 terms comes to in float32.
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# shape of the images, of the weight
CASES = {
    "ViT-B/16": ((8, 3, 224, 224), (768, 3, 16, 16)),
    "ViT-B/16, one image": ((1, 3, 224, 224), (768, 3, 16, 16)),
    "ConvNeXt's stem": ((8, 3, 224, 224), (96, 3, 4, 4)),
    "ConvNeXt's downsampling": ((8, 192, 28, 28), (384, 192, 2, 2)),
    "something left over": ((3, 5, 29, 31), (7, 5, 4, 3)),
    "volumes": ((2, 3, 8, 56, 56), (192, 3, 2, 14, 14)),
}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    format = FORMATS[tensor.dim()] if layout == "NHWC" else torch.contiguous_format
    return tensor.contiguous(memory_format=format)


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (F.conv2d if weight.dim() == 4 else F.conv3d)(x, weight, bias, weight.shape[2:])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_images", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_convolution_and_lies_in_memory_alike(case, of_images, of_weight, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shape, kernel = CASES[case]
    x, weight, bias = (
        torch.randn(sizes, device="cuda", generator=generator).to(dtype)
        for sizes in (shape, kernel, kernel[:1])
    )
    given = laid_out(x, of_images), laid_out(weight, of_weight), bias
    found, expected = conv_of_patches(*given), convolved(*given)
    exact = convolved(x.double(), weight.double(), bias.double())
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= ROUNDING[dtype]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.stride() == expected.stride()


def vit() -> Workload:
    torch.manual_seed(0)
    model = VisionTransformer(image=64, patch=16, layers=2, width=192, heads=3).eval()
    return Workload(model, torch.randn(4, 3, 64, 64)).to("cuda")


class Downsampling(nn.Module):
    """The layers of ConvNeXt that are patches, with its norms in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 96, 4, 4), nn.Conv2d(96, 192, 2, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(96), nn.LayerNorm(192)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip((self.stem, self.down), self.norms, strict=True):
            x = norm(layer(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x.mean((2, 3))


def convnext() -> Workload:
    torch.manual_seed(0)
    return Workload(Downsampling().eval(), torch.randn(4, 3, 64, 64)).to("cuda")


RECORDED = TransformSpec("cuda_graph")
FROZEN = TransformSpec("compile", (("mode", "default"), ("freezing", True)))
PLAIN = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
LAST, HALF = TransformSpec("channels_last"), TransformSpec("cast_weights", (("dtype", "bf16"),))
STACKS = {
    "recorded": (RECORDED,),
    "recorded, 16 bits": (HALF, LAST, RECORDED),
    "frozen": (FROZEN, RECORDED),
    "frozen, 16 bits": (HALF, LAST, FROZEN, RECORDED),
    "frozen, 16 bits, NCHW": (HALF, FROZEN, RECORDED),
    "compiled, 16 bits": (HALF, LAST, PLAIN, RECORDED),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("make", [vit, convnext])
def test_models_of_patches_run_no_convolution_and_agree(
    make: Any, stack: str, facts: DeviceFacts
) -> None:
    made = make()
    assert LinearPatches().applies_to(made, facts) == Applicable()
    specs = order([*STACKS[stack], LinearPatches().spec])
    with torch.no_grad():
        expected = copy.deepcopy(made.model).double()(made.inputs[0].double())
        with applied_in_order([create(spec) for spec in specs], made) as changed:
            changed.model(*made.inputs)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                found = changed.model(*made.inputs)
                torch.cuda.synchronize()
            # Attention of cuDNN is named as convolutions are.
            names = [event.name for event in seen.events() if "sdpa" not in event.name]
            assert names
            assert not [name for name in names if re.search(r"fprop|implicit|conv(?!ert)", name)]
            error = (found.double() - expected).norm() / expected.norm()
    assert error <= contract.TOLERANCE["bf16" if HALF in specs else "same"]
