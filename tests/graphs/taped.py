"""CUDA graphs on the CPU: operators are recorded on a tape, and replayed at fixed addresses.

As in a real recording, Python code runs once, nothing that the operators compute is kept, and a
replay runs the same operators on the same tensors.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steadytorch.graphs import checks, step


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[Any] = []
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, Tensor] = {}
        self.refusal: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:  # batch norm writes to arguments that its schema does not mark
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.kept:
                self.kept[storage.data_ptr()] = (storage, storage.clone())
        out = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.made[tensor.untyped_storage().data_ptr()] = tensor
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self):
        for storage, kept in self.kept.values():
            storage.copy_(kept)

    @torch.no_grad()
    def run(self):
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            for new, old in zip(tree_leaves(found), tree_leaves(out), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.tape: Any = None

    def replay(self):
        self.tape.run()

    def pool(self):
        return (0, 0)

    def reset(self):
        self.tape = None


class Stream:
    def __init__(self, *args: Any):
        self.device = torch.device("cpu")

    def wait_stream(self, other: Any):
        pass

    def __eq__(self, other):
        return True

    __hash__ = None


@contextmanager
def taping(graph, pool, stream):
    graph.tape = _Tape()
    random = torch.get_rng_state()
    try:
        with graph.tape:
            yield
    finally:
        graph.tape.undo()
        torch.set_rng_state(random)


def install(monkeypatch):
    """Has `steadytorch.graphs.step` record on tapes."""
    monkeypatch.setattr(step, "recording", taping)
    monkeypatch.setattr(step, "synchronisations", lambda watched=True: nullcontext([]))
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda *args: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(step, "on_current_device", lambda tensors: True)
    monkeypatch.setattr(checks, "free_bytes", lambda: 1 << 30)
    # Dropout draws on the CPU here.
    monkeypatch.setattr(step, "host_random", lambda: (random.getstate(),))
