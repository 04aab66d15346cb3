"""The programs compile for a GPU, without one: what they compute is tested with their operators."""

from __future__ import annotations

import re

import pytest
import torch

from steadytorch.kernels.stem import CONFIGS, geometry_of, shared_bytes

pytest.importorskip("triton", reason="compiling the programs needs Triton: not installed")

WINDOW = {
    **dict.fromkeys(("KERNEL_H", "KERNEL_W"), 3),
    **dict.fromkeys(("STRIDE_H", "STRIDE_W"), 2),
    **dict.fromkeys(("PADDING_H", "PADDING_W", "DILATION_H", "DILATION_W"), 1),
    "CLIPPED": True,
    "ROWS": 8,
    "COLUMNS": 128,
}
CASES = [
    ("relu_max_pool", {**WINDOW, "READ": read, "UNROLLED": unrolled})
    for read in ("last", "pairs", "single")
    for unrolled in (False, True)
]
CASES.append(("bias_add_relu", {"CHANNELS": 64, "INNER": 49, "BIASED": True, "BLOCK": 1024}))


TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Tensors of PyTorch begin at multiples of 16 bytes, and more.
ALIGNED = {(place,): [["tt.divisibility", 16]] for place in range(4)}


def compiled(name, constants, element, capability, attributes=None, options=None):
    """What Triton makes of a program for a GPU of this compute capability."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from steadytorch.kernels import programs

    program = getattr(programs, name)
    types = {
        argument: "constexpr"
        if argument in constants
        else f"*{element}"
        if argument in ("x", "y", "other", "bias", "weight")
        else "i32"
        for argument in program.arg_names
    }
    given = {(program.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(program, types, given, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stem(name, element, capability=90, kernel=7):
    """ResNet's stem, or one with a smaller kernel, in a configuration; and what it may use."""
    dtype, config = TYPES[element], CONFIGS[name]
    x, weight = (
        torch.empty(shape, dtype=dtype, device="meta", memory_format=torch.channels_last)
        for shape in ((64, 3, 224, 224), (64, 3, kernel, kernel))
    )
    precision = "tf32" if element == "fp32" else "ieee"
    padding = (kernel // 2, kernel // 2)
    geometry = geometry_of(x, weight, (2, 2), padding, 1, False, precision, True)
    options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
    constants = {"G": geometry.cut_up(config)}
    found = compiled("conv_relu_max_pool", constants, element, capability, ALIGNED, options)
    return found, shared_bytes(geometry, config, dtype)


@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "constants"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
@pytest.mark.filterwarnings("ignore")
def test_they_compile_to_a_maximum_that_keeps_nan(name, constants, element):
    assert "max.NaN.f32" in compiled(name, constants, element, 90).asm["ptx"]


@pytest.mark.filterwarnings("ignore")
def test_they_compile_for_the_oldest_gpu_that_the_transform_takes():
    assert compiled(*CASES[0], "bf16", 80).asm["cubin"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_a_stem_needs_no_more_of_the_chip_than_is_reckoned_with(name):
    found, expected = stem(name, "fp16", kernel=3)
    assert expected / 3 <= found.metadata.shared <= expected


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_stem_runs_on_tensor_cores_and_keeps_nan(element):
    ptx = stem("64x32x7-w4s1", element)[0].asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "max.NaN.f32" in ptx


@pytest.mark.parametrize("name", ["64x32x7-w4s1", "64x32x7-w4s2"])
@pytest.mark.filterwarnings("ignore")
def test_pixels_are_loaded_eight_bytes_at_a_time(name):
    ptx = stem(name, "fp16")[0].asm["ptx"]
    assert re.search(
        r"ld\.global\.v2\.b32|cp\.async\.ca\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x8", ptx
    )


@pytest.mark.filterwarnings("ignore")
def test_a_stem_compiles_for_the_oldest_gpu_of_the_operator():
    assert stem("64x32x1-w4s1", "bf16", 80, kernel=3)[0].asm["cubin"]
