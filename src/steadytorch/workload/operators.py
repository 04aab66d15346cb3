"""Registering a script's custom operators in a worker process."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from steadytorch.errors import UsageError

_MISSING = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'")
_MOVE = "move its registration to a module that a worker process can import with the model"


def of_scripts(is_importable: Callable[[str], bool]) -> list[CustomOpDef]:
    """Lists the registered custom operators that a worker process cannot import.

    Args:
        is_importable: whether a worker can import a module, by name.
    """
    return [each for each in list(OPDEFS.values()) if not is_importable(_home(each))]


def reduced(
    operator: CustomOpDef | OpOverload | OpOverloadPacket, is_importable: Callable[[str], bool]
) -> tuple[Any, ...]:
    """Pickle reduction of an operator: by name if workers can import it, else by its functions.

    Raises:
        UsageError: the operator has rules for tensor subclasses, as Triton operators have.
    """
    if isinstance(operator, OpOverload):
        return getattr, (operator.overloadpacket, operator._overloadname)
    if isinstance(operator, OpOverloadPacket):
        return _packet, (operator._qualified_op_name,)
    name = operator._qualname
    if is_importable(_home(operator)):
        return _imported, (_home(operator), name)
    if operator._torch_dispatch_fns:
        raise UsageError(f"operator {name} has rules for tensor subclasses or Triton: {_MOVE}")
    made = (operator._namespace, operator._name, operator._schema, operator._init_fn)
    state = {
        "kernels": {kind: _kernel(kept) for kind, kept in operator._backend_fns.items()},
        "fake": operator._abstract_fn,
        "autograd": (operator._backward_fn, operator._setup_context_fn),
        "vmap": operator._vmap_fn,
        "autocast": operator._autocast_dtype,
    }
    return CustomOpDef, (*made, operator._tags), state, None, None, _register


def explained(error: BaseException) -> BaseException:
    """The given error, or a clearer one if an operator is not registered in this process."""
    found = _MISSING.search(str(error)) if isinstance(error, AttributeError) else None
    if found is None:
        return error
    name = "::".join(found.groups())
    return UsageError(f"operator {name} is not registered in the worker process: {_MOVE}")


def load_libraries(paths: set[str]) -> None:
    """Loads operator libraries that this process has not loaded yet.

    Libraries that fail to load are skipped; a later call of a missing operator raises an error
    with its name.
    """
    for path in sorted(paths - torch.ops.loaded_libraries):
        with contextlib.suppress(OSError):
            torch.ops.load_library(path)


def _home(operator: CustomOpDef) -> str:
    return getattr(operator._init_fn, "__module__", None) or "__main__"


def _kernel(kept: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the user registered, unwrapped from PyTorch's wrapper."""
    wrapper = inspect.unwrap(kept)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    return cells["fn"].cell_contents


def _packet(name: str) -> OpOverloadPacket:
    namespace, _, plain = name.partition("::")
    return getattr(getattr(torch.ops, namespace), plain)


def _imported(module: str, name: str) -> CustomOpDef:
    importlib.import_module(module)
    return OPDEFS[name]


def _register(operator: CustomOpDef, state: dict[str, Any]) -> None:
    for kind, kernel in state["kernels"].items():
        operator.register_kernel(kind)(kernel)
    if state["fake"] is not None:
        operator.register_fake(state["fake"])
    backward, setup_context = state["autograd"]
    if backward is not None:
        operator.register_autograd(backward, setup_context=setup_context)
    if state["vmap"] is not None:
        operator.register_vmap(state["vmap"])
    for kind, dtype in state["autocast"].items():
        operator.register_autocast(kind, dtype)
