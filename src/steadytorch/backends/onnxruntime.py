"""Converts a model to ONNX and runs it on ONNX Runtime's CPU execution provider."""

from __future__ import annotations

import io
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadytorch.backends import int8
from steadytorch.backends.call import Run
from steadytorch.backends.exported import WRITES, Exported, Form
from steadytorch.backends.int8 import LAYERS, MODEL
from steadytorch.errors import UnsupportedError

MOST_BYTES = (1 << 31) - 1
"""Limit of ONNX on a model in one file."""

_PROVIDER = "CPUExecutionProvider"
_INT8 = frozenset({"MatMulIntegerToFloat", "QGemm", "QLinearConv", "QLinearMatMul"})
"""Kernels that multiply in int8."""
_TYPES = {"float": "float32", "double": "float64"}
"""Names of ONNX Runtime's types in NumPy, where they differ."""


def libraries() -> dict[str, str]:
    """Returns ONNX Runtime's package name and installed version."""
    return {"onnxruntime": version("onnxruntime")}


def convert(exported: Exported) -> dict[str, bytes]:
    """Converts an exported model to ONNX.

    Raises:
        UnsupportedError: the model writes to its state or inputs, or exceeds ONNX's limit.
        Exception: PyTorch cannot convert it, as for an unknown operator.
    """
    from torch.export import default_decompositions

    # Decomposed for strided inputs, a linear layer would hold a copy of its weights per batch item.
    table = default_decompositions()
    table.pop(torch.ops.aten.linear.default, None)
    with torch.no_grad():
        program = exported.program.run_decompositions(table)
        signature = program.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise UnsupportedError(WRITES)
        # The exporter reports its progress on standard output.
        with redirect_stdout(io.StringIO()), without_torchvision_warnings():
            converted = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
    if converted is None:
        raise UnsupportedError("PyTorch's exporter returned no model")
    _simplify(converted.model)
    try:
        data = converted.model_proto.SerializeToString()
    except ValueError as error:  # protobuf's own limit
        raise UnsupportedError(f"the model exceeds ONNX's limit of 2 GiB: {error}") from error
    return {MODEL: data}


def _simplify(model: Any) -> None:
    """Folds constants, batch norms and nested clamps, as far as results stay the same.

    The exporter's own optimisation is off. It drops sums with constants up to 1e-8 and products
    with constants within 1e-5 of 1, so `x / (norm + 1e-8)` was NaN for `x = 0`.
    """
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common

    kept = (
        common.fuse_batchnorm_into_conv_rule,
        common.fuse_batchnorm_into_conv_transpose_rule,
        common.fuse_batchnorm_into_gemm_rule,
        common.max_max_rule,
        common.max_min_rule,
        common.min_max_rule,
        common.min_min_rule,
        common.successive_clip_relu_rule,
        common.successive_clip_rule,
        common.successive_relu_clip_rule,
        common.successive_relu_rule,
    )
    optimizer.inline(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    rewriter.rewrite(model, pattern_rewrite_rules=kept)
    optimizer.remove_unused_nodes(model)


REGISTRATION = "torch.onnx._internal.exporter._registration"
"""The logger that warns of each operator of torchvision if that is not installed."""


def _is_not_of_torchvision(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("torchvision is not installed")


@contextmanager
def without_torchvision_warnings() -> Iterator[None]:
    """Suppresses the ONNX exporter's warnings that torchvision is not installed."""
    logger = logging.getLogger(REGISTRATION)
    logger.addFilter(_is_not_of_torchvision)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_of_torchvision)


def load(parts: Mapping[str, Any], form: Form, threads: int, spins: bool) -> Run:
    """Creates an ONNX Runtime session for this CPU.

    Args:
        parts: what `convert` or `int8.quantize` returned, as bytes or buffers.
        form: names of the model's inputs.
        threads: number of threads.
        spins: whether waiting threads keep their cores busy.

    Raises:
        UnsupportedError: another execution provider took the model, or a quantised layer does not
            run in int8.
        Exception: the session cannot be made.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    with tempfile.TemporaryDirectory() as folder:
        options.enable_profiling = LAYERS in parts
        options.profile_file_prefix = str(Path(folder) / "run")
        session = onnxruntime.InferenceSession(bytes(parts[MODEL]), options, providers=[_PROVIDER])
        session.disable_fallback()
        prove(session)
        if LAYERS in parts:
            int8.prove(_int8_layers(session), parts, "ONNX Runtime")
    return _Session(onnxruntime.OrtValue, session, form)


def prove(session: Any) -> None:
    """Checks that a session uses the CPU execution provider only.

    Raises:
        UnsupportedError: the session uses another execution provider.
    """
    if (found := session.get_providers()) != [_PROVIDER]:
        raise UnsupportedError(f"ONNX Runtime runs it on {', '.join(found)}, expected {_PROVIDER}")


def _int8_layers(session: Any) -> int:
    """Counts the layers that run in int8 in a profile of one call; ends the session's profiling."""
    given = {
        each.name: np.zeros(each.shape, _numpy_type(each.type)) for each in session.get_inputs()
    }
    session.run(None, given)
    events = json.loads(Path(session.end_profiling()).read_bytes())
    kernels = [e["args"].get("op_name") for e in events if e["name"].endswith("_kernel_time")]
    return sum(kernel in _INT8 for kernel in kernels)


def _numpy_type(name: str) -> str:
    """Returns the NumPy name of an ONNX Runtime type such as `tensor(float)`."""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(inner, inner)


class _Session:
    """Runs an ONNX Runtime session.

    PyTorch and ONNX Runtime share the memory of inputs and results.

    Args:
        kind: ONNX Runtime's class `OrtValue`.
        session: the session.
        form: names of the model's inputs.
    """

    def __init__(self, kind: Any, session: Any, form: Form) -> None:
        self._value, self._run = kind.ortvalue_from_numpy, session.run_with_ort_values
        # Conversion may drop inputs that the model does not use, and keeps names.
        taken = {each.name for each in session.get_inputs()}
        if not taken <= set(form.inputs):
            raise UnsupportedError(f"conversion renamed the inputs to {', '.join(sorted(taken))}")
        self._names = [(i, name) for i, name in enumerate(form.inputs) if name in taken]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        given = {name: self._value(tensors[i].numpy()) for i, name in self._names}
        found = self._run(None, given)
        return [torch.from_dlpack(each._ortvalue.to_dlpack()) for each in found]
