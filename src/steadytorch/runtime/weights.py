"""Telling whether a model is still the one that an executor was built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any
from weakref import ref

from torch import Tensor, nn

from steadytorch.native.host import load
from steadytorch.transforms.hooks import FORWARD, ON_ALL, hooks_on_all

_END = object()


class Weights:
    """Tells whether weights, buffers, modules or hooks changed since they were last remembered.

    In-place edits (optimizer steps, `load_state_dict`, `copy_`) raise a tensor's version counter.
    Moves and conversions give a tensor other storage without raising it. Its address tells, and,
    since the memory of storage that was freed may be given out again, weak references to storages.
    Replaced tensors and modules are other objects. What goes past PyTorch's counting leaves no
    trace: writes through `.data`, through arrays of NumPy (`p.detach().numpy()`) and DLPack, to
    `p.untyped_storage()`, to inference tensors, and by other processes to shared memory.

    Every tensor is looked at, at every look: an edit announces itself nowhere else, and a sample of
    them, or a hook of the optimizer, would let some pass. `native.host` does it at a fifth of
    the interpreter's time, where a search has compiled it.

    Args:
        model: to be watched.
        contents: whether to look at what is in the tensors, too. Training writes to them at every
            step; of it only their being replaced counts, and what gradients are computed of.

    Attributes:
        changed: a function of no arguments: whether any tensor was written to, moved or replaced
            since, or a module replaced, hooked or switched between train and eval; hooks on all
            modules of the process count too.
        interpreted_for: why it takes the longer way, through the interpreter; empty where it does
            not.
    """

    def __init__(self, model: nn.Module, contents: bool = True) -> None:
        self._model, self._contents = model, contents
        self._storages: list[Any] = []
        self.changed: Callable[[], bool] = lambda: False
        self.interpreted_for = ""

    def remember(self) -> None:
        """Takes the present state as the unchanged one; needed once before `changed`."""
        modules = list(self._model.modules())
        # Those of scripted modules are not dictionaries, and are made anew at each access.
        registries = [
            registry
            for module in modules
            for registry in (module._parameters, module._buffers)
            if registry and isinstance(registry, dict)
        ]
        links = [
            found
            for module in modules
            for found in (module._modules, *(vars(module).get(name) for name in FORWARD))
            if isinstance(found, dict)
        ]
        tensors = [*self._model.parameters(), *self._model.buffers()]
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        attributes = [vars(m) for m in modules if "training" in vars(m)]
        differs, freed = None, []
        if self._contents:
            self._storages = [ref(tensor.untyped_storage(), freed.append) for tensor in tensors]
            compiled, self.interpreted_for = load()
            if compiled is not None:
                differs = _compiled(compiled, tensors, [*registries, *links], attributes)
                self.interpreted_for = "" if differs else "weights that are no plain tensors"
        self.changed = _with_others(
            differs or _interpreted(tensors, self._contents, registries, links, attributes), freed
        )


def _with_others(differs: Callable[[], bool], freed: list[Any]) -> Callable[[], bool]:
    """The comparison, that of hooks on all modules of the process, and whether storage was freed.

    Args:
        differs: the comparison.
        freed: has an item for each storage that was.
    """
    before, after = ON_ALL
    on_all = hooks_on_all()

    def changed() -> bool:
        if freed:
            return True
        return differs() or (hooks_on_all() if before or after else ()) != on_all

    return changed


def _compiled(
    module: Any,
    tensors: list[Tensor],
    dictionaries: list[dict[str, Any]],
    attributes: list[dict[str, Any]],
) -> Callable[[], bool] | None:
    """The comparison by compiled code; None for others than plain tensors with a storage."""
    traits = module.traits(tuple(tensors))
    if traits is None:
        return None
    # In the order of dictionaries, which that of hooks may not be.
    held = tuple(tuple(chain.from_iterable(dict.items(found))) for found in dictionaries)
    modes = tuple(found["training"] for found in attributes)
    return partial(
        module.changed,
        *(tuple(tensors), traits, tuple(dictionaries), held, tuple(attributes), modes),
    )


def _interpreted(
    tensors: list[Tensor],
    contents: bool,
    registries: list[dict[str, Any]],
    links: list[dict[str, Any]],
    attributes: list[dict[str, Any]],
) -> Callable[[], bool]:
    """The same in Python; as a closure, it looks nothing up."""
    flatten = chain.from_iterable
    # With an end of its own, one more or one less is a difference too.
    parts = (part for found in registries for part in (dict.keys(found), dict.values(found)))
    rows: list[Iterable[Any]] = [*parts, (_END,)]
    held = list(flatten(rows))
    # Most modules have no children and no hooks. Compared as dictionaries, which is faster, and
    # sound for values that are equal only to themselves.
    empty, filled = [found for found in links if not found], [found for found in links if found]
    linked = [dict(found) for found in filled]
    written, trained = (tensors, []) if contents else ([], tensors)
    version, place = attrgetter("_version"), Tensor.data_ptr
    versions, places = [*map(version, written)], [*map(place, written)]
    gradients = [(tensor, tensor.requires_grad) for tensor in trained]
    modes = [(found, found["training"]) for found in attributes]

    def differs() -> bool:
        try:
            if [*map(version, written)] != versions or [*map(place, written)] != places:
                return True
        except RuntimeError:  # one that has neither was swapped in
            return True
        for tensor, needed in gradients:
            if tensor.requires_grad != needed:
                return True
        for found, mode in modes:
            if found.get("training") is not mode:
                return True
        return not (all(map(is_, flatten(rows), held)) and not any(empty) and filled == linked)

    return differs
