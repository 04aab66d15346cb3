"""What compiled code has taken from a model besides its inputs: weights, attributes and sources.

A plan's key says which model it is for, and holds for any weights. Code that was compiled with the
weights in it, and that no look at the model precedes, holds for these alone.
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
from steadytorch.rewrite.hooks import hooks_of, hooks_on_all

MOST_OBJECTS = 100_000
"""A model that holds more has none of its contents compared."""
CHUNK_BYTES = 64 << 20
"""Weights of a GPU are fetched in pieces of this size, or of the largest tensor."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype)
_NAMED = (type, BuiltinFunctionType, ModuleType, torch.layout, torch.memory_format)
_NEUTRAL = (torch.device,)
"""What the key covers, or what is the same program wherever it runs."""
_OWN = frozenset(vars(nn.Module())) - {"training"}
_APART = ("torch", *sys.stdlib_module_names)


def digest(model: nn.Module) -> str:
    """SHA-256 of all that a model holds: values of its tensors, and its modules' attributes.

    It is the same in every process and on every device. 100 MB take about 60 ms of one core with
    instructions for SHA.

    Raises:
        UnsupportedError: it holds what cannot be compared, or a module has a hook.
    """
    contents = _Contents()
    try:
        contents.add(model)
        found = hashlib.sha256("\n".join(contents.lines).encode(errors="backslashreplace"))
        with torch.no_grad():
            for piece in _pieces(contents.tensors):
                found.update(piece)
    except (RuntimeError, TypeError, NotImplementedError, RecursionError) as error:
        raise UnsupportedError(f"its model cannot be compared: {clean(error)}") from error
    return found.hexdigest()


class _Contents:
    """Lines that are equal for equal contents but for the values of tensors, which are collected.

    Attributes:
        lines: what there is, in the order in which it is held.
        tensors: each once.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        # Held as well: the number of an object that is gone would be given to another.
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        """Adds an object and all that it holds."""
        if isinstance(value, _PLAIN):
            self._line(type(value).__name__, repr(value))
        elif isinstance(value, _NAMED):
            self._line("named", getattr(value, "__module__", ""), _name(value))
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
        elif isinstance(value, nn.Module):
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
        self._line("module", type(module).__module__, type(module).__qualname__)
        for registry in (own, *registries):
            # Scripted modules have none that can be looked into.
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
            self._line("function", value.__module__, value.__qualname__, *_code(value.__code__))
            self._all("holds", held)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._all("object", (type(value), vars(value)))
        else:
            raise UnsupportedError(
                f"its model holds a {type(value).__name__}, which may be anything"
            )


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or getattr(value, "__name__", value))


def _code(code: CodeType) -> Iterator[str]:
    yield from (code.co_code.hex(), repr(code.co_names), repr(code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            # The order of a set follows the hash seed of the process.
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _pieces(tensors: list[Tensor]) -> Iterator[Any]:
    """The bytes of the tensors one after another, wherever they are."""
    waiting: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        # One copy to the host for many tensors: each waits for the GPU.
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
    """What the code that a call runs is, outside of PyTorch and of Python's own library.

    Args:
        call: is called once.

    Returns:
        From the name of each module that code ran of, to the digest of its file; and from
        `MODULE:NAME` to the value of each plain variable that this code names.

    Raises:
        UnsupportedError: some of it is in no file.
        Exception: of the call.
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
        # What torch.fx writes is a part of the model, and compared with it.
        if name.partition(".")[0] in _APART or code.co_filename.startswith("<eval_with_key>"):
            continue
        found[name] = _file_digest(code.co_filename)
        for variable in code.co_names:
            if isinstance(value := space.get(variable, space), _PLAIN):
                found[f"{name}:{variable}"] = repr(value)
    return found


def changed_source(sources: Mapping[str, str]) -> str | None:
    """The first module or variable, of those that `sources_of` found, that is another here."""
    for name, expected in sources.items():
        module, _, variable = name.partition(":")
        try:
            if (_variable if variable else _module)(module, variable, expected) != expected:
                return name
        except Exception:  # finding a module runs code of the package around it
            return name
    return None


def _module(name: str, variable: str, expected: str) -> str:
    module = sys.modules.get(name)
    # One that is imported at the first call is not there yet.
    spec = importlib.util.find_spec(name) if module is None else None
    return _file_digest(str(spec.origin if spec is not None else getattr(module, "__file__", "")))


def _variable(module: str, variable: str, expected: str) -> str:
    return repr(vars(sys.modules[module]).get(variable)) if module in sys.modules else expected


def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UnsupportedError(f"some of its code is in no file: {clean(path)}") from error
