"""Registration of the fused operators with PyTorch: dispatch, fake tensors and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = tuple[Callable[..., None], Callable[..., Any]]
"""The `setup_context` and `backward` functions of an operator."""

_LIBRARY = torch.library.Library("steadytorch", "FRAGMENT")


def registered(
    schema: str, implementation: Callable[..., Tensor], fake: Callable[..., Tensor], by: Backward
) -> Any:
    """Register an operator in `torch.ops.steadytorch`.

    Args:
        schema: schema in PyTorch's syntax.
        implementation: computes the result on any device.
        fake: computes the result for fake tensors.
        by: the autograd functions.

    Returns:
        The callable operator overload.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    known, (setup, backward) = f"steadytorch::{name}", by
    torch.library.register_fake(known, fake, lib=_LIBRARY)
    torch.library.register_autograd(known, backward, setup_context=setup, lib=_LIBRARY)
    return getattr(torch.ops.steadytorch, name).default


def recomputed(eager: Callable[..., Tensor]) -> Backward:
    """Make autograd functions that recompute the eager steps and use PyTorch's gradients.

    Intermediate results are recomputed because the fused kernel never stored them.

    Args:
        eager: equivalent function of PyTorch operators, with the same arguments.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        again, given = torch.is_grad_enabled(), list(ctx.others)
        with torch.enable_grad():
            for i, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
                # Views, because one tensor may be passed twice or be a view of another.
                given[i] = tensor.view_as(tensor)
            y = eager(*given)
        needed = [i for i in ctx.places if ctx.needs_input_grad[i]]
        grads = torch.autograd.grad(y, [given[i] for i in needed], grad, create_graph=again)
        found = dict(zip(needed, grads, strict=True))
        return tuple(found.get(i) for i in range(len(given)))

    return setup, backward
