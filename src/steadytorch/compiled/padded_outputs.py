"""Outputs of compiled code with their own strides, where Inductor pads a matrix product.

For the matrix units of a GPU, Inductor pads products whose sizes are no multiple of 8 and returns a
view of the padded result. It notes the strides that outputs must keep only after that. So logits
over 50,257 tokens would get rows of 50,264, and code that flattens them could fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
}
_OWN = "steadytorch_own_slice"


class _NoteSlices(CustomGraphPass):
    """Marks the slices of the model, before Inductor adds those of padded products."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
            node.meta[_OWN] = True

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,), "note")


class _CopyOutputs(CustomGraphPass):
    """Copies padded products of which outputs are views; gradients keep theirs."""

    def __call__(self, graph: fx.Graph) -> None:
        (end,) = graph.find_nodes(op="output")
        gradients = _of_tangents(graph)
        for output in end.all_input_nodes:
            above, node = end, output
            while node.target in _VIEWS and not _is_padding(node):
                above, node = node, node.all_input_nodes[0]
            if node in gradients or not _is_padding(node):
                continue
            with graph.inserting_after(node):
                copy = graph.call_function(
                    aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            copy.meta["val"] = node.meta["val"].contiguous()
            above.replace_input_with(node, copy)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,), "copy")


def options() -> dict[str, Any]:
    """Options of Inductor that give outputs their own strides."""
    return {"joint_custom_pre_pass": _NoteSlices(), "joint_custom_post_pass": _CopyOutputs()}


def _is_padding(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and _OWN not in node.meta


def _of_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward pass: those that depend on a gradient of an output.

    Source of the name: `_is_tangent` in PyTorch's partitioner.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
