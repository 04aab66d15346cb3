"""Describes a workload as text: modules, layout of parameters, and code."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from steadytorch.workload.feed import Targeted
from steadytorch.workload.workload import Workload

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_HELD_BY_CALLABLES = (nn.Module, torch.Tensor, FunctionType, MethodType, bool)
# Memory addresses and devices in `repr`, which do not identify a workload.
_PLACE = re.compile(
    r"0x[0-9a-fA-F]+| ?\(GPU \d+\)|device\(type=[^)]*\)|\b(?:cpu|cuda|mps|xpu|meta)\b(?::\d+)?"
)


def describe(workload: Workload) -> list[str]:
    """Describes a workload as lines of text, independent of weight values, process and device.

    The lines cover:

    - the tree of modules, with boolean attributes such as training flags;
    - names, shapes and dtypes of parameters and buffers;
    - the source of the forward functions, and of functions they call in the same class or file;
    - for training, the loss and the kind of optimizer.

    Functions without available source are described by their code objects, which depend on the
    Python version. PyTorch's own code is left out, because the PyTorch version is part of every
    plan key.
    """
    description = _Description(training=workload.is_training)
    description.add(workload.untouched)
    if workload.training_step is not None:
        loss = workload.training_step.loss
        description.add(loss)
        if isinstance(loss, Targeted):  # it wraps any callable
            description.add(loss.loss)
        description.add_optimizer(workload.training_step.optimizer)
    return description.lines


def describe_trained(model: Any) -> list[str]:
    """Describes the model of a training step, without loss and optimizer."""
    description = _Description(training=True)
    description.add(model)
    return description.lines


class _Description:
    """Collects the lines that describe a workload in a fixed order, with each object once."""

    def __init__(self, training: bool) -> None:
        self.training = training
        self.lines = ["training" if training else "inference"]
        # Keeps the objects alive, because a freed object's id may be reused.
        self._seen: dict[tuple[int, ...], tuple[int, Any]] = {}

    def add(self, value: Any, owner: type | None = None) -> None:
        """Adds a description of a value; `owner` is the class of the method that uses the value."""
        if isinstance(value, _PLAIN):
            self._line("constant", type(value).__name__, repr(value))
        elif isinstance(value, type):
            self._line("class", value.__qualname__)
        elif isinstance(value, FunctionType):
            self._add_function(value, owner)
        elif self._is_new(value):
            if isinstance(value, torch.Tensor):
                self._line("tensor", _layout(value))
            elif isinstance(value, nn.Module):
                self._add_module(value)
            else:
                self._add_object(value)

    def add_optimizer(self, optimizer: Any) -> None:
        """Adds a description of an optimizer: its class and boolean options, not learning rates."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            self.add(optimizer)
            return
        self._line("optimizer", type(optimizer).__qualname__, len(optimizer.param_groups))
        for group in optimizer.param_groups:
            self._line(*(f"{k}={v}" for k, v in sorted(group.items()) if isinstance(v, bool)))

    def _line(self, *parts: object) -> None:
        self.lines.append(" ".join(map(str, parts)))

    def _is_new(self, *objects: Any) -> bool:
        found = self._seen.get(mark := tuple(map(id, objects)))
        if found is not None:
            self._line("again", found[0])
            return False
        self._seen[mark] = (len(self.lines), objects)
        return True

    def _add_all(self, kind: str, *values: Any, owner: type | None = None) -> None:
        self._line(kind, len(values))
        for value in values:
            self.add(value, owner)

    def _add_object(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            self._add_all("partial", value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            self._add_all("method of", value.__self__)
            self.add(value.__func__, type(value.__self__))
        elif isinstance(value, (tuple, list)):
            self._add_all(type(value).__name__, *value)
        elif isinstance(value, dict):
            self._add_all("dict", *value.keys(), *value.values())
        else:
            self._add_instance(value)

    def _add_instance(self, value: Any) -> None:
        self._line("instance", _attempt(lambda: value.__qualname__, type(value).__qualname__))
        if not callable(value):
            return
        self._add_program(value)
        self._add_methods(type(value), "__call__")
        for name, held in sorted(_attempt(lambda: vars(value), {}).items()):
            if isinstance(held, _HELD_BY_CALLABLES):
                self._line("attribute", name)
                self.add(held)

    def _add_module(self, root: nn.Module) -> None:
        self._line("tree", _PLACE.sub("", _attempt(lambda: repr(root), "no repr")))
        for name, module in _attempt(lambda: list(root.named_modules()), [("", root)]):
            kind = type(module)
            origin = kind.__module__ if _is_torch(kind) else "module"
            self._line(origin, name, kind.__qualname__, *_flags(module))
            if "forward" in vars(module):
                self.add(vars(module)["forward"])
            self._add_program(module)
            self._add_methods(kind, "__call__", "forward")
        for name, tensor in _attempt(lambda: list(root.named_parameters()), []):
            self._line("parameter", name, _layout(tensor), self.training and tensor.requires_grad)
        for name, tensor in _attempt(lambda: list(root.named_buffers()), []):
            self._line("buffer", name, _layout(tensor))

    def _add_program(self, value: Any) -> None:
        # Traced and scripted models have PyTorch classes, and their program as an attribute.
        if _is_torch(type(value)):
            program = _attempt(lambda: value.code, None)
            if isinstance(program, str):
                self._line("program", program)

    def _add_methods(self, owner: type, *names: str) -> None:
        for kind in owner.__mro__:
            if not _is_torch(kind):
                for function in filter(None, map(_function_in, map(vars(kind).get, names))):
                    self.add(function, owner)

    def _add_function(self, function: FunctionType, owner: type | None) -> None:
        function = _attempt(lambda: inspect.unwrap(function), function)
        if not isinstance(function, FunctionType) or _is_torch(function):
            self._line("function", _attempt(lambda: function.__qualname__, ""))
        # Includes the owner: a method may call other methods in another subclass.
        elif self._is_new(function, owner):
            self._line("function", function.__qualname__)
            self.lines.extend(_program(function))
            self._add_all("defaults", function.__defaults__, function.__kwdefaults__)
            cells = function.__closure__ or ()
            held = [_attempt(lambda cell=cell: cell.cell_contents, None) for cell in cells]
            self._add_all("closure", *held, owner=owner)
            self._add_called(function, owner)

    def _add_called(self, function: FunctionType, owner: type | None) -> None:
        for name in dict.fromkeys(_names(function.__code__)):
            if owner is not None:
                self._add_methods(owner, name)
            value = function.__globals__.get(name)
            neighbour = isinstance(value, FunctionType) and value.__module__ == function.__module__
            if neighbour or isinstance(value, nn.Module):
                self.add(value)


def _attempt(function: Callable[[], Any], default: Any) -> Any:
    # `repr`, properties and iterators of user classes may raise anything.
    try:
        return function()
    except Exception:
        return default


def _is_torch(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] == "torch"


def _layout(tensor: torch.Tensor) -> str:
    return _attempt(lambda: f"{tensor.dtype} {list(tensor.shape)}", "uninitialised")


def _flags(module: nn.Module) -> list[str]:
    public = (item for item in sorted(vars(module).items()) if not item[0].startswith("_"))
    return [f"{name}={value}" for name, value in public if isinstance(value, bool)]


def _function_in(member: Any) -> Any:
    """The function behind a class attribute; None if the attribute is not a method or property."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, (functools.cached_property, functools.partialmethod)):
        return member.func
    return member if isinstance(member, FunctionType) else None


def _program(function: FunctionType) -> list[str]:
    # The source of a lambda is its whole line, which may contain other lambdas.
    if function.__code__.co_name != "<lambda>":
        source = _attempt(lambda: inspect.getsource(function), "")
        if source:
            return ["source", textwrap.dedent(source)]
    return ["code", *_code_lines(function.__code__)]


def _code_lines(code: CodeType) -> Iterator[str]:
    """Yields a code object as text, without its file name and line numbers."""
    yield f"{code.co_name} {code.co_flags} {code.co_code.hex()} {code.co_exceptiontable.hex()}"
    yield f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for constant in code.co_consts:
        yield from _constant_lines(constant)


def _constant_lines(constant: Any) -> Iterator[str]:
    if isinstance(constant, CodeType):
        yield from _code_lines(constant)
    elif isinstance(constant, frozenset):
        # The order depends on the hash seed of the process.
        yield from sorted("\n".join(_constant_lines(member)) for member in constant)
    elif isinstance(constant, tuple):
        yield f"tuple {len(constant)}"
        for member in constant:
            yield from _constant_lines(member)
    else:
        yield f"{type(constant).__name__} {constant!r}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
