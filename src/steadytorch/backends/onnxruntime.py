"""ONNX Runtime: converting to ONNX, and running it on its CPU provider."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from steadytorch.backends.call import Run
from steadytorch.backends.exported import WRITES, Exported, Form
from steadytorch.errors import UnsupportedError

MODEL = "model.onnx"
"""The part of a converted model."""
MOST_BYTES = (1 << 31) - 1
"""Limit of ONNX on a model in one file."""

_PROVIDER = "CPUExecutionProvider"


def libraries() -> dict[str, str]:
    """The version of the installed library, by name."""
    return {"onnxruntime": version("onnxruntime")}


def convert(exported: Exported) -> dict[str, bytes]:
    """Converts an exported model to ONNX.

    Raises:
        UnsupportedError: the model writes to its state or inputs, or exceeds ONNX's limit.
        Exception: PyTorch cannot convert it, as for an unknown operator.
    """
    with torch.no_grad():
        program = exported.program.run_decompositions()
        signature = program.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise UnsupportedError(WRITES)
        # The exporter reports its progress on standard output.
        with redirect_stdout(io.StringIO()):
            converted = torch.onnx.export(program, dynamo=True, verbose=False)
    if converted is None:
        raise UnsupportedError("PyTorch's exporter returned no model")
    try:
        data = converted.model_proto.SerializeToString()
    except ValueError as error:  # protobuf's own limit
        raise UnsupportedError(f"the model exceeds ONNX's limit of 2 GiB: {error}") from error
    return {MODEL: data}


def load(parts: Mapping[str, Any], form: Form, threads: int, spins: bool) -> Run:
    """Makes a session for this CPU.

    Args:
        parts: what `convert` returned, as bytes or buffers.
        form: the form of calls.
        threads: number of threads.
        spins: whether waiting threads keep their cores busy.

    Raises:
        UnsupportedError: another execution provider took the model.
        Exception: the session cannot be made.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    session = onnxruntime.InferenceSession(bytes(parts[MODEL]), options, providers=[_PROVIDER])
    session.disable_fallback()
    prove(session)
    return _Session(onnxruntime.OrtValue, session, form)


def prove(session: Any) -> None:
    """Checks that only the CPU provider runs a session.

    Raises:
        UnsupportedError: another provider takes part.
    """
    if (found := session.get_providers()) != [_PROVIDER]:
        raise UnsupportedError(f"ONNX Runtime runs it on {', '.join(found)}, expected {_PROVIDER}")


class _Session:
    """Runs a session. Inputs and results are shared with PyTorch, not copied.

    Args:
        kind: the library's class of values.
        session: the session.
        form: the form of calls.
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
