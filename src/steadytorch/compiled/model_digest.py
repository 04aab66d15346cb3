"""Digests of everything that compiled code takes from a model: weights, attributes, sources.

A plan's key identifies a model regardless of its weights. A package has the weights compiled in and
never reads the model, so the package is valid only for a model with equal contents.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadytorch.errors import UnsupportedError
from steadytorch.plan.files import clean
from steadytorch.workload.hooks import hooks_of, hooks_on_all
from steadytorch.workload.reads import reads_of
from steadytorch.workload.slots import slots_of

MOST_OBJECTS = 100_000
"""Limit on the objects of a model whose contents are compared."""
CHUNK_BYTES = 64 << 20
"""GPU weights are fetched in chunks of this size, or of the largest tensor."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype)
_NAMED = (type, BuiltinFunctionType, ModuleType, torch.layout, torch.memory_format)
_NEUTRAL = (torch.device,)
"""Values covered by the key, or that do not change the program."""
_OWN = frozenset(vars(nn.Module())) - {"training"}
_OF_PROCESS = frozenset({"_original_object_hash"})
"""Attributes that differ in every process: hashes of strings, in configurations of transformers."""
_EXCLUDED = ("torch", *sys.stdlib_module_names)
_INSTALLED = {"site-packages", "dist-packages"}
_OF_DATACLASS = "__create_fn__.<locals>."
"""Start of the names of methods that `dataclasses` generates, which have no file of their own."""


def digest(model: nn.Module) -> str:
    """SHA-256 of a model's contents: values of tensors and attributes of modules.

    It includes what `forward` reads elsewhere: globals, closures, attributes of objects and
    classes, other modules; see `Reads`. The digest is equal in every process and on every device.
    Hashing 100 MB of weights takes about 60 ms on one core with SHA instructions.

    Raises:
        UnsupportedError: the model holds an object that cannot be compared, has a hook, or reads
            the environment of the process.
    """
    try:
        return _Contents.digest(model, *_read_by(model))
    except (RuntimeError, TypeError, NotImplementedError, RecursionError) as error:
        raise UnsupportedError(f"its model cannot be compared: {clean(error)}") from error


def _read_by(model: nn.Module) -> list[Any]:
    """The modules that a model's code reads beside the model, and digests of all other values.

    Attributes of an object that code reads are values of their own, so of objects themselves only
    the classes count. Values are found in an order that depends on the hash seed of the process.
    """
    own = list(model.modules())
    reads, known = reads_of(own), set(map(id, own))
    if reads.reads_environment:
        raise UnsupportedError("its model reads the environment of the process")
    values = reads.values()  # sorts the places
    names = [*(name for _, name in reads.places), *("cell" for _ in reads.cells)]
    named = zip(names, values, strict=True)
    found = [f"{name} {_Contents.digest(value, deep=False)}" for name, value in named]
    lists = (held if isinstance(held, set) else list(held) for held in reads.lists)
    found += [_Contents.digest(held, deep=False) for held in lists]
    return [*(each for each in reads.modules if id(each) not in known), sorted(found)]


class _Contents:
    """Describes a model's contents as lines of text, and collects the tensors to hash.

    Args:
        deep: whether to describe attributes of modules and objects; if not, only their classes.

    Attributes:
        lines: the description, in order of traversal.
        tensors: all tensors, each once.
    """

    @classmethod
    def digest(cls, *values: Any, deep: bool = True) -> str:
        """SHA-256 of the contents of these values, in hexadecimal digits."""
        contents = cls(deep)
        for value in values:
            contents.add(value)
        found = hashlib.sha256("\n".join(contents.lines).encode(errors="backslashreplace"))
        with torch.no_grad():
            for piece in _pieces(contents.tensors):
                found.update(piece)
        return found.hexdigest()

    def __init__(self, deep: bool = True) -> None:
        self._deep = deep
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        # Keeps the objects alive, because a freed object's id may be reused.
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        """Adds an object, and everything reachable from that object, to the contents."""
        if isinstance(value, _PLAIN):
            self._line(type(value).__name__, repr(value))
        elif isinstance(value, _NAMED):
            self._line("named", _home(getattr(value, "__module__", "") or ""), _name(value))
        elif isinstance(value, _NEUTRAL):
            self._line("device")
        elif (seen := self._seen.get(id(value))) is not None:
            self._line("again", seen[0])
        else:
            self._seen[id(value)] = (len(self._seen), value)
            if len(self._seen) > MOST_OBJECTS:
                raise UnsupportedError(f"its model holds more than {MOST_OBJECTS} objects")
            self._add_new(value)

    def _line(self, *parts: object) -> None:
        self.lines.append(" ".join(map(repr, parts)))

    def _all(self, kind: str, values: Iterable[Any]) -> None:
        listed = list(values)
        self._line(kind, len(listed))
        for value in listed:
            self.add(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._line("tensor", type(value).__name__, str(value.dtype), tuple(value.shape))
            self.tensors.append(value)
        elif isinstance(value, nn.Module) and self._deep:
            self._add_module(value)
        elif isinstance(value, np.ndarray):
            self._line(
                "array", value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
            )
        elif isinstance(value, (tuple, list)):
            self._all(type(value).__name__, value)
        elif isinstance(value, Mapping):
            self._all(type(value).__name__, (part for item in value.items() for part in item))
        elif isinstance(value, (set, frozenset)):
            self._all(type(value).__name__, sorted(value, key=repr))
        else:
            self._add_object(value)

    def _add_module(self, module: nn.Module) -> None:
        if hooks_of(module) or hooks_on_all():
            raise UnsupportedError("a module has a hook, which compiled code would not call")
        own = {name: held for name, held in vars(module).items() if name not in _OWN}
        registries = [vars(module).get(name) for name in ("_parameters", "_buffers", "_modules")]
        self._line("module", _home(type(module).__module__), type(module).__qualname__)
        for registry in (own, *registries):
            # Registries of scripted modules cannot be read.
            if not isinstance(registry, dict):
                raise UnsupportedError(f"a {type(module).__name__} cannot be compared")
            self._all("names", (part for item in registry.items() for part in item))

    def _add_object(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._all("enum", (type(value), value.name))
        elif isinstance(value, functools.partial):
            self._all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            self._all("method", (value.__func__, value.__self__))
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            held = (value.__defaults__, value.__kwdefaults__, cells)
            home = _home(value.__module__ or "")
            self._line("function", home, value.__qualname__, *_code(value.__code__))
            self._all("holds", held)
        elif not self._deep:
            self._all("object", (type(value),))
        elif isinstance(getattr(value, "__dict__", None), dict):
            slots = [getattr(value, name, None) for name in slots_of(type(value))]
            held = {name: part for name, part in vars(value).items() if name not in _OF_PROCESS}
            self._all("object", (type(value), held, *slots))
        else:
            raise UnsupportedError(
                f"its model holds a {type(value).__name__}, which cannot be compared"
            )


def _home(name: str) -> str:
    """Returns a module name that does not depend on how the module's file was loaded.

    For example, `serving.py` may be run as a script, imported, or loaded by path under another
    name. Modules inside packages and installed modules keep their names.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if "." in name or not isinstance(file, str):
        return name
    path = Path(file)
    return name if _INSTALLED.intersection(path.parts) else path.name


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or getattr(value, "__name__", value))


def _code(code: CodeType) -> Iterator[str]:
    yield from (code.co_code.hex(), repr(code.co_names), repr(code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            # The order of a set depends on the hash seed of the process.
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _pieces(tensors: list[Tensor]) -> Iterator[Any]:
    """Yields the bytes of all tensors in order, from any device."""
    waiting: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        # Batches copies to the host, since each copy synchronises.
        apart = bool(waiting) and waiting[0].device != flat.device
        if apart or sum(map(len, waiting), len(flat)) > CHUNK_BYTES:
            yield from _fetched(waiting)
            waiting = []
        waiting.append(flat)
    yield from _fetched(waiting)


def _fetched(waiting: list[Tensor]) -> Iterator[Any]:
    if waiting and waiting[0].device.type != "cpu":
        waiting = [torch.cat(waiting).cpu()]
    for tensor in waiting:
        yield tensor.numpy()


def sources_of(call: Callable[[], Any]) -> dict[str, str]:
    """Digests the source files that a call executes, except PyTorch and the standard library.

    Args:
        call: called once, under a profile function.

    Returns:
        The digest of the file by module name (`FILE.py` for a module outside packages, however it
        was loaded), and the value of each plain global variable used by `MODULE:NAME`.

    Raises:
        UnsupportedError: some code has no file.
        Exception: exceptions of the call propagate.
    """
    ran: dict[CodeType, dict[str, Any]] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ran[frame.f_code] = frame.f_globals

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    found: dict[str, str] = {}
    for code, space in ran.items():
        name = str(space.get("__name__"))
        # Code generated by torch.fx is compared as a part of the model.
        if name.partition(".")[0] in _EXCLUDED or code.co_filename.startswith("<eval_with_key>"):
            continue
        home = _home(name)
        is_generated = code.co_qualname.startswith(_OF_DATACLASS)
        found[home] = _file_digest(str(space.get("__file__")) if is_generated else code.co_filename)
        for variable in code.co_names:
            if isinstance(value := space.get(variable, space), _PLAIN):
                found[f"{home}:{variable}"] = repr(value)
    return found


def changed_source(sources: Mapping[str, str]) -> str | None:
    """Returns the first module or variable of `sources` that differs in this process, or None."""
    loaded = _loaded()
    for name, expected in sources.items():
        home, _, variable = name.partition(":")
        try:
            known = loaded.get(home, ())
            if variable:
                there = [repr(vars(each).get(variable)) for each in known] or [expected]
            else:
                there = [_file_digest(each.__file__ or "") for each in known] or [_unloaded(home)]
            if expected not in there:
                return name
        except Exception:  # finding a module imports its parent package
            return name
    return None


def _loaded() -> dict[str, list[ModuleType]]:
    """Returns the loaded modules by `_home`; a file may be loaded as several modules."""
    found: dict[str, list[ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        found.setdefault(_home(name), []).append(module)
    return found


def _unloaded(home: str) -> str:
    """Returns the digest of the source file of a module that is not imported yet."""
    spec = importlib.util.find_spec(home.removesuffix(".py"))
    return _file_digest(str(spec.origin if spec is not None else ""))


def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UnsupportedError(f"some of its code has no file: {clean(path)}") from error
