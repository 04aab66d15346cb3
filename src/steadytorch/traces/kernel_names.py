"""Classify GPU kernels by name, since libraries name kernels after their function."""

from __future__ import annotations

import re
from functools import lru_cache

_TENSOR_CORES = re.compile(
    # Shape of the matrix instruction, m16n8k16 as 16816, after the accumulator type.
    r"[shdizc](?:884|1688|8816|8832)(?![0-9])|168(?:08|16|32|64)|161616"
    r"|tensorop|wmma|hmma|imma|dmma|gmma|qmma|umma|utcmma|tcgen05|tf32|nvjet"
    r"|xmma_\w*(?:bf16|f16|e4m3|e5m2|i8)|flash_(?:fwd|bwd)|flashattn(?:fwd|bwd)|fmha|deep_gemm",
    re.IGNORECASE,
)
"""Name parts that show tensor cores: the list of Kineto's TensorBoard plug-in (`tb_plugin`,
tensor core kernels), CUTLASS's instruction names, and later libraries."""
_FP32_ATTENTION = re.compile(r"fmha_cutlass[FB]_f32|sm50_simt", re.IGNORECASE)
_SINGLE = re.compile(r"sgemm|scudnn|f32f32|ffma|simt|<float\b|fmha_cutlass[FB]_f32", re.IGNORECASE)
_PRODUCT = re.compile(
    r"gemm|gemv|conv(?!ert)|fprop|dgrad|wgrad|winograd|cutlass|xmma|nvjet"
    r"|scudnn|\d{3}cudnn|flash_(?:fwd|bwd)|fmha|sdpa",
    re.IGNORECASE,
)
_LAYOUT = re.compile(r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw", re.IGNORECASE)
_DOUBLE = re.compile(r"dgemm|_f64|f64f64|<double", re.IGNORECASE)
_ROCM = re.compile(
    r"^Cijk_|_mfma|_xdl|(?<!cutlass_\d\d)_wmma_|rocblas|hipblas|miopen|__amd_rocclr"
    r"|^igemm_\w+_gtc|\bck(?:_tile)?::",
    re.IGNORECASE,
)
"""Kernels of AMD's libraries, such as Tensile's `Cijk_*`, MIOpen's and Composable Kernel's `ck::`,
and kernels whose names contain a matrix instruction (`mfma`, `xdl`, `wmma`). CUTLASS names NVIDIA's
`wmma` instructions alike."""
_COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)


@lru_cache(maxsize=1 << 14)
def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel's name shows that it uses tensor cores; False if the name does not tell."""
    if _FP32_ATTENTION.search(name) or converts_layout(name):
        return False
    return _TENSOR_CORES.search(name) is not None


@lru_cache(maxsize=1 << 14)
def is_product(name: str) -> bool:
    """Whether a kernel's name shows a library's convolution, matrix product or attention."""
    # Triton's kernels are named after all their operators.
    if name.startswith("triton_") or converts_layout(name) or communicates(name):
        return False
    return _PRODUCT.search(name) is not None


def converts_layout(name: str) -> bool:
    """Whether a kernel's name shows a pure layout conversion between NCHW and NHWC."""
    return _LAYOUT.search(name) is not None


def is_double(name: str) -> bool:
    """Whether a kernel's name shows double precision."""
    return _DOUBLE.search(name) is not None


def is_single(name: str) -> bool:
    """Whether a kernel's name shows arithmetic in single precision; TF32's may look alike."""
    return _SINGLE.search(name) is not None


def is_of_rocm(name: str) -> bool:
    """Whether a kernel's name follows the conventions of AMD's ROCm libraries."""
    return _ROCM.search(name) is not None


def communicates(name: str) -> bool:
    """Whether a kernel's name shows a collective, whose time depends on the other devices."""
    return _COMMUNICATION.search(name) is not None


def is_generated(name: str) -> bool:
    """Whether Triton generated a kernel; the kernel's name then does not show tensor core use."""
    return name.startswith("triton_")


def short(name: str, length: int = 70) -> str:
    """Shorten a kernel's name for display: no return type, arguments or unprintable characters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for place, letter in enumerate(plain):
        depth += (letter == "<") - (letter == ">")
        # Arguments follow the name directly; in names of copies, " (" begins the direction.
        if letter == "(" and depth == 0 and plain[:place].strip() == plain[:place]:
            plain = plain[:place]
            break
    plain = plain.replace("at::native::", "")
    plain = "".join(letter if letter.isprintable() else "?" for letter in plain)
    return plain if len(plain) <= length else plain[: length - 3] + "..."
