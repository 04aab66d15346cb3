"""Compares two results of the same call, without a reference of higher precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from steadytorch.ambient import UNREADABLE, ambient
from steadytorch.runtime.slices import judged, largest
from steadytorch.workload.opened import opened, tensors_in_caches
from steadytorch.workload.signature import strides_of, tensors_of

TOLERANCES = {"tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 1e-1}
"""Relative L2 error per precision class: a few times the class's unit roundoff (2^-11 for tf32 and
fp16, 2^-8 for bf16), since errors grow through a deep network.

int8 rounds to 255 steps over the range of a tensor, not relative to each value. The range of
normally distributed values is about ten times their norm per element, so one rounding makes a
relative error of 10 / 255 / sqrt(12) = 1.1 %. The bound is nine of these, and equals a ratio of
signal to noise of 20 dB."""
ROUNDING = {"tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff of the lower floating-point classes."""
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""Unit roundoff of class `same`, by element type."""
OWN_TOLERANCES = {
    torch.float64: 2e-13,
    torch.float32: 1e-4,
    torch.float16: TOLERANCES["fp16"],
    torch.bfloat16: TOLERANCES["bf16"],
}
"""Relative L2 distance allowed between two programs of class `same`, by element type.

float32: another order of sums gives 1e-7 to 1e-5 through a deep network; arithmetic in tf32 or
below gives 5e-4 and more. 1e-4 lies between, a decade above the first and half a decade below the
second. float64 scales this by its unit roundoff. In 16 bits the two ranges overlap, so the
tolerance of the precision class applies."""
INCOMPARABLE = "which cannot be compared"
"""Ending of the reason for an answer of a type that cannot be compared."""
SHARED = "two calls return the same memory, which is not the model's"
"""Why an executor is refused whose later results overwrite earlier ones."""
MAX_ERROR_FACTOR = 4.0
"""Allowed largest single error, as a multiple of the tolerance on the relative L2 error."""
MAX_SLICE_FACTOR = 100.0
"""Allowed relative L2 error of a slice, as a multiple of the tolerance for the whole output: no
reference tells how much rounding explains where values cancel."""
SIZES = (0.5, 2.0)
"""Allowed ratio of the norm of a gradient, or of a buffer's change, to the expected norm. Rounding
to bf16 changed norms by factors of 0.7 to 1.3 where the direction was lost altogether."""
SIZED = 1e-3
"""Tensors with less than this share of the total norm are not checked."""
CHUNK = 1 << 22
"""Elements compared at once: 100 MB of float64 temporaries."""
CPU_CHUNK = 1 << 16
"""The same on a CPU. The temporaries fit into a core's cache, which takes an eighth of the time."""
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def bound(precision: str, model: Any, inputs: Any, tolerance: float | None = None) -> float:
    """Returns the relative L2 error allowed between a candidate and the untouched model.

    The bound is never below the rounding error of the untouched model's own arithmetic; see
    `OWN_TOLERANCES`.

    Args:
        precision: the candidate's class: same, tf32, bf16, fp16 or int8.
        model: the untouched model; its weights are considered if it is an `nn.Module`.
        inputs: the arguments of a call, with any nesting.
        tolerance: the user's tolerance; None for the class's default. Not used for `same`.
    """
    own = _largest_of(OWN_TOLERANCES, TOLERANCES, model, inputs)
    if precision == "same":
        return own
    return max(own, TOLERANCES[precision] if tolerance is None else tolerance)


def unit_roundoff(model: Any, inputs: Any) -> float:
    """Returns the unit roundoff of the untouched model's arithmetic under the current settings.

    Args:
        model: the untouched model; its weights are considered if it is an `nn.Module`.
        inputs: the arguments of a call, with any nesting.
    """
    return _largest_of(UNIT_ROUNDOFF, ROUNDING, model, inputs)


def _largest_of(
    own: Mapping[torch.dtype, float], lower: Mapping[str, float], model: Any, inputs: Any
) -> float:
    """The largest value for the element types of weights and inputs, and for TF32 if it is used."""
    module = model if isinstance(model, nn.Module) else None
    held = chain(module.parameters(), module.buffers()) if module is not None else ()
    tensors = filter(_inexact, chain(held, tensors_of(inputs)))
    kinds = {(t.dtype.to_real(), t.device.type) for t in tensors}
    found = [own.get(dtype, lower["bf16"]) for dtype, _ in kinds]
    if (torch.float32, "cuda") in kinds and _rounds_to_tf32(module):
        found.append(lower["tf32"])
    return max(found, default=own[torch.float32])


def _inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _rounds_to_tf32(module: nn.Module | None) -> bool:
    """Whether the current settings let this model multiply in TF32."""
    modules = list(module.modules()) if module is not None else []
    used = {"cuda.matmul"}
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in modules):
        used.add("cudnn.conv")
    if any(isinstance(m, _RECURRENT) for m in modules):
        used.add("cudnn.rnn")
    settings = ambient()
    return any(settings[f"{op}.fp32_precision"] in ("tf32", UNREADABLE) for op in used)


def disagreement(
    found: Any, expected: Any, bound: float, strides: bool = True, slices: bool = False
) -> str | None:
    """Returns how a result differs from the untouched model's; None if they agree.

    Args:
        found: what the candidate returned.
        expected: what the untouched model returned for the same inputs.
        bound: relative L2 error allowed per output, as from the function `bound`. A single error
            may reach `MAX_ERROR_FACTOR` times that, relative to the largest element. Of integers
            and booleans, this fraction of the elements may differ.
        strides: whether tensors must have equal strides; those in caches need not.
        slices: whether to judge small values beside large ones by their own size too, within
            `MAX_SLICE_FACTOR` times the bound; see `runtime.slices`.
    """
    found_leaves, found_nesting = pytree.tree_flatten(opened(found))
    expected_leaves, nesting = pytree.tree_flatten(opened(expected))
    if found_nesting != nesting:
        return "nests its outputs in other containers than the untouched model"
    cached = tensors_in_caches(expected) if strides else set()
    with torch.no_grad():
        for i, (out, ref) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
            fault = _leaf_fault(out, ref, bound, strides and id(ref) not in cached)
            if fault is None and slices and isinstance(ref, torch.Tensor):
                fault = _slice_fault(out, ref, MAX_SLICE_FACTOR * bound)
            if fault is not None:
                return f"output {i} {fault}"
    return None


def _slice_fault(out: torch.Tensor, ref: torch.Tensor, bound: float) -> str | None:
    out, ref = real(out, ref)
    error, where = largest(out, ref, judged(ref))
    if error <= bound:
        return None
    return f"is off by {error:.1e} in {where} (relative L2 error), allowed is {bound:.1e}"


def real(*values: torch.Tensor | complex) -> list[torch.Tensor]:
    """Values as tensors, dense complex ones as real tensors with one dimension more."""
    return [
        torch.view_as_real(each.resolve_conj())
        if each.is_complex() and each.layout == torch.strided
        else each
        for each in map(as_tensor, values)
    ]


def _leaf_fault(out: Any, ref: Any, bound: float, strides: bool) -> str | None:
    if isinstance(ref, torch.Tensor):
        fault = _form_fault(out, ref)
        if fault is None and strides and strides_of(out) != strides_of(ref):
            fault = f"has strides {out.stride()}, expected {ref.stride()}"
        return fault or _value_fault(out, ref, bound)
    if type(out) is not type(ref):
        return f"is a {type(out).__name__}, expected a {type(ref).__name__}"
    if isinstance(ref, (float, complex)):
        return _value_fault(as_tensor(out), as_tensor(ref), bound)
    if not isinstance(ref, (bool, int, str, bytes, type(None), torch.dtype, torch.device)):
        return f"is a {type(ref).__name__}, {INCOMPARABLE}"
    return None if out == ref else f"is {out!r:.40}, expected {ref!r:.40}"


def as_tensor(value: torch.Tensor | complex) -> torch.Tensor:
    """Converts a number to a tensor without rounding; returns tensors unchanged."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor([value], dtype=torch.complex128)


def _form_fault(out: Any, ref: torch.Tensor) -> str | None:
    if not isinstance(out, torch.Tensor):
        return f"is a {type(out).__name__}, expected a tensor"
    if out.shape != ref.shape:
        return f"has shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    if out.dtype != ref.dtype:
        return f"is {out.dtype}, expected {ref.dtype}".replace("torch.", "")
    if out.device != ref.device:
        return f"is on {out.device}, expected {ref.device}"
    if not out.layout == ref.layout == torch.strided:
        return "is not a dense tensor, and cannot be compared"
    return None


def _value_fault(out: torch.Tensor, ref: torch.Tensor, bound: float) -> str | None:
    if ref.numel() == 0:
        return None
    if ref.is_complex():
        out, ref = (torch.view_as_real(t.resolve_conj()) for t in (out, ref))
    if not ref.is_floating_point():
        differs = float((out != ref).double().mean())
        return None if differs <= bound else f"differs in {differs:.1%} of its elements"
    error, peak, size, largest = _norms(out.reshape(-1), ref.reshape(-1))
    if not peak < float("inf"):
        return "differs where one of the two is NaN or infinite"
    relative = error / size if size else error
    if not relative <= bound:
        return f"is off by {relative:.1e} (relative L2 error), allowed is {bound:.1e}"
    relative, limit = (peak / largest if largest else peak), MAX_ERROR_FACTOR * bound
    if not relative <= limit:
        return f"is off by {relative:.1e} in one element, allowed is {limit:.1e}"
    return None


def _norms(out: torch.Tensor, ref: torch.Tensor) -> list[float]:
    """L2 norm and largest magnitude of difference and reference; synchronises the device once."""
    rows = []
    for a, b in zip(out.split(CHUNK), ref.split(CHUNK), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        # NaN against a number, or infinity against anything else, counts as infinitely far.
        delta = torch.where(same, 0.0, a.double() - b.double())
        delta = torch.where(delta.isfinite(), delta, torch.inf)
        wide = torch.where(b.isfinite(), b.double(), 0.0)
        rows.append(torch.stack([f(t) for t in (delta, wide) for f in (_squares, _largest)]))
    table = torch.stack(rows)
    squares, largest = table[:, ::2].sum(0).sqrt(), table[:, 1::2].amax(0)
    return torch.stack([squares[0], largest[0], squares[1], largest[1]]).tolist()


def _squares(values: torch.Tensor) -> torch.Tensor:
    return values.square().sum()


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax()


def norm(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """The L2 norm of a tensor, or of its difference from another one, in float64.

    Args:
        tensor: of any dtype.
        other: of any dtype and the same shape; None for the norm of `tensor` itself.
    """
    given = [tensor] if other is None else [tensor, other]
    wide = torch.complex128 if any(each.is_complex() for each in given) else torch.float64
    size = CPU_CHUNK if tensor.device.type == "cpu" else CHUNK
    chunks = zip(*(each.reshape(-1).split(size) for each in given), strict=True)
    norms = []
    for chunk in chunks:
        first, *rest = (part.to(wide) for part in chunk)
        norms.append(torch.linalg.vector_norm(first - rest[0] if rest else first))
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def together(norms: Iterable[float]) -> float:
    """The L2 norm of several tensors taken together, from the norm of each."""
    return sum(each * each for each in norms) ** 0.5


def wrong_size(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[str, float] | None:
    """Finds the first tensor whose norm, relative to the expected norm, is outside `SIZES`.

    Norms are compared because coarse rounding may destroy the direction of a gradient, but changes
    its norm little.

    Args:
        found: tensors by name, with all names of `expected`.
        expected: the expected tensors by name.

    Returns:
        Name and factor, or None if all norms are within `SIZES`.
    """
    sizes = {name: norm(tensor) for name, tensor in expected.items()}
    least = SIZED * together(sizes.values())
    for name, size in sizes.items():
        if size > least:
            factor = norm(found[name]) / size
            if not SIZES[0] <= factor <= SIZES[1]:
                return name, factor
    return None


def memory_of(tree: Any) -> set[int]:
    """Storage addresses of the tensors in nested containers."""
    return {t.untyped_storage().data_ptr() for t in tensors_of(tree) if t.numel()}
