"""Runs the model on OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from steadytorch.backends import onnxruntime, openvino
from steadytorch.backends.call import Run
from steadytorch.backends.exported import Exported, Form
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.engine import (
    Engine,
    ThreadsName,
    not_installed,
    thread_count,
    thread_settings,
)
from steadytorch.transforms.onnxruntime import OnnxRuntime
from steadytorch.transforms.traits import Objection
from steadytorch.workload.workload import Workload


class OpenVino(Engine):
    """Runs the whole model on OpenVINO's CPU plug-in.

    Its default precision is bf16 where the processor has it, so the precision is always requested
    and then proven by the graph that OpenVINO executes. In int8, layers that are not quantised run
    in bf16 where the processor has it. Its threads (TBB) hold up better than OpenMP's beside other
    programs.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Type of arithmetic, number of threads, and whether these are pinned."""

        precision: Literal["f32", "bf16", "int8"] = "f32"
        threads: ThreadsName = ""
        pinned: bool = False

    name = "openvino"
    engine_title = "OpenVINO"
    packages = ("openvino",)
    extra = "openvino"

    @property
    def precision(self) -> str:
        """`same` for f32, else bf16 or int8."""
        asked = self.parameters.precision
        return "same" if asked == "f32" else asked

    @property
    def is_quantised(self) -> bool:
        """Whether it runs in int8."""
        return self.parameters.precision == "int8"

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """All precisions; then pinned threads, and fewer of them."""
        return [
            cls.Parameters(precision, threads, pinned)
            for threads, pinned in thread_settings()
            for precision in ("f32", "bf16", "int8")
        ]

    def objections(self, workload: Workload) -> tuple[Objection, ...]:
        """ONNX's limit and packages for int8, which ONNX Runtime quantises."""
        if not self.is_quantised:
            return ()
        return (*OnnxRuntime().objections(workload), not_installed(OnnxRuntime))

    def libraries(self) -> dict[str, str]:
        """The version of OpenVINO, and in int8 that of ONNX Runtime."""
        return {**openvino.libraries(), **(self.converters() if self.is_quantised else {})}

    def converters(self) -> dict[str, str]:
        """The version of OpenVINO, or that of ONNX Runtime in int8."""
        return onnxruntime.libraries() if self.is_quantised else openvino.libraries()

    def convert(self, exported: Exported) -> Mapping[str, Any]:
        """Converts to OpenVINO's IR, or to ONNX for int8."""
        into = onnxruntime if self.is_quantised else openvino
        return into.convert(exported)

    def load(self, parts: Mapping[str, Any], form: Form) -> Run:
        """Compiles the IR and proves device and precision."""
        asked = self.parameters
        threads = thread_count(asked.threads)
        return openvino.load(parts, form, asked.precision, threads, asked.pinned)
