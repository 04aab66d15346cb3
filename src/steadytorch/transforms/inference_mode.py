"""Runs the model without any record for gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Scoped, Transform
from steadytorch.transforms.traits import INFERENCE_ONLY, decide, hooks_see, refuse_if
from steadytorch.workload.containers import holds_containers
from steadytorch.workload.signature import CONSTANTS, tensors_of
from steadytorch.workload.workload import Workload

_SEEN = "inference tensors"
_OPAQUE = (*CONSTANTS, nn.Module, ModuleType, type)
"""What holds no tensor that a call made for its caller."""


class InferenceMode(Transform):
    """`torch.inference_mode` around each call: less work for the host per operation.

    The mode ends with the call: outputs are the ordinary tensors that the model returns without it,
    which may be written to and be part of a later computation of gradients. A caller who is in
    inference mode gets inference tensors, as of any model.
    """

    name = "inference_mode"
    risk = Risk.EXACT
    process_wide = False

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Inference only, of a model without hooks."""
        return decide((workload.is_training, INFERENCE_ONLY), hooks_see(workload, _SEEN))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields a workload that enters inference mode at each call and leaves it after.

        Raises:
            UnsupportedError: the model has hooks.
        """
        refuse_if(hooks_see(workload, _SEEN))
        module = workload.untouched if isinstance(workload.untouched, nn.Module) else nn.Module()
        weights = _inference_tensors([*module.parameters(), *module.buffers()])
        yield workload.with_model(_Inferring(workload.model, weights))


class _Inferring(Scoped):
    """A model that runs in inference mode and returns ordinary tensors.

    Args:
        model: the callable to run.
        weights: those of its weights that are inference tensors themselves.
    """

    def __init__(self, model: Any, weights: list[Tensor]) -> None:
        # What `torch.inference_mode` enters, at less than half of its time.
        super().__init__(model, partial(torch._C._InferenceMode, True))
        self.weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; what it hands through, a weight or an input, is returned itself."""
        if torch.is_inference_mode_enabled():
            return super().__call__(*args, **kwargs)
        kept = [*self.weights, *_inference_tensors((*args, *kwargs.values()))]
        found = super().__call__(*args, **kwargs)
        may_write = holds_containers((*args, *kwargs.values()))
        if type(found) is Tensor and not (kept or may_write):
            return _ordinary(found) if found.is_inference() else found
        leaving = Leaving(kept)
        if may_write:  # what the model put there leaves with the caller
            leaving.changed((args, kwargs))
        return leaving.changed(found)


def _inference_tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if type(value) is Tensor:
            if value.is_inference():
                found.append(value)
        elif not isinstance(value, CONSTANTS):
            found += [tensor for tensor in tensors_of(value) if tensor.is_inference()]
    return found


def _ordinary(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the memory of an inference tensor, or with a copy of an odd one."""
    if type(tensor) is Tensor and not (tensor.is_conj() or tensor.is_neg()):
        try:
            return tensor.new_empty(0).set_(tensor)  # type: ignore[arg-type]
        except RuntimeError:  # it is sparse, quantized, nested: no strides over one storage
            pass
    return tensor.clone()


class Leaving:
    """Gives what a call returned ordinary tensors in the place of inference tensors.

    Containers stay the objects that they are, tuples excepted: the caller, or the model, may hold
    on to them. Tensors that share memory share the counter of writes to it, too, as views do.

    Args:
        kept: inference tensors that were there before the call.
        objects: whether to look at the attributes of objects too.
    """

    def __init__(self, kept: list[Tensor], objects: bool = True) -> None:
        self._objects = objects
        self._made: dict[int, Any] = {id(tensor): tensor for tensor in kept}
        self._by_storage: dict[tuple[int, torch.dtype], Tensor] = {}
        self._alive: list[Any] = []

    def changed(self, value: Any) -> Any:
        """The value with ordinary tensors in it."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                return value
        elif isinstance(value, _OPAQUE):
            return value
        key = id(value)
        if key not in self._made:
            self._alive.append(value)  # so that no other object is given its identity meanwhile
            self._made[key] = value
            self._made[key] = self._of(value)
        return self._made[key]

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            items = [self.changed(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return getattr(value, "_make", type(value))(items)
        if isinstance(value, (list, deque, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                if (new := self.changed(item)) is not item:
                    value[key] = new
        if not self._objects or type(value) in (list, dict):
            return value
        for name in _attributes(value):
            item = getattr(value, name, None)
            if (new := self.changed(item)) is not item:
                # Past what the class does where an attribute is set: a dataclass may be frozen.
                object.__setattr__(value, name, new)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.numel():
            return _ordinary(tensor)
        try:
            key = tensor.untyped_storage().data_ptr(), tensor.dtype
        except RuntimeError:  # nested or quantized
            return _ordinary(tensor)
        base = self._by_storage.get(key)
        if base is not None and not (tensor.is_conj() or tensor.is_neg()):
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        made = _ordinary(tensor)
        if made.data_ptr() == tensor.data_ptr():  # and no copy
            self._by_storage[key] = made
        return made


def _attributes(value: Any) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [*getattr(value, "__dict__", ()), *slots]
