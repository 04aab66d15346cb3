"""Copies a module tree; the copy shares all tensors that the conversion leaves unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from steadytorch.workload.hooks import BACKWARD, FORWARD

ModuleT = TypeVar("ModuleT", bound=nn.Module)


MOST_OWN_BYTES = 64 << 20
"""Above this total size, buffers are shared, not copied: they act as weights."""


def copy_with(
    model: ModuleT, convert: Callable[[torch.Tensor], torch.Tensor], apart: bool = False
) -> ModuleT:
    """Copy a module tree; share all tensors except those that `convert` changes.

    A parameter that appears under several names is converted once, so tied weights stay tied.
    Replacing layers of the copy does not affect the original, but writing to a shared tensor does.

    The copy calls the same hooks as the original, and the hooks write to the same objects.
    Exception: a hook that is a bound method or `partial` of an object inside the model uses the
    copied object. Thus the copy's `forward` can read what the hook wrote to an object of the model.

    Args:
        model: the module to copy; it and its tensors stay unchanged.
        convert: maps each parameter and buffer to its replacement of any shape, or to itself to
            share it. Runs without gradients.
        apart: whether the copy gets its own buffers, up to `MOST_OWN_BYTES`, so that a forward
            which writes to buffers leaves the original's alone.

    Returns:
        A module of the same class and in the same training mode.
    """
    # deepcopy takes an object's copy from the memo: fill it in advance with our replacements.
    memo: dict[int, Any] = {}
    own = _ids_of_buffers(model) if apart else set()
    with torch.inference_mode(False), torch.no_grad():
        for tensor in _tensors(model):
            if id(tensor) not in memo:
                converted = _converted(tensor, convert)
                is_own = converted is tensor and id(tensor) in own
                memo[id(tensor)] = tensor.clone() if is_own else converted
        for tensor in _computed(model):
            memo.setdefault(id(tensor), tensor)
        hooked = list(_registries(model))
        # Empty at first, so that deepcopy does not copy what only a hook refers to.
        memo.update((id(hooks), type(hooks)()) for _, _, hooks in hooked)
        copied = copy.deepcopy(model, memo)
        for module, name, hooks in hooked:
            for key, hook in hooks.items():
                _keep(hook, memo)
                memo[id(hooks)][key] = copy.deepcopy(hook, memo)
            if id(module) in memo:  # a `GraphModule` is copied without its hooks
                vars(memo[id(module)])[name] = memo[id(hooks)]
        return copied


def twin(model: ModuleT) -> ModuleT:
    """Copy a module tree; the copy and the original share parameter and buffer registries.

    Assigning or converting a tensor in either the copy or the original changes it in both. Training
    the copy trains the original model.

    Args:
        model: the module to copy; scripted modules in it get their own tensors.
    """
    copied = copy_with(model, lambda tensor: tensor)
    for mine, own in zip(copied.modules(), model.modules(), strict=True):
        for registry in ("_parameters", "_buffers"):
            if registry in vars(own):
                vars(mine)[registry] = vars(own)[registry]
    return copied


def _ids_of_buffers(model: nn.Module) -> set[int]:
    buffers = list(model.buffers())
    return set(map(id, buffers)) if sum(b.nbytes for b in buffers) <= MOST_OWN_BYTES else set()


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _computed(model: nn.Module) -> Iterator[torch.Tensor]:
    # deepcopy refuses non-leaf tensors kept as attributes (as weight_norm does). Each call
    # recomputes and reassigns them, so they can be shared.
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                yield value


def _registries(model: nn.Module) -> Iterator[tuple[nn.Module, str, dict[int, Any]]]:
    for module in model.modules():
        for name in (*FORWARD, *BACKWARD):
            if hooks := vars(module).get(name):
                yield module, name, hooks


def _keep(hook: Any, memo: dict[int, Any]) -> None:
    """Make the copy of a hook refer to the original objects, except those already copied."""
    if isinstance(hook, partial):
        for part in (hook.func, *hook.args, *hook.keywords.values()):
            _keep(part, memo)
    elif isinstance(hook, MethodType):
        _keep(hook.__self__, memo)
    else:
        memo.setdefault(id(hook), hook)


def _converted(
    tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    changed = convert(tensor)
    if changed is tensor or not isinstance(tensor, nn.Parameter):
        return changed
    return nn.Parameter(changed.detach(), requires_grad=tensor.requires_grad)
