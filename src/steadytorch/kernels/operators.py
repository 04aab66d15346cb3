"""Registration of the fused operators with PyTorch: dispatch, fake tensors and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from steadytorch.kernels.launch import Function, is_covered, route, traced

Backward = tuple[Callable[..., None], Callable[..., Any]]
"""The `setup_context` and `backward` functions of an operator."""

_LIBRARY = torch.library.Library("steadytorch", "FRAGMENT")


class FusedOperator:
    """An operator that runs a fused kernel if it supports the arguments, else PyTorch's operators.

    Args:
        schema: schema in PyTorch's syntax; tensors that may be missing are `Tensor?`.
        find: makes the launcher for the operator's arguments, all tensors of which are on CUDA;
            None if the kernel does not support them. The launcher takes the tensors in order.
        eager: equivalent function of PyTorch operators, with the same arguments.
        by: the autograd functions; None to recompute `eager`.
        is_cast: whether autocast casts the arguments of `eager`.

    Attributes:
        overload: the operator in `torch.ops.steadytorch`.
    """

    def __init__(
        self,
        schema: str,
        find: Callable[..., Any],
        eager: Function,
        by: Backward | None = None,
        is_cast: bool = True,
    ) -> None:
        self._find, self._eager, self._is_cast = find, eager, is_cast
        self.overload = registered(schema, self._run, traced(find, eager), by or recomputed(eager))
        arguments = enumerate(self.overload._schema.arguments)
        self._places = [place for place, argument in arguments if "Tensor" in str(argument.type)]

    def __call__(self, public: Function, *given: Any) -> Tensor:
        """Compute the operator; `public` is its user-facing function, for `__torch_function__`.

        Raises:
            KeyError: unknown activation.
            RuntimeError: PyTorch's operators reject the arguments.
        """
        tensors = self._tensors(given)
        if has_torch_function(tensors):
            return handle_torch_function(public, tensors, *given)
        if self._is_cast and torch.is_autocast_enabled("cuda"):
            return self._eager(*given)  # autocast does not cast the arguments of this operator
        return route(self._run, self.overload, self._eager, *tensors)(*given)

    def _run(self, *given: Any) -> Tensor:
        fused = self._find(*given) if is_covered(*self._tensors(given)) else None
        if fused is None:
            return self._eager(*given)
        return fused(*[given[place] for place in self._places])

    def _tensors(self, given: tuple[Any, ...]) -> list[Tensor]:
        return [given[place] for place in self._places if given[place] is not None]


def pairs(*sizes: int | Sequence[int]) -> list[Sequence[int]]:
    """Convert each size to a (vertical, horizontal) pair; a single number applies to both."""
    return [(size, size) if isinstance(size, int) else size for size in sizes]


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
