"""Serialising workloads for worker processes, including models from scripts and notebooks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from threading import Lock
from typing import Any

import cloudpickle
import torch
from cloudpickle import cloudpickle as rebuild
from torch import nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.utils import parametrize

from steadytorch.errors import UsageError
from steadytorch.workload import operators
from steadytorch.workload.workload import Workload

_SAVING = Lock()


def save(workload: Workload, path: Path) -> None:
    """Writes a workload so that `load` can open it in a process that cannot import its model.

    The script's custom operators are saved too, because models may call them by name.

    Raises:
        Exception: the workload holds an object that cannot be pickled, such as an open file.
    """
    with _SAVING, _by_value():
        own = list(filter(_can_pickle, operators.of_scripts(_is_importable)))
        torch.save(((_Libraries(), own), workload), path, pickle_module=_Cloudpickle)


def load(path: Path) -> Workload:
    """Loads, in a worker process, a workload that `save` wrote.

    Unpickling runs code, so load only files that steadytorch has just written. Code pickled by
    value gets a module in `sys.modules`, even for `__main__`, because `torch.compile` looks up
    globals of inlined functions there.
    """
    return torch.load(path, weights_only=False, pickle_module=_Pickle)[1]


def modules_of(workload: Workload) -> list[str]:
    """Sorted names of the modules that `load` will import for the model's layers.

    Workers import these modules in advance, because importing a model library takes seconds.
    """
    layers = () if workload.module is None else workload.module.modules()
    named = {type(layer).__module__ for layer in layers}
    names = [name for name in named if isinstance(name, str) and name != "__main__"]
    return sorted(filter(_can_import, names))


class _Home(types.ModuleType):
    """A substitute module for code that was pickled by value."""


def _home(name: str) -> types.ModuleType | None:
    """The substitute module for code pickled by value; None if `name` can be imported instead."""
    module = sys.modules.get(name)
    if isinstance(module, _Home):
        return module
    if name != "__main__" and (module is not None or _can_import(name)):
        return None
    sys.modules[name] = home = _Home(name)
    return home


def find_anew(name: str) -> ModuleSpec | None:
    """The import spec that a fresh import of a top-level module finds, ignoring `sys.modules`."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return next((spec for f in finders if (spec := f.find_spec(name, None))), None)


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Within the block, code that a worker cannot import is pickled by value.

    Code pickled by value includes the script in a spawned process (`__mp_main__`), and modules
    created in memory or loaded from a file.
    """
    before = cloudpickle.list_registry_pickle_by_value()
    try:
        yield
    finally:
        _importable.clear()
        for name in cloudpickle.list_registry_pickle_by_value() - before:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


_importable: dict[str, bool] = {}
"""Whether a worker can import a top-level module; a cache for one call of `save`."""


def _is_importable(name: str) -> bool:
    root = name.partition(".")[0]
    if root not in _importable:
        _importable[root] = root != "__main__" and find_anew(root) is not None
    return _importable[root]


def _take_along(name: str) -> None:
    """Registers a module for pickling by value if a worker cannot import it.

    Raises:
        UsageError: the module is compiled code.
    """
    module = sys.modules.get(name)
    if name == "__main__" or not isinstance(module, types.ModuleType) or _is_importable(name):
        return
    file = getattr(module, "__file__", None) or ""
    if file.endswith(tuple(EXTENSION_SUFFIXES)):
        folder = Path(file).parent
        raise UsageError(
            f"a worker process cannot import the extension module {name}: put {folder} on sys.path"
        )
    cloudpickle.register_pickle_by_value(module)


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _make_function(code: types.CodeType, scope: dict[str, Any], *rest: Any) -> Any:
    name = scope.get("__name__")
    home = _home(name) if isinstance(name, str) else None
    if home is not None:
        home.__dict__.update(scope)
        scope = home.__dict__
    return rebuild._make_function(code, scope, *rest)


def _make_module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    home = _home(name)
    if home is None:
        return rebuild.dynamic_subimport(name, contents)
    home.__dict__.update(contents)
    return home


def _make_parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module of type `kind` whose tensors `names` are parametrized, before its state is set."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    """How to pickle a module with parametrizations, such as `weight_norm`, which PyTorch refuses.

    Its class was made at run time, so it is made again.
    """
    kind: Any = parametrize.type_before_parametrizations(module)
    names = list(module.parametrizations)  # pyright: ignore[reportArgumentType]
    return _make_parametrized, (kind, names), kind.__getstate__(module)


class _Libraries:
    """When unpickled, loads the operator libraries that the pickling process had loaded."""

    def __reduce__(self) -> Any:
        return operators.load_libraries, (set(torch.ops.loaded_libraries),)


class _Pickler(cloudpickle.Pickler):
    """Pickles code by value if a worker process cannot import it.

    Modules of a custom type, such as `torch.backends.cudnn`, are pickled by name.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CustomOpDef | OpOverload | OpOverloadPacket):
            return operators.reduced(obj, _is_importable)
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _reduced(obj)
        if isinstance(obj, types.ModuleType):
            name = getattr(obj, "__name__", None)
            if isinstance(name, str) and sys.modules.get(name) is obj:
                if type(obj) is not types.ModuleType:
                    return importlib.import_module, (name,)
                _take_along(name)
        elif isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType):
            name = getattr(obj, "__module__", None)
            if isinstance(name, str):
                _take_along(name)
        return super().reducer_override(obj)


def _can_pickle(operator: CustomOpDef) -> bool:
    """Whether an operator can be pickled; `save` skips others, as workloads may not use them."""
    try:
        _Pickler(io.BytesIO()).dump(operator)
    except Exception:
        return False
    return True


class _Cloudpickle:
    """The pickle module passed to `torch.save`."""

    Pickler = _Pickler
    dumps = staticmethod(cloudpickle.dumps)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        if found is rebuild._make_function:
            return _make_function
        return _make_module if found is rebuild.dynamic_subimport else found


class _Pickle:
    """The pickle module passed to `torch.load`."""

    Unpickler = _Unpickler
