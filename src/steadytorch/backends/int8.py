"""Static post-training int8 quantisation with ONNX Runtime's quantisation tool.

The quantised model is an ONNX graph with pairs of QuantizeLinear and DequantizeLinear nodes (QDQ).
ONNX Runtime and OpenVINO both run quantised layers in int8. Weights are quantised per channel, and
activations per tensor with calibrated ranges.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from steadytorch.backends.call import plain
from steadytorch.backends.exported import Form, flattened
from steadytorch.device.host import saturates_int8
from steadytorch.errors import UnsupportedError
from steadytorch.workload.feed import Batch
from steadytorch.workload.workload import Workload

MODEL = "model.onnx"
"""Part of a model converted to ONNX."""
LAYERS = "layers.json"
"""Part of a quantised model: the number of layers that must run in int8."""
BATCHES = 4
"""Batches of a loader that calibrate the ranges of activations."""
NOTHING = "int8 needs a convolution or matrix product with constant weights; the model has neither"

_PRODUCTS = ("Conv", "Gemm", "MatMul")
_BETWEEN = ("Add", "AveragePool", "Clip", "Concat", "GlobalAveragePool", "MaxPool", "Relu")
"""Operators that keep values between two quantised convolutions in int8."""


def quantize(parts: Mapping[str, bytes], form: Form, workload: Workload) -> dict[str, bytes]:
    """Quantises an ONNX model, calibrated on the workload's inputs or its loader's batches.

    Args:
        parts: the model's files by name, from `onnxruntime.convert`.
        form: names of the model's inputs.
        workload: the untouched workload.

    Raises:
        UnsupportedError: the model has nothing to quantise.
        Exception: ONNX Runtime cannot quantise the model, or the loader fails.
    """
    import onnx
    from onnxruntime import quantization

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODEL
        path.write_bytes(parts[MODEL])
        quantization.quant_pre_process(path, path, skip_symbolic_shape=True)
        model = onnx.load(path)
        layers, others = chosen(model.graph)
        if not layers:
            raise UnsupportedError(NOTHING)
        named = {each.name for each in model.graph.input}
        with closing(calls(workload)) as given:
            reader: Any = _Reader(given, form, named)
            quantization.quantize_static(
                model,
                path,
                reader,
                per_channel=True,
                reduce_range=saturates_int8(),
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                op_types_to_quantize=[*_PRODUCTS, *_BETWEEN],
                nodes_to_quantize=[*layers, *others],
                # Rounding the sums of products gains no time; sums in float cost no accuracy.
                extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
            )
        return {MODEL: path.read_bytes(), LAYERS: msgspec.json.encode(len(layers))}


def chosen(graph: Any) -> tuple[list[str], list[str]]:
    """Names the nodes to quantise: products with constant weights, and operators on int8 values.

    Nodes without a name are given a name.

    Args:
        graph: a graph of ONNX, in topological order.
    """
    weights = {each.name: len(each.dims) for each in graph.initializer}
    quantised: set[str] = set()
    layers, others = [], []
    for number, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
        if node.op_type in _PRODUCTS and _has_weight(node, weights):
            layers.append(node.name)
            if node.op_type == "Conv":
                quantised.update(node.output)
        elif node.op_type in _BETWEEN and quantised.issuperset(_values(node)):
            others.append(node.name)
            quantised.update(node.output)
    return layers, others


def _has_weight(node: Any, weights: Mapping[str, int]) -> bool:
    found = weights.get(node.input[1])
    return found is not None and (node.op_type == "Conv" or found == 2)


def _values(node: Any) -> list[str]:
    """Returns the names of a node's data inputs, without the limits of a Clip."""
    return list(node.input[:1] if node.op_type == "Clip" else node.input)


def calls(workload: Workload) -> Generator[list[Tensor], None, None]:
    """Yields the flat tensors of each calibration call, from the loader's batches or the inputs."""
    own = Batch(workload.inputs, dict(workload.kwargs))
    feed = workload.feed
    batches = [own] if feed is None else feed.batches(own, workload.device)
    for batch in islice(batches, BATCHES):
        leaves = flattened(batch.inputs, batch.kwargs)
        yield [plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


class _Reader:
    """A `CalibrationDataReader` that feeds calibration calls to ONNX Runtime.

    Args:
        given: the flat tensors of each call.
        form: names of the model's inputs.
        taken: names of the inputs that the model takes; conversion may drop unused ones.
    """

    def __init__(self, given: Iterator[list[Tensor]], form: Form, taken: set[str]) -> None:
        self._given, self._form, self._taken = given, form, taken

    def get_next(self) -> dict[str, Any] | None:
        """Returns the next call's input arrays by name; None after the last call."""
        tensors = next(self._given, None)
        if tensors is None:
            return None
        named = zip(self._form.inputs, tensors, strict=True)
        return {name: tensor.numpy() for name, tensor in named if name in self._taken}


def prove(run: int, parts: Mapping[str, Any], engine: str) -> None:
    """Checks that an engine runs every quantised layer in int8.

    Args:
        run: number of layers that the engine runs in int8.
        parts: the quantised model.
        engine: the engine, for the message.

    Raises:
        UnsupportedError: the engine runs fewer layers in int8.
    """
    layers = msgspec.json.decode(bytes(parts[LAYERS]), type=int)
    if run < layers:
        raise UnsupportedError(
            f"int8 did not engage: {engine} runs {run} of {layers} quantised layers in int8"
        )
