"""Converts a model to OpenVINO IR, runs it on the CPU, and checks the precision in effect."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadytorch.backends import int8
from steadytorch.backends.call import Run
from steadytorch.backends.exported import WRITES, Exported, Form, Layout
from steadytorch.errors import UnsupportedError

MODEL, WEIGHTS = "model.xml", "model.bin"
"""Parts of a converted model: OpenVINO's IR."""

_TELEMETRY = "openvino_telemetry"
_FLOATING = frozenset({"f64", "f32", "bf16", "f16"})
_WRONG = (
    torch.ops.aten.log_sigmoid_forward.default,  # -inf below -88
    torch.ops.aten.std.correction,  # without dimensions, ignores the correction
)
"""Operators that OpenVINO 2026.4 converts wrongly; PyTorch's decompositions replace them."""
_FLOOR_DIVISIONS = (
    torch.ops.aten.floor_divide.default,
    torch.ops.aten.floor_divide.Scalar,
    torch.ops.aten.div.Tensor_mode,
    torch.ops.aten.div.Scalar_mode,
)
_PRODUCTS = frozenset({"Convolution", "FullyConnected", "MatMul"})


def libraries() -> dict[str, str]:
    """Returns OpenVINO's package name and installed version."""
    return {"openvino": version("openvino")}


def convert(exported: Exported) -> dict[str, bytes]:
    """Converts an exported model to OpenVINO IR with static shapes; returns the IR files by name.

    Uses OpenVINO's frontend directly, because `openvino.convert_model` sends telemetry over the
    network.

    Raises:
        UnsupportedError: the model writes to its state or inputs.
        Exception: OpenVINO cannot convert it, as for an unknown operator.
    """
    openvino = import_openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
    from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose
    from torch.export import default_decompositions

    table = default_decompositions()
    for operator in ops_to_not_decompose():
        if operator in table and operator not in _WRONG:
            table.pop(operator)
    table.update(dict.fromkeys(_FLOOR_DIVISIONS, _floor_divided))
    table[torch.ops.aten.scaled_dot_product_attention.default] = _Attention()
    with torch.no_grad():
        program = exported.program.run_decompositions(table)
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise UnsupportedError(WRITES)
    decoder = TorchFXPythonDecoder(program.module(), dynamic_shapes=False)
    frontend = FrontEndManager().load_by_framework("pytorch")
    model = frontend.convert(frontend.load(decoder))
    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(model, Path(folder) / MODEL, compress_to_fp16=False)
        return {name: (Path(folder) / name).read_bytes() for name in (MODEL, WEIGHTS)}


def _floor_divided(number: Any, by: Any, rounding_mode: str | None = "floor") -> Any:
    """A quotient of integers rounded down; OpenVINO 2026.4 rounds it to zero: -1 // 3 gave 0.

    Returns:
        The quotient; NotImplemented for others, which stay as they are.
    """
    if rounding_mode != "floor" or torch.result_type(number, by).is_floating_point:
        return NotImplemented
    whole = number - torch.remainder(number, by)
    return torch.div(whole, by, rounding_mode="trunc")


class _Attention:
    """Attention that is 0 where a mask allows nothing, as in PyTorch; OpenVINO 2026.4 gives NaN.

    Calls without a mask stay as they are.
    """

    def __init__(self) -> None:
        self._is_inside = False

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *args: Any,
        **how: Any,
    ) -> Any:
        if attn_mask is None or self._is_inside:
            return NotImplemented
        is_bool = attn_mask.dtype == torch.bool
        allowed = (attn_mask if is_bool else attn_mask > -torch.inf).any(-1, keepdim=True)
        mask = attn_mask | ~allowed if is_bool else torch.where(allowed, attn_mask, 0.0)
        self._is_inside = True
        try:
            attention = torch.ops.aten.scaled_dot_product_attention.default
            found = attention(query, key, value, mask, *args, **how)
        finally:
            self._is_inside = False
        return torch.where(allowed, found, 0.0)


def load(parts: Mapping[str, Any], form: Form, precision: str, threads: int, pinned: bool) -> Run:
    """Compiles a converted model for this CPU and checks its device and precision.

    The performance hint is always LATENCY, because only one inference request runs at a time.

    Args:
        parts: files by name from `convert` or, for int8, `int8.quantize`, as bytes or buffers.
        form: names of the inputs, and layout of the results.
        precision: `f32`, `bf16` or `int8`. In int8, the type of floating-point arithmetic is bf16
            where the processor has it.
        threads: number of threads.
        pinned: whether OpenVINO pins its threads to cores.

    Raises:
        UnsupportedError: the library runs the model elsewhere, or in another precision.
        Exception: the model cannot be compiled.
    """
    openvino, core = import_openvino(), shared_core()
    if precision == "int8":
        model = core.read_model(io.BytesIO(parts[int8.MODEL]))
        has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        floating = "bf16" if has_bf16 else "f32"
    else:
        weights = openvino.Tensor(np.frombuffer(parts[WEIGHTS], dtype=np.uint8))
        model, floating = core.read_model(bytes(parts[MODEL]), weights), precision
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": floating,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": pinned,
        # Neither applies to float weights; off, so that a new default cannot lower the precision.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "KV_CACHE_PRECISION": "f32",
    }
    compiled = core.compile_model(model, "CPU", settings)
    prove(compiled, precision)
    if precision == "int8":
        int8.prove(_int8_layers(compiled), parts, "OpenVINO")
    return _Request(openvino, compiled, form)


def shared_core() -> Any:
    """OpenVINO's core for this process, which is never freed.

    OpenVINO 2026.4 gives the thread that makes a core an alternate signal stack. Freeing the core
    restores the stack of before. After two cores were freed in the order in which they were made,
    the thread has a stack that no longer exists, and the next signal kills the process.
    """
    return _core_of(os.getpid())  # a core's threads do not survive a fork


@cache
def _core_of(process: int) -> Any:
    return import_openvino().Core()


def prove(compiled: Any, precision: str) -> None:
    """Checks a compiled model's device, and its precision according to OpenVINO's runtime graph.

    Raises:
        UnsupportedError: it runs on another device, a layer computes in lower precision than
            `precision`, or no layer computes in `bf16` although that was requested.
    """
    devices = list(compiled.get_property("EXECUTION_DEVICES"))
    if devices != ["CPU"]:
        raise UnsupportedError(f"OpenVINO runs it on {', '.join(devices)}, expected CPU")
    found = set(_precisions(compiled))
    if precision == "int8":
        return
    if precision == "bf16":
        if "bf16" not in found:
            raise UnsupportedError("bf16 did not engage: OpenVINO computes every layer in f32")
    elif lower := sorted(found & {"bf16", "f16"}):
        raise UnsupportedError(f"OpenVINO computes in {', '.join(lower)}, expected {precision}")


def _precisions(compiled: Any) -> list[str]:
    """Returns the type of each executed layer that computes in floating point."""
    return [name for _, name in _executed(compiled) if name in _FLOATING]


def _int8_layers(compiled: Any) -> int:
    """Counts the layers that multiply in int8."""
    return sum(kind in _PRODUCTS and name in ("i8", "u8") for kind, name in _executed(compiled))


def _executed(compiled: Any) -> list[tuple[str, str]]:
    """Returns the layer type and runtime precision of each executed layer."""
    info = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    return [
        (each["layerType"].astype(str), each["runtimePrecision"].astype(str))
        for each in info
        if "runtimePrecision" in each
    ]


class _Request:
    """Runs a compiled model. PyTorch and OpenVINO share the memory of inputs and results.

    Args:
        openvino: the library.
        compiled: the compiled model.
        form: the form of calls.
    """

    def __init__(self, openvino: ModuleType, compiled: Any, form: Form) -> None:
        self._tensor, self._request = openvino.Tensor, compiled.create_infer_request()
        # Conversion drops inputs that the model does not use, and keeps names.
        self._order = [form.inputs.index(each.any_name) for each in compiled.inputs]
        self._types = [each.element_type.to_dtype() for each in compiled.inputs]
        expected = [result for result in form.results if isinstance(result, Layout)]
        self._results = [
            (result.shape, _torch_type(output.element_type.to_dtype()))
            for result, output in zip(expected, compiled.outputs, strict=True)
        ]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        request, made = self._request, []
        for place, (index, dtype) in enumerate(zip(self._order, self._types, strict=True)):
            values = tensors[index].numpy()
            if values.dtype != dtype:
                raise TypeError(f"input {index} is {values.dtype}, the engine takes {dtype}")
            request.set_input_tensor(place, self._tensor(values, shared_memory=True))
        for place, (shape, dtype) in enumerate(self._results):
            result = torch.empty(shape, dtype=dtype)
            request.set_output_tensor(place, self._tensor(result.numpy(), shared_memory=True))
            made.append(result)
        request.infer()
        return made


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def import_openvino() -> ModuleType:
    """Imports OpenVINO without `openvino_telemetry`, which would send usage data on import."""
    if "openvino" in sys.modules:
        return sys.modules["openvino"]
    was_there = _TELEMETRY in sys.modules
    if not was_there:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        import openvino
    finally:
        if not was_there:
            del sys.modules[_TELEMETRY]
    return openvino
