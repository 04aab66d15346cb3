"""Whether two answers to one call agree, where no reference of higher precision can be afforded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from steadytorch.ambient import UNREADABLE, ambient
from steadytorch.workload.signature import strides_of, tensors_of

TOLERANCES = {"tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2}
"""Relative L2 error per precision class: a few times the class's unit roundoff (2^-11 for tf32 and
fp16, 2^-8 for bf16), to leave room for its growth through a deep network."""
OWN_TOLERANCES = {
    torch.float64: 2e-13,
    torch.float32: 1e-4,
    torch.float16: TOLERANCES["fp16"],
    torch.bfloat16: TOLERANCES["bf16"],
}
"""How far two programs of class `same` may be apart, by the element type that they compute in.

float32: another order of sums brings 1e-7 to 1e-5 through a deep network, arithmetic in tf32 or
below brings 5e-4 and more; 1e-4 stands between, a decade from the one and half a decade from the
other. float64 has the same number of roundings. 16 bits leave no gap to stand in: a class of its
own bounds both programs, and so their distance but for a factor."""
INCOMPARABLE = "which cannot be compared"
"""How the reason ends where nothing can be said of an answer."""
SHARED = "two calls return the same memory, which is not the model's"
"""Why an executor is refused whose later results stand in the place of earlier ones."""
MAX_ERROR_FACTOR = 4.0
"""The largest single error may be this many times the tolerance on the relative L2 error."""
SIZES = (0.5, 2.0)
"""How large a gradient, or a buffer's movement, may be against what it should be. Rounding to bf16
was seen to change sizes by factors of 0.7 to 1.3 where it left nothing of the direction."""
SIZED = 1e-3
"""The size of tensors below this share of the norm of all of them together is not looked at."""
_CHUNK = 1 << 22
"""Elements compared at once: 100 MB of float64 temporaries."""
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def bound(precision: str, model: Any, inputs: Any, tolerance: float | None = None) -> float:
    """The relative L2 error within which a candidate must agree with the untouched model.

    Both are rounded as the untouched model rounds, so the bound is never below what its own
    arithmetic explains; see `OWN_TOLERANCES`.

    Args:
        precision: the candidate's class: same, tf32, bf16 or fp16.
        model: the untouched model; its weights count where it is a module.
        inputs: the arguments of a call, nested at will.
        tolerance: what the user allows; None for the class's default. Not used for `same`.
    """
    module = model if isinstance(model, nn.Module) else None
    held = chain(module.parameters(), module.buffers()) if module is not None else ()
    own = _own_bound(module, chain(held, tensors_of(inputs)))
    if precision == "same":
        return own
    return max(own, TOLERANCES[precision] if tolerance is None else tolerance)


def _own_bound(module: nn.Module | None, tensors: Iterable[torch.Tensor]) -> float:
    kinds = {(t.dtype.to_real(), t.device.type) for t in tensors if _inexact(t)}
    bounds = [OWN_TOLERANCES.get(dtype, TOLERANCES["bf16"]) for dtype, _ in kinds]
    if (torch.float32, "cuda") in kinds and _rounds_to_tf32(module):
        bounds.append(TOLERANCES["tf32"])
    return max(bounds, default=OWN_TOLERANCES[torch.float32])


def _inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _rounds_to_tf32(module: nn.Module | None) -> bool:
    """Whether a setting in force lets this model multiply in TF32."""
    modules = list(module.modules()) if module is not None else []
    used = {"cuda.matmul"}
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in modules):
        used.add("cudnn.conv")
    if any(isinstance(m, _RECURRENT) for m in modules):
        used.add("cudnn.rnn")
    settings = ambient()
    return any(settings[f"{op}.fp32_precision"] in ("tf32", UNREADABLE) for op in used)


def disagreement(found: Any, expected: Any, bound: float, strides: bool = True) -> str | None:
    """What tells a result from the untouched model's; None where they agree.

    Args:
        found: what the candidate returned.
        expected: what the untouched model returned for the same inputs.
        bound: relative L2 error allowed per output, as from the function `bound`. A single error
            may reach `MAX_ERROR_FACTOR` times that, relative to the largest element; of integers
            and booleans this fraction may differ.
        strides: whether those of tensors must be the same.
    """
    found_leaves, found_nesting = pytree.tree_flatten(found)
    expected_leaves, nesting = pytree.tree_flatten(expected)
    if found_nesting != nesting:
        return "nests its outputs in other containers than the untouched model"
    with torch.no_grad():
        for i, (out, ref) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
            fault = _leaf_fault(out, ref, bound, strides)
            if fault is not None:
                return f"output {i} {fault}"
    return None


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
    """A number as a tensor that rounds nothing; a tensor as it is."""
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
    """L2 norm and largest magnitude of the difference, then of the reference; one wait in all."""
    rows = []
    for a, b in zip(out.split(_CHUNK), ref.split(_CHUNK), strict=True):
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


def norm(tensor: torch.Tensor) -> float:
    """The L2 norm, summed in float64."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(torch.linalg.vector_norm(wide))


def together(norms: Iterable[float]) -> float:
    """The norm of tensors together, from that of each."""
    return sum(each * each for each in norms) ** 0.5


def wrong_size(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[str, float] | None:
    """The first tensor whose size is out of `SIZES`, and how many times too large; None if none.

    What can be asked of gradients whatever the precision: where values are rounded coarsely, little
    more than their size may be left of them.

    Args:
        found: by name; it has all names of `expected`.
        expected: what they should be.
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
    """Addresses of the storages that the tensors in nested containers stand in."""
    return {t.untyped_storage().data_ptr() for t in tensors_of(tree) if t.numel()}
