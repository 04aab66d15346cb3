"""Properties of models and devices that decide whether a transform applies; runs no model."""

from __future__ import annotations

import functools
import inspect
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError, first_line
from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.workload.hooks import hooks_of, hooks_on_all
from steadytorch.workload.signature import CONSTANTS, tensors_of
from steadytorch.workload.workload import Workload

PLAIN_CALLABLE = "the model is a plain callable, not an nn.Module"
NO_CONVOLUTION = "the model has no convolution"
ON_A_COPY = "inference only: it works on a copy of the weights"
INFERENCE_ONLY = "inference only: it computes no gradients"

Objection = tuple[bool, str]

_SDPA = "scaled_dot_product_attention"
_ATTENTION_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def decide(*objections: Objection) -> Applicable | NotApplicable:
    """Return `NotApplicable` with the reason of the first objection that holds, or `Applicable`."""
    for holds, reason in objections:
        if holds:
            return NotApplicable(reason)
    return Applicable()


def untraceable(error: Exception) -> NotApplicable:
    """Return `NotApplicable` with the reason why torch.fx cannot trace the model."""
    if isinstance(error, UnsupportedError):
        return NotApplicable(str(error))
    return NotApplicable(f"torch.fx cannot trace the model: {first_line(error)}")


def no_cuda(facts: DeviceFacts) -> Objection:
    """Objection unless the workload runs on CUDA."""
    return facts.device != "cuda", "no CUDA device"


def not_float32(workload: Workload) -> Objection:
    """Objection unless the workload computes in float32."""
    name = dtype_name(workload.dtype)
    return workload.dtype != torch.float32, f"needs float32, the workload computes in {name}"


def no_copy(workload: Workload) -> tuple[Objection, Objection]:
    """Objections if a copy with converted weights cannot replace the model."""
    return (workload.module is None, PLAIN_CALLABLE), (workload.is_training, ON_A_COPY)


def hooked(workload: Workload) -> Objection:
    """Objection if the model has module or global hooks, because a replay would not run them.

    Hooks of PyTorch's weight norm and spectral norm do not count, because they only compute weights
    on the device.
    """
    model = workload.untouched
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = bool(hooks_on_all()) or any(map(_is_hooked, modules))
    return found, "the model has hooks, which a replay would not call"


def hooks_see(workload: Workload, seen: str) -> Objection:
    """Objection if the model has hooks, which would see the tensors that a transform changes.

    Args:
        workload: the workload whose model may have hooks.
        seen: the tensors that hooks would receive under the transform.
    """
    return hooked(workload)[0], f"the model has hooks, which would receive {seen}"


def refuse_if(objection: Objection) -> None:
    """Raise an error if the objection holds.

    Repeats a check of the search, because the model may have changed since the search.

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
    """Objection if a module calls user functions: hooks, patched methods or closures.

    Compiled code reaches the closures of user functions through the module, and freezing turns
    everything it reads from modules into constants.
    """
    model = workload.untouched
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = hooked(workload)[0] or any(map(_is_steered, modules))
    return found, "the model calls user functions, and freezing would fix their state too"


def _is_steered(module: nn.Module) -> bool:
    return any(map(_has_state, vars(module).values()))


def _has_state(value: object) -> bool:
    """Whether a value is callable and may depend on more than its arguments and globals."""
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        is_fixed = value.__closure__ is None and all(isinstance(d, CONSTANTS) for d in defaults)
        return not (is_fixed or value.__module__.startswith("torch."))
    if isinstance(value, (nn.Module, type, BuiltinFunctionType, torch.Tensor)):
        return False
    if isinstance(value, functools.partial) and isinstance(value.func, type):
        return False  # a layer factory, as constructors keep it
    return callable(value)


def off_device(workload: Workload) -> Objection:
    """Objection if an input tensor, such as a host scalar, is not on the workload's device."""
    found = {t.device for t in tensors_of((workload.inputs, dict(workload.kwargs)))}
    others = sorted(map(str, found - {workload.device}))
    reason = f"an input is on {', '.join(others)}: replays would keep its recorded value"
    return bool(others), reason


def capability_below(facts: DeviceFacts, needed: tuple[int, int], what: str) -> Objection:
    """Objection if the GPU's compute capability is known and below `needed`."""
    found = facts.compute_capability
    if facts.device != "cuda" or found is None:
        return False, ""
    major, _, minor = found.partition(".")
    below = (int(major), int(minor or 0)) < needed
    return below, f"{what} needs compute capability {needed[0]}.{needed[1]}, the GPU has {found}"


def half_unsupported(facts: DeviceFacts, dtype: str) -> Objection:
    """Objection if the device only emulates arithmetic in `dtype` ("bf16" or "fp16")."""
    if dtype == "bf16":
        return capability_below(facts, (8, 0), "bf16 arithmetic")
    return facts.device == "cpu", "fp16 arithmetic is emulated on a CPU"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


def convolutions(module: nn.Module | None) -> list[_ConvNd]:
    """Return the convolution layers of a module, transposed ones included; empty for None."""
    return [] if module is None else [m for m in module.modules() if isinstance(m, _ConvNd)]


def may_convolve(workload: Workload) -> bool:
    """Whether the model has a convolution; True for a plain callable, which may have one."""
    return workload.module is None or bool(convolutions(workload.module))


def may_attend(workload: Workload) -> bool:
    """Whether the model uses scaled dot product attention; True for a plain callable."""
    module = workload.module
    return module is None or any(_attends(m) for m in module.modules())


def may_mask(workload: Workload) -> bool:
    """Whether the model passes its own masks to PyTorch's attention, judged by its source code.

    PyTorch's own layers do not count, because fused attention kernels accept all their masks.
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
    # Reading source takes milliseconds per class; PyTorch's layers are recognised by type.
    if kind.__module__.startswith("torch."):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
