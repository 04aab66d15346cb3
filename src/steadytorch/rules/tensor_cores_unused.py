"""Find matrix products that could use tensor cores but do not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from steadytorch.findings.figures import percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, PROFILE, gpu_launches, longest, spent_per_step
from steadytorch.findings.optimizer_steps import is_training
from steadytorch.rates.device_rates import Rates
from steadytorch.rates.launches import Launches, operators_of
from steadytorch.rates.operator_work import MATRIX
from steadytorch.rates.products import UNCOUNTED
from steadytorch.traces.events import Category
from steadytorch.traces.evidence import by_name
from steadytorch.traces.kernel_names import (
    is_double,
    is_generated,
    is_of_rocm,
    is_product,
    is_single,
    uses_tensor_cores,
)
from steadytorch.traces.operands import DTYPES, NotRecordedError, Operands
from steadytorch.traces.steps import CALLS

NAME = "tensor-cores-unused"
WITH_TENSOR_CORES = (7, 0)
WITH_TF32 = WITH_BFLOAT16 = (8, 0)
"""Minimum compute capabilities (CUDA C++ Programming Guide, "Compute capabilities", technical
specifications)."""
LEAST_SHARE = 0.1
"""Minimum share of kernel time in products without tensor cores, if other kernels use them."""
LEAST_SHARE_OF_NONE = 0.02
"""The same if no kernel uses them."""
SPEED_UP = 8.0
"""Assumed maximum speed-up by tensor cores if rates were not measured: V100 125 against 15.7
TFLOP/s, A100 156 (TF32) against 19.5 (NVIDIA's white papers of these architectures)."""
MULTIPLE = 8
"""Sizes in 16 bits for which all libraries have tensor core kernels are multiples of this
(NVIDIA Deep Learning Performance, "Matrix multiplication background", tensor core requirements)."""

ELIGIBLE = (MATRIX | UNCOUNTED) - {
    *("aten::mv", "aten::addmv", "aten::dot"),
    *("aten::_int_mm", "aten::_scaled_mm"),  # exist for tensor cores
}
_NO_PRODUCT_OF_MATRICES = re.compile(
    r"gemv|depthwise|dwconv|dot_kernel|splitKreduce", re.IGNORECASE
)


def rule(case: Case) -> Verdict:
    """Report convolutions, matrix products and attention whose kernels use no tensor cores.

    Kineto's TensorBoard plug-in (`tb_plugin`) gives the same advice from compute capability 7.0 on
    if eligible operators run and none uses tensor cores. Further sources: "Use tensor cores",
    PyTorch Performance Tuning Guide; "TF32", PyTorch notes on CUDA semantics.
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    if _is_of_amd(seen):
        return Abstention(
            NAME, "the trace is of an AMD GPU, whose kernels it does not know", PROFILE
        )
    capability = capability_of(case)
    if capability is None:
        return Abstention(NAME, "the trace does not name its GPU", PROFILE)
    if capability < WITH_TENSOR_CORES:
        return ()
    products = _products(seen)
    busy = max(1, spent_per_step(seen, seen.of(Category.KERNEL)))
    cost, used = spent_per_step(seen, products.unused), spent_per_step(seen, products.using)
    least = (LEAST_SHARE if used else LEAST_SHARE_OF_NONE) * busy
    if cost <= least:
        return _UNTOLD if spent_per_step(seen, products.untold) > least else ()
    could = spent_per_step(seen, products.eligible)
    in_single = cost - spent_per_step(seen, products.unused & products.half)
    single, odd = in_single > cost / 2, _odd_sizes(products)
    fix = _PAD if odd else _UNEXPLAINED
    training = is_training(case)
    hi = round(cost * (1 - 1 / _speed_up(case.rates)))
    shares = percent(cost / busy)
    return (
        Finding(
            id=NAME,
            source="compiler",
            title="convolutions, matrix products and attention without tensor cores take "
            f"{shares} of kernel time",
            evidence=(
                *map(str, longest(seen, products.unused)),
                f"operators that could use tensor cores take {percent(could / busy)} of kernel "
                f"time, kernels that use them {percent(used / busy)}",
                *_reasons(odd, in_single / max(1, cost), capability),
            ),
            slices=("gpu_kernel",),
            cost_ns=cost,
            recoverable_ns=(0, hi),
            confidence="low" if not (single or odd) else "medium" if used else "high",
            fix=_fix(capability, training) if single else fix,
            transforms=_transforms(capability, training) if single else (),
            check=CHECK,
            false_alarm="results need float32 precision, or libraries use tensor cores in "
            "kernels whose names do not show it.",
        ),
    )


_UNTOLD = Abstention(
    NAME,
    "neither operators nor kernel names show the precision of most products",
    "profile without CUDA graphs, with ProfilerActivity.CPU and record_shapes=True",
)


def _is_of_amd(seen: Launches) -> bool:
    """Whether the GPU is AMD's by its name; without a name, by its calls and kernels."""
    names = [str(device["name"]) for device in seen.trace.devices if device.get("name")]
    if names:
        return any(vendor in name for name in names for vendor in ("AMD", "Radeon", "Instinct"))
    return bool(len(by_name(seen.trace, CALLS, r"hip[A-Z]\w*")) or seen.named(is_of_rocm).any())


def capability_of(case: Case) -> tuple[int, int] | None:
    """Compute capability of the GPU from the trace, else from device facts; None if unknown."""
    wanted = case.ledger.device if case.ledger else 0
    devices = case.trace.devices if case.trace else ()
    for device in sorted(devices, key=lambda one: one.get("id") != wanted):
        major, minor = device.get("computeMajor"), device.get("computeMinor", 0)
        if isinstance(major, int) and isinstance(minor, int):
            return major, minor
    told = case.facts.compute_capability if case.facts else None
    if told is None:
        return None
    major, _, minor = told.partition(".")
    return int(major), int(minor or 0)


@dataclass(frozen=True, eq=False)
class _Products:
    """Kernels of matrix products, convolutions and attention: masks of shape (launches,).

    Attributes:
        seen: all launches.
        eligible: kernels of operators that could use tensor cores.
        using: those that use them.
        unused: those that could but do not.
        untold: those whose precision neither their inputs nor their names show.
        half: those with inputs in 16 bits.
        owner: row of each kernel's operator; -1 if unknown.
    """

    seen: Launches
    eligible: np.ndarray
    using: np.ndarray
    unused: np.ndarray
    untold: np.ndarray
    half: np.ndarray
    owner: np.ndarray


def _products(seen: Launches) -> _Products:
    operators = operators_of(seen.trace)
    nearest = operators.nearest(operators.named(ELIGIBLE))
    owner = np.where(seen.operator >= 0, nearest[seen.operator], -1)
    alone = (seen.operator < 0) & seen.named(is_product)
    eligible = seen.of(Category.KERNEL) & ((owner >= 0) | alone)
    using = eligible & seen.named(uses_tensor_cores)
    unused = eligible & ~_of_same(owner, using) & _could(seen)
    kinds = _element_types(seen, np.where(unused, owner, -1))
    unused &= kinds != "float64"
    untold = unused & (kinds == "") & ~seen.named(is_single)
    half = np.isin(kinds, ("float16", "bfloat16"))
    return _Products(seen, eligible, using, unused & ~untold, untold, half, owner)


def _of_same(owner: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Mask of the chosen kernels and all other kernels of the same operators."""
    return chosen | np.isin(owner, np.unique(owner[chosen & (owner >= 0)]))


def _could(seen: Launches) -> np.ndarray:
    """Mask of kernels that tensor cores might speed up, judged by kernel name."""
    neither = seen.named(lambda name: is_generated(name) or is_double(name))
    return ~neither & ~seen.named(lambda name: _NO_PRODUCT_OF_MATRICES.search(name) is not None)


def _element_types(seen: Launches, owner: np.ndarray) -> np.ndarray:
    """Element type of each operator's first floating-point input; empty if unknown."""
    found = np.full(len(owner), "", dtype="<U10")
    inputs = np.where(owner >= 0, seen.trace.events.inputs[owner], -1)
    for index in np.unique(inputs[inputs >= 0]):
        given = Operands(seen.trace.inputs[index])
        types = [DTYPES.get(given.kind(place), "") for place in given.tensors()]
        found[inputs == index] = next(filter(None, types), "")
    return found


def _reasons(odd: Counter[str], single: float, capability: tuple[int, int]) -> list[str]:
    lines = []
    if single > 0:
        tf32 = ", without TF32" if capability >= WITH_TF32 else ""
        lines.append(f"{percent(single)} of that time is in float32 or an unknown type{tf32}")
    for what, count in odd.most_common(2):
        lines.append(f"sizes that are not multiples of {MULTIPLE}: {what} ({count})")
    return lines


def _odd_sizes(products: _Products) -> Counter[str]:
    """Count the operators in 16 bits with odd sizes, by name and shapes."""
    odd: Counter[str] = Counter()
    seen, half = products.seen, products.unused & products.half & (products.owner >= 0)
    for row in np.unique(products.owner[half]).tolist():
        if (shapes := _odd_shapes(seen, row)) is not None:
            odd[f"{seen.trace.name_of(row)} {shapes}"] += 1
    return odd


def _odd_shapes(seen: Launches, row: int) -> str | None:
    """Shapes of a 16-bit product if a feature or channel count is no multiple of 8; else None."""
    given = Operands(seen.trace.inputs_of(row) or {})
    try:
        shapes = [
            given.shape(place) for place in given.tensors()[:3] if len(given.shape(place)) > 1
        ]
    except NotRecordedError:
        return None
    if not any(size % MULTIPLE for size in _channels(seen.trace.name_of(row), shapes)):
        return None
    return " x ".join(str(list(shape)) for shape in shapes)


def _channels(name: str, shapes: list[tuple[int, ...]]) -> list[int]:
    """Channels of a convolution; of other products, the features: the last dimensions."""
    if "conv" not in name:
        return [shape[-1] for shape in shapes]
    made = [] if "backward" in name else [shape[0] for shape in shapes[1:2]]
    return [*(shape[1] for shape in shapes), *made]


def _speed_up(rates: Rates | None) -> float:
    measured = rates.matrix_flops_per_s if rates else {}
    slow = measured.get("float32")
    fast = max((measured.get(kind, 0.0) for kind in ("tf32", "bfloat16", "float16")), default=0.0)
    return max(1.0, fast / slow) if slow and fast else SPEED_UP


_PAD = f"Pad channels and features to multiples of {MULTIPLE}, for 16-bit tensor core kernels."
_UNEXPLAINED = (
    "Types and sizes allow tensor cores: check in a kernel profiler which these kernels use, and "
    "try another backend (torch.nn.attention.sdpa_kernel) or newer libraries."
)


def _fix(capability: tuple[int, int], training: bool) -> str:
    """The fix for products in float32: 16 bits, or TF32."""
    wide = capability >= WITH_BFLOAT16
    if training:
        scaled = "bfloat16" if wide else "float16, with torch.amp.GradScaler"
        way = f"Compute in 16 bits: torch.autocast in {scaled}"
    else:
        kinds = "bfloat16 or float16" if wide else "float16"
        way = f"Compute in 16 bits: torch.autocast, or weights, in {kinds}"
    tf32 = "; or torch.set_float32_matmul_precision('high') for TF32"
    return f"{way}{tf32 if capability >= WITH_TF32 else ''}."


def _transforms(capability: tuple[int, int], training: bool) -> tuple[str, ...]:
    """The transforms of that fix; `autocast` trains in bfloat16 only."""
    tf32 = ("tf32",) if capability >= WITH_TF32 else ()
    if training:
        return (*tf32, "autocast") if capability >= WITH_BFLOAT16 else tf32
    return (*tf32, "autocast", "cast_weights")
