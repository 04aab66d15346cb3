"""Runs the model in `torch.inference_mode`."""

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
from steadytorch.workload.slots import slots_of
from steadytorch.workload.workload import Workload

_SEEN = "inference tensors"
_OPAQUE = (*CONSTANTS, nn.Module, ModuleType, type)
"""Types that hold no tensor created by the call."""


class InferenceMode(Transform):
    """Wraps each call in `torch.inference_mode`, which reduces host overhead per operation.

    Inference mode ends with the call. Outputs become ordinary tensors that callers may write to and
    use in autograd. A caller that is itself in inference mode gets inference tensors, as from any
    model.
    """

    name = "inference_mode"
    risk = Risk.EXACT
    idle_beside = ("cuda_graph",)  # a replay runs no operation on the host
    process_wide = False

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs inference and a model without hooks."""
        return decide((workload.is_training, INFERENCE_ONLY), hooks_see(workload, _SEEN))

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that runs each call in inference mode.

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
        weights: the model's weights that are inference tensors.
    """

    def __init__(self, model: Any, weights: list[Tensor]) -> None:
        # The guard inside `torch.inference_mode`, at less than half the overhead.
        super().__init__(model, partial(torch._C._InferenceMode, True))
        self.weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; a weight or input that it returns stays the same object."""
        if torch.is_inference_mode_enabled():
            return super().__call__(*args, **kwargs)
        kept = [*self.weights, *_inference_tensors((*args, *kwargs.values()))]
        found = super().__call__(*args, **kwargs)
        may_write = holds_containers((*args, *kwargs.values()))
        if type(found) is Tensor and not (kept or may_write):
            return _ordinary(found) if found.is_inference() else found
        leaving = Leaving(kept)
        if may_write:  # the caller also sees what the model wrote to containers
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
    """Return an ordinary tensor over the same memory; copy if the storage cannot be shared."""
    if type(tensor) is Tensor and not (tensor.is_conj() or tensor.is_neg()):
        try:
            return tensor.new_empty(0).set_(tensor)  # type: ignore[arg-type]
        except RuntimeError:  # sparse, quantized or nested: not strided over one storage
            pass
    return tensor.clone()


class Leaving:
    """Replaces inference tensors in a call's result by ordinary tensors.

    Containers other than tuples are updated in place, because the caller or the model may hold
    references to them. Replacements that share memory also share a version counter, as views do.

    Args:
        kept: inference tensors that existed before the call.
        objects: whether to follow the attributes of objects too.
    """

    def __init__(self, kept: list[Tensor], objects: bool = True) -> None:
        self._objects = objects
        self._made: dict[int, Any] = {id(tensor): tensor for tensor in kept}
        self._by_storage: dict[tuple[int, torch.dtype], Tensor] = {}
        self._alive: list[Any] = []

    def changed(self, value: Any) -> Any:
        """Return the value with its inference tensors replaced by ordinary tensors."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                return value
        elif isinstance(value, _OPAQUE):
            return value
        key = id(value)
        if key not in self._made:
            self._alive.append(value)  # so that its id is not reused
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
                # Bypass the class's own `__setattr__`: a dataclass may be frozen.
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
        if made.data_ptr() == tensor.data_ptr():  # shared, not copied
            self._by_storage[key] = made
        return made


def _attributes(value: Any) -> list[str]:
    return [*getattr(value, "__dict__", ()), *slots_of(type(value))]
