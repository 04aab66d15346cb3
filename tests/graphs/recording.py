"""Graphs on the host whose output is of one kernel, and which memory is theirs."""

from __future__ import annotations

import torch

from steadytorch.graphs import graph_io_patching, pointers
from steadytorch.graphs.graph_io_patching import link
from steadytorch.graphs.pointer_validation import is_read_through, writers_of
from steadytorch.graphs.pointers import Pointer, nodes_of

from .kernels import Driver, Graph, adding


def stand_for_a_gpu(monkeypatch):
    """Treats host tensors as GPU tensors and small tensors as large ones."""
    monkeypatch.setattr(pointers, "ALIGNMENT", 4)
    monkeypatch.setattr(graph_io_patching, "LEAST_BYTES", 16)
    monkeypatch.setattr(graph_io_patching, "is_dense", lambda tensor: tensor.is_contiguous())


def around(*tensors):
    """Memory of the graph's own: these tensors."""
    ranges = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    return lambda address: next((each for each in ranges if address in each), None)


class Recording:
    """Runs `y = x + 1` and extra operations on the host."""

    def __init__(self, *others, kind=0, x=None):
        self.x = torch.arange(1.0, 5.0) if x is None else x
        self.y = torch.zeros(4)
        self.graph = Graph(adding(self.x, self.y, kind), *others)
        self.driver = Driver(self.graph)
        self.kernels = nodes_of(self.driver, 1)

    def read(self, outputs=None):
        pointer = Pointer(self.kernels, 2, self.x)
        outputs = [self.y] if outputs is None else outputs
        return is_read_through(pointer, self.x, self.graph.replay, outputs)

    def written(self, *others):
        def pointer(static, kernels):
            return Pointer(kernels, 2, static)

        outputs = [self.y, *others]
        return writers_of(self.y, self.kernels, pointer, self.graph.replay, outputs, around(self.y))

    def link(self, monkeypatch, own=None):
        monkeypatch.setattr(graph_io_patching, "cuda_driver", lambda: self.driver)
        own = around(self.y) if own is None else own
        return link(self.graph, self.graph.replay, [self.x], [self.y], own)
