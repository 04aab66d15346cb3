"""Telling whether a model is still the one that an executor was built from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from steadytorch.transforms.hooks import ON_ALL, hooks_on_all

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_END = object()


class Weights:
    """Tells whether weights, buffers, modules or hooks changed since they were last remembered.

    In-place edits (optimizer steps, `load_state_dict`, `copy_`) raise a tensor's version counter.
    Moves and conversions give a tensor other storage without raising it. Replaced tensors and
    modules are other objects. What goes past PyTorch's counting leaves no trace: writes through
    `.data`, through arrays of NumPy (`p.detach().numpy()`) and DLPack, to `p.untyped_storage()`, to
    inference tensors, and by other processes to shared memory.

    Every tensor is looked at, at every look: an edit announces itself nowhere else, and a sample of
    them, or a hook of the optimizer, would let some pass. It takes 0.13 us for each tensor that is
    in the processor's cache, 1 us for others; what is compared with them lies close together.

    Args:
        model: to be watched.
        contents: whether to look at what is in the tensors, too. Training writes to them at every
            step; of it only their being replaced counts, and what gradients are computed of.

    Attributes:
        changed: a function of no arguments: whether any tensor was written to, moved or replaced
            since, or a module replaced, hooked or switched between train and eval; hooks on all
            modules of the process count too.
    """

    def __init__(self, model: nn.Module, contents: bool = True) -> None:
        self._model, self._contents = model, contents
        self.changed: Callable[[], bool] = lambda: False

    def remember(self) -> None:
        """Takes the present state as the unchanged one; needed once before `changed`."""
        modules = list(self._model.modules())
        # Those of scripted modules are not dictionaries, and are made anew at each access.
        registries = [
            dict.values(registry)
            for module in modules
            for registry in (module._parameters, module._buffers)
            if registry and isinstance(registry, dict)
        ]
        # Compared as dictionaries, which is faster, and sound for values that are equal only to
        # themselves.
        links = [
            found
            for module in modules
            for found in (module._modules, *(vars(module).get(name) for name in _HOOKS))
            if isinstance(found, dict)
        ]
        tensors = [*self._model.parameters(), *self._model.buffers()]
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self.changed = _comparison(
            tensors if self._contents else [],
            [] if self._contents else tensors,
            # With an end of its own, one more or one less is a difference too.
            [*registries, (_END,)],
            links,
            [vars(m) for m in modules if "training" in vars(m)],
        )


def _comparison(
    contents: list[Tensor],
    trained: list[Tensor],
    registries: list[Any],
    links: list[dict[str, Any]],
    attributes: list[dict[str, Any]],
) -> Callable[[], bool]:
    """The function that compares with what is found now; as a closure, it looks nothing up."""
    flatten = chain.from_iterable
    held = list(flatten(registries))
    # Most modules have no children and no hooks.
    empty, filled = [found for found in links if not found], [found for found in links if found]
    linked = [dict(found) for found in filled]
    before, after = ON_ALL
    on_all = hooks_on_all()
    version, place = attrgetter("_version"), Tensor.data_ptr
    versions, places = [*map(version, contents)], [*map(place, contents)]
    gradients = [(tensor, tensor.requires_grad) for tensor in trained]
    modes = [(found, found["training"]) for found in attributes]

    def changed() -> bool:
        if [*map(version, contents)] != versions or [*map(place, contents)] != places:
            return True
        for tensor, needed in gradients:
            if tensor.requires_grad != needed:
                return True
        for found, mode in modes:
            if found["training"] != mode:
                return True
        return not (
            all(map(is_, flatten(registries), held))
            and not any(empty)
            and filled == linked
            and (hooks_on_all() if before or after else ()) == on_all
        )

    return changed
