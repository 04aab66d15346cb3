"""A proxy for a model that forwards everything except calls."""

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
"""Special methods, which Python looks up on the class and not by `__getattr__`. Comparing, printing
and copying are the wrapper's own."""

_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Registries that the wrapper shares with its model, so that a parent module sees them."""

_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in _SHARED)
"""Hook registries of the wrapper itself, whose hooks run around it."""


_MARKS = frozenset({"_is_accelerate_prepared"})
"""Attributes that libraries set on modules they have seen; kept on the wrapper."""


class Function(nn.Module):
    """Wraps a callable that is not an `nn.Module`; the callable always runs untouched.

    Args:
        function: the callable.
    """

    reason = "not an nn.Module, so weight changes cannot be detected: wrap it in the forward of one"

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = self.__wrapped__ = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)


def as_module(model: Any) -> nn.Module:
    """Returns the model if it is an `nn.Module`, else wraps it in a `Function`.

    Raises:
        UsageError: it cannot be called.
    """
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UsageError(f"{type(model).__name__} is not a model: pass an nn.Module")
    return Function(model)


class _ClassMimic:
    """Makes `isinstance(wrapper, type(model))` true, which libraries check before saving.

    `type(wrapper)` still returns the wrapper's class. `_ClassMimic` is a separate base class,
    because `super()` in `ModuleProxy` needs the name `__class__`.
    """

    def _switch_off(self, reason: str) -> None:
        """Stops tuned calls, because the model was changed through the wrapper."""
        raise NotImplementedError

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]
        model = self.__dict__.get("_model")
        return type(self) if model is None or isinstance(model, Function) else model.__class__

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Sets the model's class, as parametrizations do, and stops tuned calls."""
        model = self.__dict__["_model"]
        model.__class__ = kind
        self._switch_off("its class was changed")


class ModuleProxy(_ClassMimic, nn.Module):
    """A proxy with a model's attributes, signature, parameters, buffers, submodules and state dict.

    A proxy of a container module, such as `nn.Sequential`, supports `len`, indexing and iteration
    too. Each proxy gets a subclass with only those special methods that the model's class has, so
    that missing ones raise `TypeError`.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        state = self.__dict__  # nn.Module.__setattr__ would register the model as a child
        del state["training"]  # the model's own shows through
        for registry in _SHARED:
            state[registry] = getattr(model, registry)
        state["_model"] = state["__wrapped__"] = model  # inspect.signature unwraps
        state["forward"] = update_wrapper(_calling(self.forward), model.forward, updated=())
        kind = _with_special_methods(type(self), _special_of(type(model)) - _special_of(type(self)))
        object.__dict__["__class__"].__set__(self, kind)

    def _look(self) -> Any:
        """Takes a snapshot of the model's state before a change, for `_look_again`."""
        raise NotImplementedError

    def _look_again(self, before: Any, reason: str) -> None:
        """Stops tuned calls if the model differs from a snapshot of `_look`."""
        raise NotImplementedError

    def _expect_load(self, given: Mapping[str, Any], prefix: str = "") -> None:
        """Called with a state dict before the model loads it."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model; calls of the model's public methods are counted."""
        model = self.__dict__.get("_model")
        if model is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(model, name)
        is_method = type(found) is MethodType and isinstance(found.__func__, FunctionType)
        if is_method and found.__self__ is model and not name.startswith("_"):
            return self._noted(found)
        return found

    def _noted(self, method: MethodType) -> MethodType:
        """Wraps a method of the model to count its calls."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the model's attribute and stops tuned calls, unless the wrapper owns `name`."""
        if name in self.__dict__ or name in _MARKS or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        setattr(self._model, name, value)
        if name != "training":
            self._switch_off(f"{name} was set")

    def __delattr__(self, name: str) -> None:
        """Deletes the model's attribute and stops tuned calls, unless the wrapper owns `name`."""
        if name in self.__dict__ or hasattr(type(self), name):
            super().__delattr__(name)
            return
        delattr(self._model, name)
        self._switch_off(f"{name} was deleted")

    def __repr__(self) -> str:
        """The model's `repr`, in the wrapper's name.

        `_get_name`, which `nn.Module.__repr__` calls, returns the model's name: transformers'
        Trainer decides by it how a loss with label smoothing shifts the labels.
        """
        return f"{type(self).__name__}({self._model!r})"

    def _own_hooks(self) -> dict[str, Any]:
        """The wrapper's own hooks, by attribute."""
        return {name: self.__dict__[name] for name in _HOOKS}

    def _copy_hooks(self, made: ModuleProxy, memo: dict[int, Any]) -> None:
        """Copies the wrapper's own hooks to a deep copy of the wrapper."""
        memo[id(self)] = made  # a hook may refer to this module
        for name, hooks in self._own_hooks().items():
            copied = made.__dict__[name]
            if not isinstance(hooks, dict):
                made.__dict__[name] = copy.deepcopy(hooks, memo)
                continue
            memo[id(hooks)] = copied  # removable handles refer to the registry
            for key, hook in hooks.items():
                copied[key] = copy.deepcopy(hook, memo)

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[tuple[str, nn.Module]]:
        """Yields the model's modules, on which `parameters` and `buffers` build."""
        yield from self._model.named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Applies a function to each module of the model, as `nn.Module.apply` does."""
        before = self._look()
        self._model.apply(fn)
        self._look_again(before, "a function was applied to the model")
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's state dict."""
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
        """Loads the model's own tensors when a parent module's `load_state_dict` runs."""
        self._expect_load(state_dict, prefix)
        self._model._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Switches the model to train or eval; a plan serves only the mode it was applied in."""
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
    # Not `hasattr`, which also sees special methods of the metaclass.
    return frozenset().union(*(_SPECIAL.intersection(vars(base)) for base in kind.__mro__))


@cache
def _with_special_methods(kind: type, names: frozenset[str]) -> type:
    """Creates a subclass of `kind` that forwards the special methods `names` to the model."""
    if not names:
        return kind
    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), own | {name: _special(name) for name in names})


def _special(name: str) -> Callable[..., Any]:
    def special(self: ModuleProxy, *args: Any) -> Any:
        model = self._model
        result = getattr(type(model), name)(model, *args)
        if name in _CHANGING:
            self._switch_off(f"{name} was called")
        return self if result is model else result

    special.__name__ = name
    return special
