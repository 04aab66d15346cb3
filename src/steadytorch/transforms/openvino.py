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

    OpenVINO defaults to bf16 where the processor supports bf16. The transform therefore always
    requests a precision, and verifies it in the graph that OpenVINO executes. In int8, layers that
    are not quantised run in bf16 where the processor supports bf16. OpenVINO's threads (TBB) lose
    less speed than OpenMP's while other programs run.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Precision, number of threads, and whether threads are pinned to cores."""

        precision: Literal["f32", "bf16", "int8"] = "f32"
        threads: ThreadsName = ""
        pinned: bool = False

    name = "openvino"
    engine_title = "OpenVINO"
    packages = ("openvino",)
    extra = "openvino"

    @property
    def precision(self) -> str:
        """Precision class: `same` for f32, else bf16 or int8."""
        asked = self.parameters.precision
        return "same" if asked == "f32" else asked

    @property
    def is_quantised(self) -> bool:
        """Whether the model runs in int8."""
        return self.parameters.precision == "int8"

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Each precision with PyTorch's thread count, then with pinned threads, then with fewer."""
        return [
            cls.Parameters(precision, threads, pinned)
            for threads, pinned in thread_settings()
            for precision in ("f32", "bf16", "int8")
        ]

    def objections(self, workload: Workload) -> tuple[Objection, ...]:
        """For int8, the objections of ONNX Runtime, which quantises the model; else none."""
        if not self.is_quantised:
            return ()
        return (*OnnxRuntime().objections(workload), not_installed(OnnxRuntime))

    def libraries(self) -> dict[str, str]:
        """The version of OpenVINO, and for int8 also the version of ONNX Runtime."""
        return {**openvino.libraries(), **(self.converters() if self.is_quantised else {})}

    def converters(self) -> dict[str, str]:
        """The version of OpenVINO; for int8, the version of ONNX Runtime instead."""
        return onnxruntime.libraries() if self.is_quantised else openvino.libraries()

    def convert(self, exported: Exported) -> Mapping[str, Any]:
        """Converts to OpenVINO's IR, or to ONNX for int8."""
        into = onnxruntime if self.is_quantised else openvino
        return into.convert(exported)

    def load(self, parts: Mapping[str, Any], form: Form) -> Run:
        """Compiles the IR and checks the device and precision that OpenVINO uses."""
        asked = self.parameters
        threads = thread_count(asked.threads)
        return openvino.load(parts, form, asked.precision, threads, asked.pinned)
