"""Copies of a module tree that share every tensor except those that a transform changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from steadytorch.rewrite.hooks import BACKWARD, FORWARD

ModuleT = TypeVar("ModuleT", bound=nn.Module)


MOST_OWN_BYTES = 64 << 20
"""Buffers of more than this in all are not copied: they are weights in disguise."""


def copy_with(
    model: ModuleT, convert: Callable[[torch.Tensor], torch.Tensor], apart: bool = False
) -> ModuleT:
    """Copies the modules, and of their tensors only those that `convert` changes.

    A parameter that appears under several names is converted once, so that tied weights stay tied.
    Changing the copy's modules (replacing a layer, say) leaves the original alone; writing into a
    tensor that is still shared does not.

    Hooks stay the caller's, and write to where those of the model do. Only what the model holds
    itself is the copy's in them, too (a hook may be its method, or be given it by `partial`): the
    copy's `forward` may read what they wrote there.

    Args:
        model: the module to copy; neither it nor its tensors are changed.
        convert: maps each parameter and buffer to its replacement of any shape, or to itself where
            it is to be shared. Runs without gradients.
        apart: whether the copy is to have buffers of its own, up to `MOST_OWN_BYTES`: a forward
            that writes to its buffers then does so in the copy alone.

    Returns:
        A module of the same class and in the same training mode.
    """
    # deepcopy looks up in the memo what an object has become: filled beforehand, it keeps ours.
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
        # Empty at first: a hook alone must not have anything copied.
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
    """Copies the modules alone: both trees keep their parameters and buffers in one place.

    A tensor that is assigned to either, or converted in it, is seen by both; training the copy
    trains the model.

    Args:
        model: the module to copy; scripted modules in it are copied with tensors of their own.
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
    # Results of autograd kept as attributes (weight_norm does) refuse to be copied; they are
    # recomputed at each call, by assignment.
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
    """Has a copy of a hook refer to the same objects, except those that were copied before it."""
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
