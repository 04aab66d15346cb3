"""The programs compile for a GPU, without one: what they compute is tested with their operators."""

from __future__ import annotations

import pytest

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


def compiled(name, constants, element, capability):
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
        if argument in ("x", "y", "other", "bias")
        else "i32"
        for argument in program.arg_names
    }
    given = {(program.arg_names.index(key),): value for key, value in constants.items()}
    return compile(ASTSource(program, types, given), target=GPUTarget("cuda", capability, 32))


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
