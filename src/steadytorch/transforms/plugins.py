"""Plug-ins: transforms of other distributions, found by their entry points.

A distribution offers a transform in the entry-point group `steadytorch.transforms`, under the name
of the transform. Plug-ins are loaded only for a search, or when a plan or the user names one. Each
plug-in is first loaded in its own process (`steadytorch.transforms.plugin_worker`). If a plug-in
fails, it is refused with a reason, and only its own candidates are lost.
"""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError, UsageError, one_line
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.base import PRECISIONS, Claim, Risk, Transform

GROUP = "steadytorch.transforms"

_refused: dict[str, str] = {}


@functools.cache
def found() -> dict[str, EntryPoint]:
    """The entry points of installed plug-ins by name; loads none of them."""
    return {each.name: each for each in entry_points(group=GROUP)}


def distribution(name: str) -> str:
    """The distribution that offers a plug-in, with its version."""
    held = found()[name].dist
    return "unknown" if held is None else f"{held.name} {held.version}"


def version(name: str) -> dict[str, str]:
    """The distribution that offers a plug-in, as a dict of name to version; empty if unknown."""
    held = found()[name].dist
    return {} if held is None else {held.name: held.version}


def refuse(name: str, reason: str) -> None:
    """Refuses a plug-in for the rest of this process."""
    _refused[name] = reason


def refused() -> dict[str, str]:
    """Plug-ins refused in this process, as a dict of plug-in name to reason."""
    return dict(_refused)


def load(name: str) -> type[Transform]:
    """Loads a plug-in, once.

    Raises:
        UsageError: no plug-in has this name.
        UnsupportedError: it was refused, cannot be imported, or breaks the contract of a class.
    """
    if name in _refused:
        raise UnsupportedError(f"plug-in {name} was refused: {_refused[name]}")
    if name not in found():
        raise UsageError(f"no plug-in offers {name!r}")
    try:
        return _loaded(name)
    except UnsupportedError as error:
        refuse(name, str(error))
        raise UnsupportedError(f"plug-in {name} was refused: {error}") from error


@functools.cache
def _loaded(name: str) -> type[Transform]:
    try:
        kind = found()[name].load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may even exit
        raise UnsupportedError(f"cannot be imported: {_told(error)}") from error
    if (fault := class_fault(name, kind)) is not None:
        raise UnsupportedError(fault)
    return kind


def class_fault(name: str, kind: Any) -> str | None:
    """First contract rule that a transform class breaks; None if it breaks no rule.

    The check does not apply the transform to a model.
    """
    if not (isinstance(kind, type) and issubclass(kind, Transform)):
        return f"{kind!r:.60} is not a subclass of steadytorch.plugins.Transform"
    if inspect.isabstract(kind):
        return f"it lacks {', '.join(sorted(kind.__abstractmethods__))}"
    if getattr(kind, "name", None) != name:
        return f"its name is {getattr(kind, 'name', None)!r}, its entry point's is {name!r}"
    if not isinstance(getattr(kind, "risk", None), Risk):
        return "its risk is not a steadytorch.plugins.Risk"
    if not issubclass(kind.Parameters, msgspec.Struct):
        return "its Parameters are not a msgspec.Struct"
    try:
        return _instance_fault(kind(), kind)
    except Exception as error:
        return f"it cannot be made without arguments: {_told(error)}"


def _instance_fault(transform: Transform, kind: type[Transform]) -> str | None:
    if transform.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        return f"its precision is {transform.precision!r}, expected one of {known}"
    if not all(isinstance(claim, Claim) for claim in transform.claims):
        return "its claims are not steadytorch.plugins.Claim"
    spec = transform.spec
    if not all(isinstance(value, (str, int, bool)) for _, value in spec.parameters):
        return "its parameters are not all text, integers or booleans"
    again = msgspec.json.decode(msgspec.json.encode(spec), type=TransformSpec)
    if msgspec.convert(dict(again.parameters), kind.Parameters) != transform.parameters:
        return "its parameters do not survive as data"
    return None


def variants(name: str, facts: DeviceFacts) -> list[Transform]:
    """The variants of a plug-in for a device; empty if the plug-in fails and is refused."""
    try:
        kind = load(name)
        return [kind(parameters) for parameters in kind.variants(facts)]
    except UnsupportedError:
        return []
    except Exception as error:
        refuse(name, f"its variants fail: {_told(error)}")
        return []


def _told(error: BaseException) -> str:
    return one_line(error) if isinstance(error, Exception) else f"it raised {error!r:.100}"
