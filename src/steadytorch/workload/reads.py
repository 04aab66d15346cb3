"""Finds the values that code reads: of objects, globals, closures and containers."""

from __future__ import annotations

import dis
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, partial
from inspect import getattr_static, getmro
from itertools import chain, islice
from operator import itemgetter
from sysconfig import get_path
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
from torch import Tensor, nn

from steadytorch.workload.contents import version
from steadytorch.workload.slots import slots_of

PLAIN = (bool, int, float, str, np.generic)
"""Classes of plain values."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
MOST_ITEMS = 64
"""Items of a list or dictionary that are watched."""
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "steadytorch", "math", "functools"})
"""Packages whose functions and objects are not searched for values."""
_DEPTH = 3
"""Number of functions, objects and containers between the loss and a value that is watched."""


class _Any(frozenset[str]):
    """Contains every name, for code that computes the names of the attributes that it reads."""

    def __contains__(self, name: object) -> bool:
        return True

    def __or__(self, other: object) -> _Any:
        return self


_ANY = _Any({"*"})
_ABSENT = object()
"""Value at a place that is empty."""


def modules_read(loss: Any) -> list[nn.Module]:
    """The roots of the module trees that a loss calls: itself, or those that its code reads."""
    read = Reads()
    read.look(loss)
    return read.modules


def reads_of(modules: Iterable[nn.Module]) -> Reads:
    """What the `forward` of each module reads outside of the modules' attributes."""
    found = Reads()
    for module in modules:
        found.forward(module)
    return found


class Reads:
    """Places of the values and modules that code reads.

    Attributes:
        places: mappings with the names of watched entries.
        cells: cells of closures.
        lists: lists, deques and sets whose items are watched.
        mappings: dictionaries that are watched as a whole: the environment of the process.
        modules: modules, each the root of a tree.
    """

    def __init__(self) -> None:
        self.places = list[tuple[Mapping[str, Any], str]]()
        self.cells = list[CellType]()
        self.lists = list[Any]()
        self.mappings = list[dict[Any, Any]]()
        self.modules = list[nn.Module]()
        self._seen = dict[tuple[int, frozenset[str]], int]()
        self._watched = set[int]()
        self._known = set[tuple[int, str]]()
        self._of_class = dict[type, tuple[FunctionType, ...]]()
        self._methods = dict[tuple[int, int], int]()
        self._spaces = dict[type, Mapping[str, Any]]()
        self._owners = dict[int, type]()
        self._alive = list[Any]()  # so that no id is used twice
        self._groups = list[tuple[Callable[[Any], Any], Mapping[str, Any], list[str]]]()
        self._others = list[tuple[Callable[..., Any], str]]()
        self._gotten = 0

    def __bool__(self) -> bool:
        return bool(self.places or self.cells or self.mappings)

    def values(self) -> list[Any]:
        """The current values at the places and in the cells."""
        if self._gotten != len(self.places):
            self._group()
        values: list[Any] = []
        for getter, holder, names in self._groups:
            try:
                values += getter(holder)
            except KeyError:
                values += [holder.get(name, _ABSENT) for name in names]
        values += [get(name, _ABSENT) for get, name in self._others]
        return values + _contents(self.cells)

    def _group(self) -> None:
        """Sort the places by mapping, since reading several entries of one at a time is faster."""
        found = dict[int, tuple[Mapping[str, Any], list[str]]]()
        for holder, name in self.places:
            found.setdefault(id(holder), (holder, []))[1].append(name)
        # Other mappings may make the entries that they lack.
        several = [
            (holder, names)
            for holder, names in found.values()
            if len(names) > 1 and type(holder) in (dict, MappingProxyType)
        ]
        grouped = {id(holder) for holder, _ in several}
        others = [place for place in self.places if id(place[0]) not in grouped]
        self.places = [(holder, name) for holder, names in several for name in names] + others
        self._groups = [(itemgetter(*names), holder, names) for holder, names in several]
        self._others = [(holder.get, name) for holder, name in others]
        self._gotten = len(self.places)

    def held(self) -> list[Any]:
        """`values`, and the watched lists and dictionaries themselves."""
        return [*self.values(), *self.lists, *self.mappings]

    def assign(self, values: Iterable[Any]) -> None:
        """Puts values in the order of `values` back where they were read."""
        following = iter(values)
        for (holder, name), value in zip(self.places, following, strict=False):
            if holder.get(name, _ABSENT) is value:
                continue
            if (kind := self._owners.get(id(holder))) is not None:
                setattr(kind, name, value)
            elif value is _ABSENT and isinstance(holder, dict):
                holder.pop(name)
            elif isinstance(holder, (dict, Slots, Variable)) and value is not _ABSENT:
                holder[name] = value
        for cell, value in zip(self.cells, following, strict=False):
            if _content(cell) is not value:
                cell.cell_contents = value

    def look(self, value: Any, names: frozenset[str] = frozenset(), depth: int = _DEPTH) -> None:
        """Search a value.

        Args:
            value: the value; modules are listed, not searched.
            names: attributes that code reads of any object.
            depth: how many further functions, objects and containers are searched.
        """
        if value is os.environ or value is os.getenv:
            self.mappings += [] if self.mappings else [vars(os.environ)["_data"]]
            return
        if depth < 0 or value is None or isinstance(value, (*PLAIN, Tensor)):
            return
        # Code may read other attributes of an object than earlier code did.
        mark = id(value), frozenset[str]() if isinstance(value, FunctionType) else names
        if self._seen.get(mark, -1) >= depth or _is_library(value):
            return
        if id(value) not in self._watched:
            self._watched.add(id(value))
            self._watch(value)
        self._seen[mark] = depth
        if not isinstance(value, nn.Module | ContextVar):
            self._search(value, names, depth)

    def _search(self, value: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(value, FunctionType):
            self._function(value, names, depth)
        elif isinstance(value, MethodType):
            self._method(value.__self__, value.__func__, depth)
        elif isinstance(value, partial):
            self._entries(value.keywords, value.keywords, names, depth)
            for each in (value.func, *value.args):
                self.look(each, names, depth)
        elif isinstance(value, dict | list | tuple | deque | set | frozenset):
            self._container(value, names, depth)
        else:
            self._object(value, names, depth)

    def _watch(self, value: Any) -> None:
        """Watch what belongs to the value itself, whatever the depth at which it was found."""
        self._alive.append(value)
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, FunctionType):
            self.cells += value.__closure__ or ()
        elif isinstance(value, list | deque | set):
            self.lists.append(value)
        elif isinstance(value, ContextVar):
            self.places.append((Variable(value), "value"))

    def forward(self, module: nn.Module) -> None:
        """Search what a module's `forward` reads, apart from values that are its attributes."""
        if forward_of(module) is None:
            return
        kind = type(module)
        if kind not in self._of_class:
            self._of_class[kind] = _methods(kind)
        methods = self._of_class[kind]
        for method in methods:
            self.look(method)
        held, names = vars(module), frozenset[str]().union(*(_names(each)[1] for each in methods))
        computes = any("getattr" in _names(each)[0] for each in methods)
        names = names.union(*(_names(each)[1] for each in _helpers(methods, names, held)))
        for name in (names & held.keys()) - OF_MODULES:
            if not isinstance(held[name], nn.Module):
                self.look(held[name], _ANY if computes else names)
        self._classes(kind, names - OF_MODULES, _DEPTH)

    def _container(self, value: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(value, dict):
            keys = islice((key for key in value if isinstance(key, str)), MOST_ITEMS)
            self._entries(value, list(keys), names, depth)
            return
        for each in islice(value, MOST_ITEMS):
            self.look(each, names, depth - 1)

    def _function(self, function: FunctionType, names: frozenset[str], depth: int) -> None:
        read, attributes = _names(function)
        own = [name for name in vars(function) if name in attributes | names]
        self._entries(vars(function), own, attributes, depth - 1)
        held = [*map(_content, function.__closure__ or ()), *(function.__defaults__ or ())]
        for each in held:
            self.look(each, attributes, depth - 1)
        known = function.__globals__
        self._entries(known, [name for name in read if name in known], attributes, depth - 1)
        keywords = function.__kwdefaults__ or {}
        self._entries(keywords, keywords, attributes, depth - 1)

    def _object(self, value: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(value, nn.Module):
            self.look(value, names, depth)
            return
        call = getattr_static(type(value), "__call__", None)
        if isinstance(call, FunctionType):
            names |= _names(call)[1]
            self.look(call, names, depth)
        kind = value if isinstance(value, type) else type(value)
        own = () if kind is value else (getattr(value, "__dict__", {}), Slots(value))
        for space in own:
            self._entries(space, [name for name in space if name in names], names, depth - 1)
        if names is _ANY:
            return
        defaults = self._classes(kind, names, depth)
        for space in own[:1]:  # an assignment to the object hides what its class has
            self._entries(space, defaults - space.keys(), names, depth - 1)
        for name in names:
            self._method(value, getattr_static(kind, name, None), depth - 1)

    def _classes(self, kind: type, names: frozenset[str], depth: int) -> set[str]:
        """Search what user-defined classes hold under these names, methods apart; returns those."""
        found = set[str]()
        for each in chain(getmro(kind), getmro(type(kind))):
            if _is_library(each):
                continue
            space = self._spaces.setdefault(each, vars(each))  # each `vars` is another object
            self._owners[id(space)] = each
            data = {name for name in names & space.keys() if not _is_code(space[name])}
            self._entries(space, data, names, depth - 1)
            found |= data
        return found

    def _method(self, value: Any, found: Any, depth: int) -> None:
        """Search a method that the code calls, or a property that it reads."""
        method = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        mark = id(value), id(method)
        if not isinstance(method, FunctionType) or self._methods.get(mark, -1) >= depth:
            return
        self._methods[mark] = depth
        if depth >= 0 and not _is_library(method):
            self._alive.append(value)
            self._object(value, _names(method)[1], depth)
            self.look(method, depth=depth)

    def _entries(
        self,
        held: Mapping[str, Any],
        keys: Iterable[str],
        names: frozenset[str],
        depth: int,
    ) -> None:
        if isinstance(held, dict) and type(held).get is not dict.get:
            return  # reading it may do anything
        for key in keys:
            value = held.get(key)
            is_value = value is None or isinstance(value, (*PLAIN, Tensor))
            if not is_value and _is_library(value) and version(value) is None:
                continue
            if (mark := (id(held), key)) not in self._known:
                self._known.add(mark)
                self.places.append((held, key))
            self.look(value, names, depth)


class Slots(Mapping[str, Any]):
    """The attributes that an object keeps in slots, by name; read anew at each access."""

    def __init__(self, holder: Any) -> None:
        self._holder, self._names = holder, slots_of(type(holder))

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return getattr(self._holder, name, None)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._holder, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Variable(Mapping[str, Any]):
    """A context variable as a mapping with one entry, which is absent while it has no value."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._variable.set(value)

    def __iter__(self) -> Iterator[str]:
        return iter(["value"])

    def __len__(self) -> int:
        return 1


def _methods(kind: type) -> tuple[FunctionType, ...]:
    """The `forward` of a class of modules, methods and properties that it uses, what these wrap."""
    found, names, waiting = list[FunctionType](), set[str](), ["forward"]
    while waiting:
        held = getattr_static(kind, waiting.pop(), None)
        method = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
        while isinstance(method, FunctionType) and not _is_library(method):
            found.append(method)
            fresh = _names(method)[1] - names
            names |= fresh
            waiting += fresh
            method = getattr(method, "__wrapped__", None)
    return tuple(found)


def _helpers(
    methods: Iterable[FunctionType], names: frozenset[str], held: Mapping[str, Any]
) -> list[FunctionType]:
    """Functions that methods may call with what is in attributes.

    They are globals that the methods read, or attributes under `names`.
    """
    found = [held.get(name) for name in names]
    for method in methods:
        found += [method.__globals__.get(name) for name in _names(method)[0]]
    return [each for each in found if isinstance(each, FunctionType) and not _is_library(each)]


def forward_of(module: nn.Module) -> FunctionType | None:
    """The `forward` of a user-defined module's class; None for PyTorch's own modules."""
    found = getattr(type(module), "forward", None)
    return found if isinstance(found, FunctionType) and not _is_library(found) else None


def _is_code(value: Any) -> bool:
    """Whether a class holds code under a name: a method, a property, a class."""
    return isinstance(value, type) or hasattr(type(value), "__get__")


def _is_library(value: Any) -> bool:
    if isinstance(value, nn.Module) or value is os.getenv:
        return False
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    holder = value if isinstance(value, type | FunctionType | MethodType) else type(value)
    module = getattr(holder, "__module__", None) or ""
    if isinstance(value, partial | MethodType | dict | list | tuple | deque | set | frozenset):
        return False
    is_code = isinstance(value, type | FunctionType)
    return module.partition(".")[0] in _LIBRARIES or (is_code and _is_standard(module))


@cache
def _is_standard(module: str) -> bool:
    """Whether a module is Python's, and not a user's of the same name."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or file.startswith(get_path("stdlib"))


@cache
def _names_of_code(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    read, attributes = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            further = _names_of_code(inner)
            read |= further[0]
            attributes |= further[1]
    return frozenset(read), frozenset(attributes)


def _names(function: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the globals and of the attributes that a function's code reads."""
    code = getattr(function, "__code__", None)
    return _names_of_code(code) if isinstance(code, CodeType) else (frozenset(), frozenset())


def _contents(cells: list[CellType]) -> list[Any]:
    try:
        return [cell.cell_contents for cell in cells]
    except ValueError:
        return list(map(_content, cells))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
