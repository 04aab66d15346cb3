"""Measures how much of a pipeline call each module takes, and records the module's inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from steadytorch.errors import SteadyError
from steadytorch.results.signature import Signature
from steadytorch.workload.signature import map_tensors, signature


@dataclass(frozen=True)
class Place:
    """Where an object keeps a module: an attribute of the pipeline, or a child of a module.

    Attributes:
        registry: the attributes of the pipeline, or the children of a module.
        name: name in the registry.
        path: name from the pipeline, such as `vae.decoder`.
    """

    registry: dict[str, Any]
    name: str
    path: str


@dataclass
class ModuleCalls:
    """The calls of one module with inputs of one signature.

    Attributes:
        module: the module.
        places: where the pipeline keeps it; the first names it.
        args: positional arguments of the first call, copied.
        kwargs: keyword arguments of the first call, copied.
        calls: number of calls.
        seconds: time of these calls.
        problem: why the inputs have no signature; None if they have one.
    """

    module: nn.Module
    places: list[Place]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0
    seconds: float = 0.0
    problem: str | None = None


def places_of(pipe: Any) -> dict[int, list[Place]]:
    """Every place where a pipeline keeps each of its modules, by `id` of the module.

    Args:
        pipe: an object with modules as attributes, or a dictionary of modules.
    """
    registry = pipe if isinstance(pipe, dict) else getattr(pipe, "__dict__", {})
    found: dict[int, list[Place]] = {}
    for name, held in registry.items():
        if not isinstance(held, nn.Module):
            continue
        found.setdefault(id(held), []).append(Place(registry, name, str(name)))
        for path, parent in held.named_modules(prefix=str(name)):
            for child, module in parent._modules.items():
                place = Place(parent._modules, child, f"{path}.{child}")
                if module is not None and place not in found.setdefault(id(module), []):
                    found[id(module)].append(place)
    return found


@dataclass
class Observer:
    """Times the modules of a pipeline with hooks, for one call of the pipeline.

    If module calls are nested, only the outermost counts: the call of `unet`, not those inside it.
    If a plain method such as `vae.decode` calls `vae.decoder`, the call counts for the decoder.
    Hooks of `vae` run only when `vae` itself is called.

    Args:
        pipe: the pipeline.

    Attributes:
        seconds: time within `watching`.
    """

    pipe: Any
    seconds: float = 0.0
    _found: dict[tuple[int, Signature | str], ModuleCalls] = field(default_factory=dict)
    _running: list[tuple[nn.Module, ModuleCalls, float]] = field(default_factory=list)

    @property
    def calls(self) -> list[ModuleCalls]:
        """The module calls observed, those with the most time first."""
        return sorted(self._found.values(), key=lambda each: -each.seconds)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times module calls within the `with` block; the hooks are removed at its end."""
        places = places_of(self.pipe)
        modules = {
            id(each): each
            for held in (p.registry[p.name] for found in places.values() for p in found)
            for each in held.modules()
        }
        handles = []
        try:
            for key, module in modules.items():
                if key in places:
                    before = self._before(places[key])
                    handles += [
                        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                        module.register_forward_hook(self._after, always_call=True),
                    ]
            began = _now()
            yield
            self.seconds = _now() - began
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, places: list[Place]) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._running:
                calls = self._of(module, places, args, kwargs)
                self._running.append((module, calls, _now()))

        return before

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running and self._running[0][0] is module:
            _, calls, began = self._running.pop()
            calls.calls += 1
            calls.seconds += _now() - began

    def _of(
        self,
        module: nn.Module,
        places: list[Place],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> ModuleCalls:
        try:
            found: Signature | str = signature(args, kwargs)
        except SteadyError as error:
            found = str(error)
        key = (id(module), found)
        if key not in self._found:
            with torch.inference_mode(False):
                copied = map_tensors(lambda t: t.detach().clone(), (args, dict(kwargs)))
            problem = found if isinstance(found, str) else None
            self._found[key] = ModuleCalls(module, places, *copied, problem=problem)
        return self._found[key]


def _now() -> float:
    """Current time in seconds, read after all queued GPU work is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
