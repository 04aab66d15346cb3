"""Gives what Dynamo compiles a code object of its own."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any


def private_entry(steadytorch_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a model or a loss, with its own code object and globals.

    Dynamo caches compiled code per code object. Callers that share a code object share its
    recompilation limit, and dropping the cache of one drops the cache of all. Guards name the model
    by the argument `steadytorch_model`, which no other code uses.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        return steadytorch_model(*args, **kwargs)

    space = {"__builtins__": builtins, "__name__": __name__}
    code = entry.__code__.replace()
    return types.FunctionType(code, space, entry.__name__, None, entry.__closure__)
