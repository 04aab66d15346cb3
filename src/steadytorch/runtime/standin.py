"""Standing in for a model: everything but the call is the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from functools import cache, update_wrapper
from types import FunctionType, MethodType
from typing import Any, Self

from torch import nn

from steadytorch.errors import UsageError

_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_CHANGING = frozenset(
    f"__{name}__" for name in ("setitem", "delitem", *[f"i{each}" for each in _OPERATORS])
)
_SPECIAL = _CHANGING.union(
    f"__{name}__"
    for name in (
        *("len", "length_hint", "getitem", "contains", "iter", "next", "reversed"),
        *("enter", "exit", "bool", "int", "float", "complex", "index", "bytes"),
        *("neg", "pos", "abs", "invert", *_OPERATORS, *[f"r{each}" for each in _OPERATORS]),
    )
)
"""What Python looks for in an object's class alone, past its `__getattr__`. Comparing, printing and
copying are the wrapper's own."""

_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""What a wrapper has in common with its model: a parent that holds the one sees the other's."""

_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in _SHARED)
"""A wrapper's own hooks, which run around it."""


class Function(nn.Module):
    """Stands for a callable that is no module; it is called, and never served tuned.

    Args:
        function: what is called.
    """

    reason = "not an nn.Module, so weight changes cannot be detected: wrap it in the forward of one"

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = self.__wrapped__ = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self._function(*args, **kwargs)


def as_module(model: Any) -> nn.Module:
    """A model as a module: itself, or a `Function` that calls it.

    Raises:
        UsageError: it cannot be called.
    """
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UsageError(f"{type(model).__name__} is no model: pass an nn.Module")
    return Function(model)


class _Posing:
    """Answers `isinstance` for the class of the model, as libraries ask before they save it.

    `type` tells the wrapper. A class of its own because `super()` needs `__class__` elsewhere.
    """

    def _switch_off(self, reason: str) -> None:
        """Ends the use of what was built from the model, because of what was done to it here."""
        raise NotImplementedError

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]
        model = self.__dict__.get("_model")
        return type(self) if model is None or isinstance(model, Function) else model.__class__

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Changes the model's class, as parametrizations do."""
        model = self.__dict__["_model"]
        model.__class__ = kind
        self._switch_off("its class was changed")


class StandIn(_Posing, nn.Module):
    """Has the attributes, signatures, parameters, buffers, submodules and state dict of a model.

    Of containers it has length, items and iteration too: its class is then one of its own, with the
    special methods that the model's class has, so that what the model cannot do is a `TypeError`.

    Args:
        model: what it stands in for.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        state = self.__dict__  # past nn.Module, which would register the model as a child
        del state["training"]  # the model's own shows through
        for registry in _SHARED:
            state[registry] = getattr(model, registry)
        state["_model"] = state["__wrapped__"] = model  # whoever asks for a signature unwraps it
        state["forward"] = update_wrapper(_calling(self.forward), model.forward, updated=())
        kind = _able(type(self), _special_of(type(model)) - _special_of(type(self)))
        object.__dict__["__class__"].__set__(self, kind)

    def _look(self) -> Any:
        """What `_look_again` compares with; taken before something is done to the model."""
        raise NotImplementedError

    def _look_again(self, before: Any, reason: str) -> None:
        """Does the same where the model is another one than before; otherwise nothing."""
        raise NotImplementedError

    def _expect_load(self, given: Mapping[str, Any], prefix: str = "") -> None:
        """Is told of a state dict before it is loaded into the model."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Whatever is not the wrapper's own is the model's; calls of its methods are noted."""
        model = self.__dict__.get("_model")
        if model is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(model, name)
        is_method = type(found) is MethodType and isinstance(found.__func__, FunctionType)
        if is_method and found.__self__ is model and not name.startswith("_"):
            return self._noted(found)
        return found

    def _noted(self, method: MethodType) -> MethodType:
        """A method of the model whose calls are counted."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets it on the model, whose numbers it may change, unless it is the wrapper's own."""
        if name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        setattr(self._model, name, value)
        if name != "training":
            self._switch_off(f"{name} was set")

    def __delattr__(self, name: str) -> None:
        """Deletes it from the model, as it is set there."""
        if name in self.__dict__ or hasattr(type(self), name):
            super().__delattr__(name)
            return
        delattr(self._model, name)
        self._switch_off(f"{name} was deleted")

    def _get_name(self) -> str:
        """What `repr` calls it."""
        return type(self).__name__

    def _copy_hooks(self, made: StandIn, memo: dict[int, Any]) -> None:
        """Gives a deep copy of this module copies of its own hooks."""
        memo[id(self)] = made  # a hook may refer to this module
        for name in _HOOKS:
            hooks, copied = self.__dict__[name], made.__dict__[name]
            if not isinstance(hooks, dict):
                made.__dict__[name] = copy.deepcopy(hooks, memo)
                continue
            memo[id(hooks)] = copied  # a handle refers to them
            for key, hook in hooks.items():
                copied[key] = copy.deepcopy(hook, memo)

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[tuple[str, nn.Module]]:
        """Those of the model; parameters and buffers follow from it."""
        yield from self._model.named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Calls a function with each module of the model."""
        before = self._look()
        self._model.apply(fn)
        self._look_again(before, "a function was applied to the model")
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads into the model."""
        self._expect_load(state_dict)
        return self._model.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A parent's part of `load_state_dict`; the model's submodules are loaded after it."""
        self._expect_load(state_dict, prefix)
        self._model._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Switches the model; a plan serves only the mode that it was applied in."""
        self._model.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self._look()
        self._model._apply(fn, recurse)
        self._look_again(before, "the model was moved or converted")
        return self


def _calling(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forwarded(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return forwarded


def _special_of(kind: type) -> frozenset[str]:
    # Not those of its metaclass, which `hasattr` would see too.
    return frozenset().union(*(_SPECIAL.intersection(vars(base)) for base in kind.__mro__))


@cache
def _able(kind: type, names: frozenset[str]) -> type:
    """The class with special methods that are the model's; itself where there are none to add."""
    if not names:
        return kind
    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), own | {name: _special(name) for name in names})


def _special(name: str) -> Callable[..., Any]:
    def special(self: StandIn, *args: Any) -> Any:
        model = self._model
        result = getattr(type(model), name)(model, *args)
        if name in _CHANGING:
            self._switch_off(f"{name} was called")
        return self if result is model else result

    special.__name__ = name
    return special
