"""Telling whether a model remembers its calls, and whether it draws random numbers in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KEEPS_STATE = "the model keeps state between its calls"
DRAWS = "the model draws random numbers when called"

_PLAIN = (bool, int, float, complex, str, bytes)


class State:
    """What a model keeps between calls besides its weights: plain attributes and random numbers.

    A model that changes these in its forward answers each call according to those before, and a
    converted copy of it would have a history of its own. Seen are attributes that are assigned to,
    tensors written to, and the same one level down in lists, tuples, sets and dictionaries (buffers
    among them).

    Args:
        modules: the module trees to look at.
        keep: whether to keep copies of the buffers, for `restore`.
    """

    def __init__(self, modules: list[nn.Module], keep: bool = False) -> None:
        self._modules = list({id(m): m for tree in modules for m in tree.modules()}.values())
        self._before = [_attributes(module) for module in self._modules]
        self._seen = [{name: _seen(v) for name, v in found.items()} for found in self._before]
        self._copies = (
            [(b, b.detach().clone()) for m in self._modules for b in m.buffers(recurse=False)]
            if keep
            else []
        )

    def changed(self) -> bool:
        """Whether a call since left something behind."""
        return any(
            _differs(before, module)
            for before, module in zip(self._seen, self._modules, strict=True)
        )

    def mend(self) -> None:
        """Makes tensors ordinary that a call in inference mode left in the place of others."""
        for module in self._modules:
            for held in (module._buffers, vars(module)):
                for name, value in list(held.items()) if isinstance(held, dict) else ():
                    if isinstance(value, Tensor) and value.is_inference():
                        with torch.inference_mode(False):
                            held[name] = value.clone()

    def restore(self) -> None:
        """Puts back attributes and the contents of buffers; needs `keep`."""
        for module, before, seen in zip(self._modules, self._before, self._seen, strict=True):
            if _differs(seen, module):
                for registry in ("_buffers", "_parameters"):
                    items = seen.get(registry)
                    if items is not None:
                        before[registry].update(zip(items[1], items[2], strict=True))
                vars(module).update(before)
        with torch.no_grad():
            for buffer, copy in self._copies:
                buffer.copy_(copy)


def _attributes(module: nn.Module) -> dict[str, Any]:
    # What PyTorch's own weight and spectral norms assign is computed anew at each call.
    computed = {
        getattr(hook, "name", None)
        for hook in vars(module).get("_forward_pre_hooks", {}).values()
        if type(hook).__module__.startswith("torch.nn.utils")
    }
    return {name: value for name, value in vars(module).items() if name not in computed}


def _differs(seen: dict[str, Any], module: nn.Module) -> bool:
    now = _attributes(module)
    return now.keys() != seen.keys() or not all(
        _same(before, _seen(now[name])) for name, before in seen.items()
    )


def _seen(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return value, list(value), list(value.values()), [_version(v) for v in value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value, None, list(value), [_version(v) for v in value]
    return value, None, [value], [_version(value)]


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    if type(before[0]) is not type(after[0]) or before[1] != after[1] or before[3] != after[3]:
        return False
    return len(before[2]) == len(after[2]) and all(map(_alike, before[2], after[2]))


def _alike(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and isinstance(before, _PLAIN) and before == after


class Draws:
    """The states of the random number generators that a model on `device` would draw from.

    Another thread that draws from them at the same time looks like the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._found = self._now()

    def happened(self) -> bool:
        """Whether numbers were drawn since."""
        return not all(map(torch.equal, self._found, self._now()))

    def undo(self) -> None:
        """Puts the generators back, so that the same numbers are drawn again."""
        torch.set_rng_state(self._found[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._found[1], self._device)

    def _now(self) -> list[Tensor]:
        cuda = [] if self._device is None else [torch.cuda.get_rng_state(self._device)]
        return [torch.get_rng_state(), *cuda]
