"""Torch-TensorRT engines as candidates of steadytorch.

Written against `torch_tensorrt.dynamo.compile` of Torch-TensorRT 2.8. It has not been run on a GPU
yet. Engines are machine code for one GPU, so they are built in each process and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

import msgspec
import torch

from steadytorch.plugins import (
    Applicable,
    DeviceFacts,
    NotApplicable,
    Risk,
    Transform,
    UnsupportedError,
    Workload,
)

_ENGINE = "TorchTensorRTModule"
"""End of the class names of submodules that hold an engine."""


class TorchTensorRt(Transform):
    """Exports the model and compiles all of it to TensorRT engines for one signature."""

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """The lowest precision that TensorRT may choose for a layer."""

        precision: Literal["f32", "fp16"] = "f32"

    name = "torch_tensorrt"
    engine = True
    risk = Risk.HALF
    process_wide = False

    @property
    def precision(self) -> str:
        """`same` for f32, with TF32 off, else fp16."""
        return "same" if self.parameters.precision == "f32" else "fp16"

    def libraries(self) -> dict[str, str]:
        """The version of Torch-TensorRT."""
        return {"torch-tensorrt": version("torch-tensorrt")}

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Both precisions."""
        return (cls.Parameters("f32"), cls.Parameters("fp16"))

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, Torch-TensorRT, and inference in float32 by a module in evaluation mode."""
        if facts.device != "cuda":
            return NotApplicable("no CUDA device")
        if find_spec("torch_tensorrt") is None:
            return NotApplicable("needs Torch-TensorRT, which is not installed")
        module = workload.module
        if workload.is_training or module is None or module.training:
            return NotApplicable("for inference by an nn.Module in evaluation mode only")
        if workload.dtype != torch.float32:
            return NotApplicable(f"needs float32, the workload computes in {workload.dtype}")
        return Applicable()

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on TensorRT engines.

        Raises:
            UnsupportedError: a part of the model would run outside TensorRT.
        """
        import torch_tensorrt

        half = self.parameters.precision == "fp16"
        types = {torch.float32, torch.float16} if half else {torch.float32}
        args, kwargs = workload.inputs, dict(workload.kwargs)
        with torch.no_grad():
            program = torch.export.export(workload.model, args, kwargs, strict=False)
            compiled = torch_tensorrt.dynamo.compile(
                program,
                arg_inputs=args,
                kwarg_inputs=kwargs,
                enabled_precisions=types,
                use_explicit_typing=False,
                disable_tf32=True,
                min_block_size=1,
                require_full_compilation=True,
            )
        prove(compiled)
        yield workload.with_model(_WithoutGradients(compiled))


def prove(compiled: torch.nn.Module) -> None:
    """Checks that engines run the whole model.

    Raises:
        UnsupportedError: there is no engine, or operators of PyTorch remain beside the engines.
    """
    children = [type(child).__name__ for child in compiled.children()]
    engines = [name for name in children if name.endswith(_ENGINE)]
    if not engines:
        raise UnsupportedError("TensorRT took no part of the model")
    if len(engines) < len(children):
        count = len(children) - len(engines)
        raise UnsupportedError(f"TensorRT left {count} parts of the model to PyTorch")


class _WithoutGradients:
    """Calls a compiled module without recording gradients."""

    def __init__(self, compiled: torch.nn.Module) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.compiled(*args, **kwargs)
