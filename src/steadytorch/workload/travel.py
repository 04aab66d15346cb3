"""A workload on its way to another process, its model defined in a script or notebook included."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from cloudpickle import cloudpickle as rebuild

from steadytorch.workload.workload import Workload


def save(workload: Workload, path: Path) -> None:
    """Writes a workload so that `load` can open it in a process that cannot import its model.

    Raises:
        Exception: it holds what cannot be pickled, such as an open file; the pickler says what.
    """
    torch.save(workload, path, pickle_module=_Cloudpickle)


def load(path: Path) -> Workload:
    """Opens what `save` wrote, which runs code: only for files this program has just written.

    For a worker process: code that came by value is given a module of its name in `sys.modules`,
    `__main__` included, because `torch.compile` looks up the globals of inlined functions there.
    """
    return torch.load(path, weights_only=False, pickle_module=_Pickle)


def modules_of(workload: Workload) -> list[str]:
    """Names of the modules that `load` will import for the layers of the model, sorted.

    A process that waits for its workload can import them meanwhile: a model library takes seconds.
    """
    layers = () if workload.module is None else workload.module.modules()
    named = {type(layer).__module__ for layer in layers}
    names = [name for name in named if isinstance(name, str) and name != "__main__"]
    return sorted(filter(_can_import, names))


class _Home(types.ModuleType):
    """The module of code that came by value."""


def _home(name: str) -> types.ModuleType | None:
    """The module for code that came by value, made if need be; None where it can be imported."""
    module = sys.modules.get(name)
    if isinstance(module, _Home):
        return module
    if name != "__main__" and (module is not None or _can_import(name)):
        return None
    sys.modules[name] = home = _Home(name)
    return home


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


class _Pickler(cloudpickle.Pickler):
    """Names modules whose type is their own, as `torch.backends.cudnn` is."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            name = getattr(obj, "__name__", None)
            if isinstance(name, str) and sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        return super().reducer_override(obj)


class _Cloudpickle:
    """What `torch.save` needs of a pickle module."""

    Pickler = _Pickler
    dumps = staticmethod(cloudpickle.dumps)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        if found is rebuild._make_function:
            return _make_function
        return _make_module if found is rebuild.dynamic_subimport else found


class _Pickle:
    """What `torch.load` needs of a pickle module."""

    Unpickler = _Unpickler
