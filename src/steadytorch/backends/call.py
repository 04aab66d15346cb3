"""Calls a converted model with the signature of the original PyTorch model."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from steadytorch.backends.exported import Form, Layout, flattened
from steadytorch.errors import UnsupportedError, first_line
from steadytorch.rewrite.conversion import restrided
from steadytorch.workload.signature import strides_of
from steadytorch.workload.workload import Workload

Run = Callable[[list[Tensor]], list[Tensor]]
"""Runs an engine: contiguous CPU tensors in the order of `Form.inputs` to new tensors."""


class EngineModel:
    """A converted model with the call signature of the original PyTorch model.

    Calls are serialised, because an engine's inference request is not reentrant. The results of
    different calls never share memory.

    Args:
        name: the engine, for messages.
        run: runs the engine.
        form: the names of the inputs, and the layout and nesting of the results.
        workload: the workload that the model was converted for; its inputs give the shapes and
            dtypes to accept.
    """

    def __init__(self, name: str, run: Run, form: Form, workload: Workload) -> None:
        self._name, self._run, self._lock = name, run, Lock()
        self._taken = _described(workload.inputs, dict(workload.kwargs))
        self._results = form.results
        self._nesting = pytree.treespec_loads(form.nesting)
        self._is_single = len(form.results) == 1 and self._nesting == pytree.tree_structure(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the engine.

        Raises:
            UnsupportedError: the arguments are not those that the model was converted for.
            RuntimeError: the engine failed.
        """
        if (found := _described(args, kwargs)) != self._taken:
            raise UnsupportedError(
                f"{self._name} takes {_shown(self._taken)}, got {_shown(found)}: convert again"
            )
        return self.exact(*args, **kwargs)

    def exact(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the engine without checking the shapes and dtypes of the arguments.

        Raises:
            RuntimeError: the engine failed.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            leaves = args
        else:
            leaves = flattened(args, kwargs)
        tensors = [plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            with self._lock:
                found = self._run(tensors)
        except Exception as error:  # engines raise classes of their own
            raise RuntimeError(f"{self._name} failed: {first_line(error)}") from error
        if self._is_single:
            return _restored(found[0], self._results[0])
        following = iter(found)
        results = [
            _restored(next(following), result) if isinstance(result, Layout) else result
            for result in self._results
        ]
        return pytree.tree_unflatten(results, self._nesting)


def plain(tensor: Tensor) -> Tensor:
    """Returns a tensor's values as a contiguous, detached tensor that NumPy can share."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    leaves = flattened(args, kwargs)
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )


def _shown(described: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{'x'.join(map(str, each[0]))}:{str(each[1]).removeprefix('torch.')}"
        if isinstance(each, tuple)
        else f"{each!r:.40}"
        for each in described
    )


def _restored(tensor: Tensor, expected: Any) -> Tensor:
    """Converts an engine's result to the dtype and strides of the PyTorch model's result."""
    dtype = getattr(torch, expected.dtype)
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    if tensor.shape != expected.shape:
        raise RuntimeError(f"a result has shape {tuple(tensor.shape)}, expected {expected.shape}")
    if strides_of(tensor) == expected.strides:
        return tensor
    following = iter(expected.strides)
    strides = [next(following) if size > 1 else 1 for size in expected.shape]
    return restrided(tensor, tuple(strides))
