"""Runs the model on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from steadytorch.backends import onnxruntime
from steadytorch.backends.call import Run
from steadytorch.backends.exported import Exported, Form
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.engine import Engine, ThreadsName, thread_count, thread_settings
from steadytorch.transforms.traits import Objection
from steadytorch.workload.workload import Workload


class OnnxRuntime(Engine):
    """Runs the whole model on ONNX Runtime's CPU provider, in float32 or with layers in int8."""

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Precision ("" for float32), number of threads, and whether waiting threads sleep."""

        threads: ThreadsName = ""
        passive: bool = False
        precision: Literal["", "int8"] = ""

    name = "onnxruntime"
    engine_title = "ONNX Runtime"
    packages = ("onnxruntime", "onnx", "onnxscript")
    extra = "onnxruntime"

    @property
    def precision(self) -> str:
        """`int8`, else `same`."""
        return self.parameters.precision or "same"

    @property
    def is_quantised(self) -> bool:
        """Whether the model runs in int8."""
        return self.parameters.precision == "int8"

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Spinning threads first, then passive threads, then fewer; each in float32 and int8."""
        return [
            cls.Parameters(threads, passive, precision)
            for threads, passive in thread_settings()
            for precision in ("", "int8")
        ]

    def objections(self, workload: Workload) -> tuple[Objection, ...]:
        """Objection if the weights exceed ONNX's limit of 2 GiB."""
        module = workload.module
        held = () if module is None else chain(module.parameters(), module.buffers())
        size = sum(tensor.nbytes for tensor in held)
        reason = f"its weights have {size / 2**30:.1f} GiB, ONNX's limit is 2 GiB"
        return ((size > onnxruntime.MOST_BYTES, reason),)

    def libraries(self) -> dict[str, str]:
        """The version of ONNX Runtime."""
        return onnxruntime.libraries()

    def convert(self, exported: Exported) -> Mapping[str, Any]:
        """Converts to ONNX."""
        return onnxruntime.convert(exported)

    def load(self, parts: Mapping[str, Any], form: Form) -> Run:
        """Creates an inference session and checks that it uses the CPU provider."""
        asked = self.parameters
        return onnxruntime.load(parts, form, thread_count(asked.threads), not asked.passive)
