"""Finds the values that code reads: of objects, globals, closures and containers."""

from __future__ import annotations

import dis
import os
import sys
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from steadytorch.workload.contents import version
from steadytorch.workload.slots import slots_of

PLAIN = (bool, int, float, str, np.generic)
"""Classes of plain values."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
MOST_ITEMS = 64
"""Items of a list or dictionary that are searched."""
MOST_ENTRIES = 1000
"""Entries of a dictionary that is watched as a whole, at 4 ns each in compiled code. Of larger ones
only the `MOST_ITEMS` first entries are watched."""
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "steadytorch", "math", "functools"})
"""Packages whose functions and objects are not searched for values."""
_DEPTH, _DEPTH_OF_LOSS = 3, 8
"""Functions, objects and containers between a module's `forward`, or a loss, and a value that is
watched. A loss is the user's own code; what is watched is compared before each replay."""
_DEPTH_OF_ANY = 3
"""The same for a loss that computes the names that it reads: all attributes are watched."""
_OF_COMPILERS = tuple(
    os.environ.encodekey(name)
    for name in (
        "TORCHINDUCTOR_",
        "_TORCHINDUCTOR_",
        "TRITON_",
        "CUDA_HOME",
        "KMP_DUPLICATE_LIB_OK",
    )
)
"""How the names of variables begin that PyTorch's compilers set while they compile a model."""
_COMPUTES = frozenset({"getattr", "hasattr", "vars"})
_OF_FUNCTIONS = ("forward", "backward", "setup_context", "jvp", "vjp")


class _Any(frozenset[str]):
    """Contains every name, for code that computes the names of the attributes that it reads.

    Its items are "*" and names that such code holds as texts.
    """

    def __contains__(self, name: object) -> bool:
        return True

    def __or__(self, other: object) -> _Any:
        return self


_ANY = _Any({"*"})


class _Names(NamedTuple):
    """Names of the globals, attributes and modules that code reads.

    Attributes:
        texts: strings that may be names.
        computed: those in statements that compute a name, as in `hasattr(config, "scale")`.
    """

    globals: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()

    @property
    def computes(self) -> bool:
        """Whether the code may compute the names of the attributes that it reads."""
        return bool(self.globals & _COMPUTES) or "__dict__" in self.attributes


_ABSENT = object()
"""Value at a place that is empty."""


def modules_read(loss: Any) -> list[nn.Module]:
    """The roots of the module trees that a loss calls: itself, or those that its code reads."""
    read = Reads()
    read.loss(loss)
    return read.modules


def reads_of(modules: Iterable[nn.Module]) -> Reads:
    """What the `forward` of each module reads outside of the modules' attributes.

    Includes what modules that are read there read in turn.
    """
    found, known, waiting = Reads(), set[int](), list(modules)
    while waiting:
        begun = len(found.modules)
        for module in waiting:
            if id(module) not in known:
                known.add(id(module))
                found.forward(module)
        waiting = [module for root in found.modules[begun:] for module in root.modules()]
    return found


class Reads:
    """Places of the values and modules that code reads.

    Attributes:
        places: mappings with the names of watched entries.
        cells: cells of closures.
        lists: lists, deques and sets whose items are watched.
        dictionaries: dictionaries that can be watched as a whole, `MOST_ENTRIES` at most.
        reads_environment: whether it reads environment variables, which are watched as a whole.
        modules: modules, each the root of a tree.
    """

    def __init__(self) -> None:
        self.places = list[tuple[Mapping[Any, Any], Any]]()
        self.cells = list[CellType]()
        self.lists = list[Any]()
        self.dictionaries = list[dict[Any, Any]]()
        self.reads_environment = False
        self._absent = dict[int, tuple[Mapping[str, Any], set[str]]]()
        self.modules = list[nn.Module]()
        self._seen = dict[tuple[int, frozenset[str]], int]()
        self._watched = set[int]()
        self._known = set[tuple[int, Any]]()
        self._of_class = dict[type, tuple[FunctionType, ...]]()
        self._methods = dict[tuple[int, int], int]()
        self._spaces = dict[type, Mapping[str, Any]]()
        self._owners = dict[int, type]()
        self._alive = list[Any]()  # so that no id is used twice
        self._groups = list[tuple[Callable[[Any], Any], Mapping[Any, Any], list[Any]]]()
        self._others = list[tuple[Callable[..., Any], Any]]()
        self._gotten, self._of_loss = 0, False
        self._names_of_loss, self._may_come = set[str](), set[str]()
        self._united, self._space = frozenset[str](), None

    def __bool__(self) -> bool:
        return bool(self.places or self.cells or self.reads_environment or self._absent)

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
        found = dict[int, tuple[Mapping[Any, Any], list[Any]]]()
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

    @property
    def asks_for_absent(self) -> bool:
        """Whether code asks objects for attributes that they lack; see `has_gained`."""
        return bool(self._absent)

    def has_gained(self) -> bool:
        """Whether an object has an attribute that it lacked, and that code asks for by a text."""
        return not all(held.keys().isdisjoint(names) for held, names in self._absent.values())

    def held(self) -> list[Any]:
        """`values`, the watched lists themselves, and a copy of the environment if it is read."""
        found = [environment()] if self.reads_environment else []
        return [*self.values(), *self.lists, *found]

    def assign(self, values: Sequence[Any]) -> None:
        """Puts values in the order of `held` back where they were read, apart from lists' items."""
        if self.reads_environment:
            _set_environment(values[-1])
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
            self.reads_environment = True
            return
        if depth < 0 or value is None or isinstance(value, (*PLAIN, Tensor)):
            return
        # Code may read other attributes of an object than earlier code did.
        mark = id(value), frozenset[str]() if isinstance(value, FunctionType) else names
        if isinstance(names, _Any):
            depth = min(depth, _DEPTH_OF_ANY)
        if self._seen.get(mark, -1) >= depth or not self._is_searched(value):
            return
        if id(value) not in self._watched:
            self._watched.add(id(value))
            self._watch(value)
        self._seen[mark] = depth
        if not isinstance(value, nn.Module | ContextVar):
            self._search(value, names, depth)

    def loss(self, loss: Any) -> None:
        """Search what a loss reads: further than what `forward` does, and in library objects."""
        self._of_loss, before = True, -1
        try:
            # An object may be read by a function that gets it as an argument. The names of all
            # functions beside the loss count; those of other packages would lead too far.
            self._space = _space_of(loss)
            while before < len(self._names_of_loss):
                before, self._united = len(self._names_of_loss), frozenset(self._names_of_loss)
                self._seen.clear()
                self._methods.clear()
                self.look(loss, depth=_DEPTH_OF_LOSS)
        finally:
            self._of_loss = False

    def _is_searched(self, value: Any) -> bool:
        """Whether to search a value: those of libraries only for attributes that a loss reads."""
        return not _is_library(value) or (self._of_loss and _has_names(value))

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
        elif isinstance(value, dict) and _is_plain(value) and len(value) <= MOST_ENTRIES:
            self.dictionaries.append(value)
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
        held, names = vars(module), frozenset[str]().union(*(_names(m).attributes for m in methods))
        computes = any("getattr" in _names(each).globals for each in methods)
        codes = [*methods, *_helpers(methods, names, held)]
        computed = frozenset[str]().union(*(_names(m).computed for m in codes))
        self._may_come |= computed
        names = computed.union(*(_names(m).attributes for m in codes))
        for name in (names & held.keys()) - OF_MODULES:
            if not isinstance(held[name], nn.Module):
                self.look(held[name], _Any({"*"} | computed) if computes else names)
        self._classes(kind, names - OF_MODULES, _DEPTH)

    def _container(self, value: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(value, dict):
            found = dict.fromkeys(islice(value, MOST_ITEMS))
            found |= dict.fromkeys(self._names_of_loss & value.keys() if self._of_loss else ())
            self._entries(value, found, names, depth)
            return
        for each in islice(value, MOST_ITEMS):
            self.look(each, names, depth - 1)

    def _function(self, function: FunctionType, names: frozenset[str], depth: int) -> None:
        known = _names(function)
        read, attributes = known.globals, known.attributes
        if self._of_loss:
            attributes |= known.texts
            if function.__globals__ is self._space:
                self._names_of_loss |= attributes
                self._may_come |= attributes if known.computes else frozenset()
            attributes = _ANY if known.computes else attributes | self._united
        else:
            attributes |= known.computed
            self._may_come |= known.computed
        own = [name for name in vars(function) if name in attributes | names]
        self._entries(vars(function), own, attributes, depth - 1)
        held = [*map(_content, function.__closure__ or ()), *(function.__defaults__ or ())]
        for each in held:
            self.look(each, attributes, depth - 1)
        for name in known.imports & sys.modules.keys():
            self.look(sys.modules[name], attributes, depth - 1)
        space = function.__globals__
        self._entries(space, [name for name in read if name in space], attributes, depth - 1)
        keywords = function.__kwdefaults__ or {}
        self._entries(keywords, keywords, attributes, depth - 1)

    def _object(self, value: Any, names: frozenset[str], depth: int) -> None:
        is_module = isinstance(value, nn.Module)
        if is_module:
            self.look(value, names, depth)
        call = None if is_module else getattr_static(type(value), "__call__", None)
        if isinstance(call, FunctionType):
            names |= _names(call).attributes
            self.look(call, names, depth)
        if isinstance(value, UserDict | UserList | ChainMap):
            names |= {"data", "maps"}
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, torch.autograd.Function):
            for name in _OF_FUNCTIONS:
                self.look(getattr(kind, name, None), depth=depth)
        own = () if kind is value else (getattr(value, "__dict__", {}), Slots(value))
        hidden = OF_MODULES if is_module else frozenset()
        self._spaces_of(own, names, hidden, depth)
        if isinstance(names, _Any):
            return
        defaults = self._classes(kind, names, depth)
        for space in own[:1]:  # an assignment to the object hides what its class has
            self._entries(space, defaults - space.keys(), names, depth - 1)
        for name in names - hidden:
            for found in _overridden(kind, name):
                self._method(value, found, depth - 1)

    def _spaces_of(
        self,
        spaces: Sequence[Mapping[str, Any]],
        names: frozenset[str],
        hidden: frozenset[str],
        depth: int,
    ) -> None:
        """Search attributes of an object; those that code may find later are watched as well."""
        for space in spaces:
            held = [name for name in space if name in names and name not in hidden]
            self._entries(space, held, names, depth - 1)
        for space in spaces[:1]:
            coming = self._may_come - space.keys() - hidden
            if self._of_loss:
                self._entries(space, coming, names, depth - 1)
            elif coming := coming & names:
                self._absent.setdefault(id(space), (space, set()))[1].update(coming)

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
            names = _names(method).attributes
            self._object(value, self._united | names if self._of_loss else names, depth)
            self.look(method, depth=depth)

    def _entries(
        self,
        held: Mapping[Any, Any],
        keys: Iterable[Any],
        names: frozenset[str],
        depth: int,
    ) -> None:
        if isinstance(held, dict) and not _is_plain(held):
            return
        for key in keys:
            value = held.get(key)
            is_value = value is None or isinstance(value, (*PLAIN, Tensor))
            if not (is_value or self._is_searched(value)) and version(value) is None:
                continue
            if (mark := (id(held), key)) not in self._known:
                self._known.add(mark)
                self.places.append((held, key))
            self.look(value, names, depth)


def environment() -> dict[Any, Any]:
    """The environment of the process as it is kept, without what PyTorch's compilers set in it."""
    kept = vars(os.environ)["_data"].items()
    return {name: value for name, value in kept if not name.startswith(_OF_COMPILERS)}


def _set_environment(known: Mapping[Any, Any]) -> None:
    now = environment()
    for name in now.keys() - known.keys():
        del os.environ[os.environ.decodekey(name)]
    for name, value in known.items() - now.items():
        os.environ[os.environ.decodekey(name)] = os.environ.decodevalue(value)


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


def _space_of(value: Any) -> Any:
    """The globals of a function, of a method, or of the call of an object; else None."""
    while isinstance(value, partial):
        value = value.func
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType):
        function = getattr_static(type(value), "__call__", None)
    return getattr(function, "__globals__", None)


def _methods(kind: type, first: Iterable[str] = ("forward",)) -> tuple[FunctionType, ...]:
    """These methods of a class of modules, methods and properties that they use, what they wrap."""
    found, names, waiting = list[FunctionType](), set[str](), list(first)
    while waiting:
        for held in _overridden(kind, waiting.pop()):
            method = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
            while isinstance(method, FunctionType) and not _is_library(method):
                found.append(method)
                fresh = frozenset.difference(_names(method).attributes, names)
                names |= fresh
                waiting += fresh
                method = getattr(method, "__wrapped__", None)
    return tuple(found)


def _overridden(kind: type, name: str) -> Iterator[Any]:
    """What a class has under a name, and what that overrides as far as it calls `super`."""
    for each in getmro(kind):
        if name not in vars(each):
            continue
        found = vars(each)[name]
        yield found
        code = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if "super" not in _names(code).globals:
            return


def _helpers(
    methods: Iterable[FunctionType], names: frozenset[str], held: Mapping[str, Any]
) -> list[FunctionType]:
    """Functions that methods may call with what is in attributes.

    They are globals that the methods read, or attributes under `names`.
    """
    found = [held.get(name) for name in names]
    for method in methods:
        found += [method.__globals__.get(name) for name in _names(method).globals]
    return [each for each in found if isinstance(each, FunctionType) and not _is_library(each)]


def forward_of(module: nn.Module) -> FunctionType | None:
    """The `forward` of a user-defined module's class; None for PyTorch's own modules."""
    found = getattr(type(module), "forward", None)
    return found if isinstance(found, FunctionType) and not _is_library(found) else None


def _is_plain(held: dict[Any, Any]) -> bool:
    """Whether reading a dictionary runs no code of the user's."""
    return type(held).get is dict.get


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


def _has_names(value: Any) -> bool:
    """Whether an object of a library keeps attributes: a scheduler, a distribution."""
    return not isinstance(value, type | FunctionType | ModuleType) and isinstance(
        getattr(value, "__dict__", None), dict
    )


@cache
def _is_standard(module: str) -> bool:
    """Whether a module is Python's, and not a user's of the same name."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or file.startswith(get_path("stdlib"))


def set_first(module: nn.Module) -> frozenset[str]:
    """Attributes that a user-defined module's `forward` sets before its class reads them."""
    forward, kind = forward_of(module), type(module)
    own = {} if forward is None else _set_first(forward.__code__)
    return frozenset(
        name
        for name, read in own.items()
        if not any(name in _names(each).attributes for each in _methods(kind, read))
    )


@cache
def _set_first(code: CodeType) -> dict[str, frozenset[str]]:
    """Attributes of its first argument that code sets on every path; what it reads before each."""
    found, read, reaches, before = dict[str, frozenset[str]](), set[str](), 0, None
    for each in dis.get_instructions(code):
        if each.opname.startswith(("RETURN", "RAISE")):
            break
        if each.opcode in _JUMPS:
            reaches = max(reaches, each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(each.argval)
        elif each.opname == "STORE_ATTR" and each.offset >= reaches and before is not None:
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if loaded[-1:] == code.co_varnames[:1] and each.argval not in read:
                found.setdefault(each.argval, frozenset(read))
        before = each if each.opname.startswith("LOAD_FAST") else None
    return found


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


@cache
def _names_of_code(code: CodeType) -> _Names:
    read, attributes, imports = set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OF_GLOBALS:
            read.add(instruction.argval)
        elif instruction.opname in _OF_ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imports.add(instruction.argval)
    texts = set(filter(_is_name, code.co_consts))
    found = read, attributes, imports, texts, _computed(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for mine, its in zip(found, _names_of_code(inner), strict=True):
                mine |= its
    return _Names(*map(frozenset, found))


def _computed(code: CodeType) -> set[str]:
    """Strings in statements that compute the name of an attribute."""
    found, texts, computes = set[str](), set[str](), False
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_CONST" and _is_name(each.argval):
            texts.add(each.argval)
        elif each.opname in _OF_GLOBALS or each.opname in _OF_ATTRIBUTES:
            computes |= each.argval in _COMPUTES or each.argval == "__dict__"
        elif each.opname.startswith(("STORE_", "POP_", "RETURN_")):
            found |= texts if computes else set()
            texts, computes = set(), False
    return found


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")


def _names(function: Any) -> _Names:
    """Names of the globals, attributes and modules that a function's code reads."""
    code = getattr(function, "__code__", None)
    return _names_of_code(code) if isinstance(code, CodeType) else _Names()


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
