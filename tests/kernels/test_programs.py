"""The kernels compile for a GPU, without one; their results are tested with the operators."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from steadytorch.kernels import depthwise_conv, small_channel_conv
from steadytorch.kernels.pointwise_tile import CORES, VECTOR, tile_for
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
ALL_ALIGNED = {(place,): [["tt.divisibility", 16]] for place in range(6)}
POINTWISE = [
    *((12544, 64, 16), (3136, 72, 24), (784, 240, 40), (49, 160, 672), (49, 160, 960)),
    *((802816, 96, 16), (200704, 24, 96), (200704, 144, 24), (50176, 40, 240), (3136, 320, 1152)),
]
"""Rows, outputs and channels, of a single image and of 64."""


def compiled(name, constants, element, capability, attributes=None, options=None):
    """Compile a kernel with Triton for a GPU of this compute capability."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from steadytorch.kernels import programs, separable_programs

    program = getattr(programs if hasattr(programs, name) else separable_programs, name)
    types = {
        argument: "constexpr"
        if argument in constants
        else f"*{element}"
        if argument in ("x", "y", "other", "bias", "weight", "gate")
        else "i32"
        for argument in program.arg_names
    }
    given = {(program.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(program, types, given, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stem(name, element, capability=90, kernel=7):
    """ResNet's stem, or one with a smaller kernel, in a configuration, with its shared memory."""
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


def pointwise(sizes, element="fp16", capability=90, gate="each", activation="hardswish"):
    """A pointwise convolution with everything around it, cut up as for such sizes."""
    rows, outputs, channels = sizes
    tile = tile_for(rows, outputs, channels, CORES)
    constants = {
        "ACTIVATION": activation,
        "BIASED": True,
        "GATE": gate,
        "ADDED": gate == "each",
        "OUTPUT_STEP": VECTOR,
        "CHANNEL_STEP": VECTOR,
        "EVEN": channels % tile.depth == 0,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    found = compiled("pointwise_conv", constants, element, capability, ALL_ALIGNED, options)
    return found, tile


@pytest.mark.parametrize("gate", ["", "one", "each"])
@pytest.mark.parametrize("sizes", POINTWISE, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_pointwise_convolution_runs_on_tensor_cores_without_spilling(sizes, gate, tmp_path):
    runs_on_tensor_cores(sizes, gate, "hardswish", tmp_path)


LINEARS = [(100352, 384, 96), (25088, 768, 192), (784, 768, 192), (50176, 256, 64)]
"""Rows, outputs and channels: of ConvNeXt's first layers, of a batch and of a single image."""


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", LINEARS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_so_does_a_linear_with_gelu(sizes, activation, tmp_path):
    ptx = runs_on_tensor_cores(sizes, "", activation, tmp_path)
    # Each thread's results side by side, and one exponential for each.
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    rows, outputs, channels = sizes
    tile = tile_for(rows, outputs, channels, CORES)
    assert ptx.count("ex2.approx") == tile.rows * tile.columns // (32 * tile.warps)


def runs_on_tensor_cores(sizes, gate, activation, tmp_path):
    """Compiles a product that spills nothing, and leaves room for another program; its PTX."""
    import triton

    found, tile = pointwise(sizes, gate=gate, activation=activation)
    ptx = found.asm["ptx"]
    assert ("wgmma.mma_async" if tile.rows >= 64 else "mma.sync") in ptx
    # At least two programs must fit on an SM.
    assert found.metadata.shared <= 113 << 10
    (tmp_path / "cubin").write_bytes(found.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not os.access(tool, os.X_OK):
        pytest.skip("this Triton brings no cuobjdump")
    said = subprocess.run(
        [tool, "-res-usage", tmp_path / "cubin"], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", said)[1]) for what in ("REG", "STACK"))
    assert stack == 0
    assert registers * tile.warps * 32 * 2 <= 65536
    return ptx


@pytest.mark.parametrize("sizes", POINTWISE, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_pointwise_convolution_loads_sixteen_bytes_at_a_time(sizes):
    ptx = pointwise(sizes, gate="")[0].asm["ptx"]
    sizes = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+)", ptx)
    assert sizes
    assert set(sizes) == {"0x10"}


@pytest.mark.parametrize("activation", ["relu", "relu6", "hardsigmoid", "hardswish"])
@pytest.mark.filterwarnings("ignore")
def test_a_pointwise_convolution_keeps_nan(activation):
    ptx = pointwise(POINTWISE[0], activation=activation)[0].asm["ptx"]
    assert "max.NaN.f32" in ptx


@pytest.mark.filterwarnings("ignore")
def test_a_pointwise_convolution_compiles_for_the_oldest_gpu():
    assert all(pointwise(sizes, "bf16", 80)[0].asm["cubin"] for sizes in POINTWISE[:6:5])


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


def depthwise(shape, side, stride, element, activation="hardswish"):
    """A depthwise convolution of such a square kernel, cut up as for an H200."""
    room, dtype = depthwise_conv, TYPES[element]
    kernel = torch.Size((shape[1], 1, side, side))
    like = (torch.Size(shape), True, kernel, (1, 1, side * shape[1], shape[1]))
    sizes = ((stride, stride), (side // 2, side // 2), (1, 1), activation)
    fused = room.prepared(*like, True, dtype, torch.device("meta"), *sizes)
    constants, options = {"G": fused.geometry}, {"num_warps": fused.warps}
    return compiled("depthwise_conv", constants, element, 90, ALIGNED, options), fused.geometry


def resources(found, tmp_path):
    """Registers of a thread, and bytes of its stack, all of them spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    file = tmp_path / "program.cubin"
    file.write_bytes(found.asm["cubin"])
    said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return [int(re.findall(rf"{what}:(\d+)", said.stdout)[0]) for what in ("REG", "STACK")]


@pytest.mark.parametrize(
    ("shape", "side", "stride", "element", "activation"),
    [
        ((64, 144, 56, 56), 5, 2, "fp16", "hardswish"),
        ((64, 480, 14, 14), 5, 1, "bf16", "hardswish"),
        ((1, 672, 14, 14), 3, 1, "fp16", "hardswish"),
        ((1, 960, 7, 7), 5, 1, "fp16", "hardswish"),
        ((32, 96, 56, 56), 7, 1, "fp16", ""),
        ((32, 24, 112, 112), 3, 2, "fp16", "hardswish"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_depthwise_convolution_keeps_everything_in_registers(
    shape, side, stride, element, activation, tmp_path
):
    found, geometry = depthwise(shape, side, stride, element, activation)
    loads = geometry.seen_rows * geometry.seen_columns + side**2 + 1
    ptx = found.asm["ptx"]
    assert found.metadata.shared == 0  # nothing is handed from thread to thread
    assert len(re.findall(r"ld\.global\.b32", ptx)) == len(re.findall(r"ld\.global", ptx)) == loads
    registers, stack = resources(found, tmp_path)
    assert (registers <= 128, stack) == (True, 0)


def thin(shape, outputs, side, stride, last, element="bf16", capability=90):
    """A convolution of few channels with such a square kernel, cut up as for an H200."""
    layout = torch.channels_last if last else torch.contiguous_format
    x, weight = (
        torch.empty(sizes, device="meta", memory_format=layout)
        for sizes in (shape, (outputs, shape[1], side, side))
    )
    like = (x.shape, x.stride(), weight.shape, weight.stride(), True, TYPES[element])
    sizes = ((stride, stride), (side // 2, side // 2), (1, 1), "hardswish")
    fused = small_channel_conv.prepared(*like, torch.device("meta"), *sizes)
    constants, options = {"G": fused.geometry}, {"num_warps": fused.warps}
    found = compiled("thin_conv", constants, element, capability, ALIGNED, options)
    return found, fused.geometry


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "outputs", "side", "stride"),
    [
        ((64, 3, 224, 224), 32, 3, 2),
        ((1, 3, 224, 224), 16, 3, 2),
        ((16, 3, 224, 224), 64, 3, 1),
        ((16, 3, 640, 640), 48, 6, 2),
        ((64, 1, 28, 28), 32, 5, 1),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_thin_convolution_has_taps_in_registers(shape, outputs, side, stride, last, tmp_path):
    found, geometry = thin(shape, outputs, side, stride, last)
    ptx = found.asm["ptx"]
    assert ("wgmma.mma_async" if geometry.rows >= 128 else "mma.sync") in ptx
    steps = -(-shape[1] * side**2 // geometry.depth)
    weights = steps * geometry.depth * geometry.columns // geometry.rows
    loads = steps * geometry.depth + weights + geometry.columns
    assert len(re.findall(r"ld\.global", ptx)) <= loads
    aligned = last or geometry.out_height * geometry.out_width % 8 == 0
    assert bool(re.search(r"st\.global\.v4\.b32", ptx)) is aligned
    if version("triton") >= "3.7":
        pytest.xfail("Triton 3.7 computes tap offsets in each thread, and may spill registers")
    if aligned:
        # A thread holds one pixel: it computes only the pixel's address; tap offsets are constants.
        assert len(re.findall(r"(?:mul|mad)\.\w+\.[su]32", ptx)) <= 24 + 8 * steps
    registers, stack = resources(found, tmp_path)
    assert (registers <= 128, stack) == (True, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_thin_convolution_compiles_for_the_oldest_gpu():
    assert thin((1, 3, 224, 224), 16, 3, 2, True, "fp16", 80)[0].asm["cubin"]
