"""What a model holds and a device can do, as far as transforms ask; nothing here runs a model."""

from __future__ import annotations

import functools
import inspect
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError, first_line
from steadytorch.rewrite.hooks import hooks_of, hooks_on_all
from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.workload.signature import CONSTANTS, tensors_of
from steadytorch.workload.workload import Workload

PLAIN_CALLABLE = "the model is a plain callable, not an nn.Module"
NO_CONVOLUTION = "the model has no convolution"
ON_A_COPY = "for inference: it works on a copy of the weights"
INFERENCE_ONLY = "for inference: it computes no gradients"

Objection = tuple[bool, str]

_SDPA = "scaled_dot_product_attention"
_ATTENTION_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def decide(*objections: Objection) -> Applicable | NotApplicable:
    """The first objection `(holds, reason)` that holds, else `Applicable`."""
    for holds, reason in objections:
        if holds:
            return NotApplicable(reason)
    return Applicable()


def untraceable(error: Exception) -> NotApplicable:
    """Says that a model cannot be traced, and why."""
    if isinstance(error, UnsupportedError):
        return NotApplicable(str(error))
    return NotApplicable(f"the model cannot be traced by torch.fx: {first_line(error)}")


def no_cuda(facts: DeviceFacts) -> Objection:
    """Objects unless the workload is to run on CUDA."""
    return facts.device != "cuda", "no CUDA device"


def not_float32(workload: Workload) -> Objection:
    """Objects unless the workload computes in float32."""
    name = dtype_name(workload.dtype)
    return workload.dtype != torch.float32, f"the workload computes in {name}, not in float32"


def no_copy(workload: Workload) -> tuple[Objection, Objection]:
    """Objects where a converted copy of the weights cannot stand in for the model."""
    return (workload.module is None, PLAIN_CALLABLE), (workload.is_training, ON_A_COPY)


def hooked(workload: Workload) -> Objection:
    """Objects to hooks, of a module or of all: what they do on the host happens once, if recorded.

    PyTorch's own weight and spectral norms are none of these: all that they do is to compute
    weights, on the device.
    """
    model = workload.untouched
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = bool(hooks_on_all()) or any(map(_is_hooked, modules))
    return found, "the model has hooks, which a replay does not call"


def hooks_see(workload: Workload, seen: str) -> Objection:
    """Objects to hooks, which are given the tensors within the model.

    Args:
        workload: whose model may have hooks.
        seen: the tensors that hooks would be given by the transform.
    """
    return hooked(workload)[0], f"the model has hooks, which would be given {seen}"


def refuse_if(objection: Objection) -> None:
    """Checks again what the search checked: the model may have new hooks since.

    Raises:
        UnsupportedError: the objection holds.
    """
    holds, reason = objection
    if holds:
        raise UnsupportedError(reason)


def _is_hooked(module: nn.Module) -> bool:
    found = hooks_of(module)
    return any(not type(hook).__module__.startswith("torch.nn.utils") for hook in found)


def steered(workload: Workload) -> Objection:
    """Objects to functions of the caller's that a module calls: hooks, patched methods, closures.

    What they close over reaches compiled code by way of the module that holds them, and freezing
    takes all that comes from modules for constant.
    """
    model = workload.untouched
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = hooked(workload)[0] or any(map(_is_steered, modules))
    return found, "the model calls functions of its user's, whose state would be frozen too"


def _is_steered(module: nn.Module) -> bool:
    return any(map(_has_state, vars(module).values()))


def _has_state(value: object) -> bool:
    """Whether a value is called, and may answer by more than its arguments and globals."""
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        is_fixed = value.__closure__ is None and all(isinstance(d, CONSTANTS) for d in defaults)
        return not (is_fixed or value.__module__.startswith("torch."))
    if isinstance(value, (nn.Module, type, BuiltinFunctionType, torch.Tensor)):
        return False
    if isinstance(value, functools.partial) and isinstance(value.func, type):
        return False  # makes layers, as constructors keep it
    return callable(value)


def off_device(workload: Workload) -> Objection:
    """Objects to input tensors on another device than the workload's, as host scalars are."""
    found = {t.device for t in tensors_of((workload.inputs, dict(workload.kwargs)))}
    others = sorted(map(str, found - {workload.device}))
    reason = f"an input on {', '.join(others)} would be frozen at the value that was recorded"
    return bool(others), reason


def capability_below(facts: DeviceFacts, needed: tuple[int, int], what: str) -> Objection:
    """Objects where the compute capability is known and below `needed`."""
    found = facts.compute_capability
    if facts.device != "cuda" or found is None:
        return False, ""
    major, _, minor = found.partition(".")
    below = (int(major), int(minor or 0)) < needed
    return below, f"{what} needs compute capability {needed[0]}.{needed[1]}, the GPU has {found}"


def half_unsupported(facts: DeviceFacts, dtype: str) -> Objection:
    """Objects where arithmetic in `dtype` ("bf16" or "fp16") is only emulated."""
    if dtype == "bf16":
        return capability_below(facts, (8, 0), "bf16 arithmetic")
    return facts.device == "cpu", "fp16 arithmetic is emulated on a CPU"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type without its `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


def convolutions(module: nn.Module | None) -> list[_ConvNd]:
    """The convolution layers of a module, transposed ones included; none for None."""
    return [] if module is None else [m for m in module.modules() if isinstance(m, _ConvNd)]


def may_convolve(workload: Workload) -> bool:
    """Whether the model has a convolution; of a plain callable, which cannot be asked, it may."""
    return workload.module is None or bool(convolutions(workload.module))


def may_attend(workload: Workload) -> bool:
    """Whether the model uses PyTorch's scaled dot product attention; a plain callable may."""
    module = workload.module
    return module is None or any(_attends(m) for m in module.modules())


def may_mask(workload: Workload) -> bool:
    """Whether the model gives PyTorch's attention masks of its own making, as far as can be read.

    PyTorch's own layers make none that a fused implementation refuses.
    """
    module = workload.module
    return module is not None and any(_masks(m) for m in module.modules())


def _attends(module: nn.Module) -> bool:
    if isinstance(module, _ATTENTION_MODULES):
        return True
    return _is_configured_to_attend(module) or _SDPA in _source(type(module))


def _masks(module: nn.Module) -> bool:
    source = _source(type(module))
    return _is_configured_to_attend(module) or (_SDPA in source and "mask" in source)


def _is_configured_to_attend(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"


@functools.cache
def _source(kind: type) -> str:
    # Reading source takes milliseconds a class, and PyTorch's own layers are known by their types.
    if kind.__module__.startswith("torch."):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
