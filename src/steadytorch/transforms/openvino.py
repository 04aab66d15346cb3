"""Runs the model on OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from steadytorch.backends import openvino
from steadytorch.backends.call import Run
from steadytorch.backends.exported import Exported, Form
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.engine import Engine, ThreadsName, fewer_threads, thread_count


class OpenVino(Engine):
    """Runs the whole model on OpenVINO's CPU plug-in.

    Its default precision is bf16 where the processor has it, so the precision is always requested
    and then proven by the graph that OpenVINO executes. Its threads (TBB) hold up better than
    OpenMP's beside other programs.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Type of floating-point arithmetic, number of threads, and whether these are pinned."""

        precision: Literal["f32", "bf16"] = "f32"
        threads: ThreadsName = ""
        pinned: bool = False

    name = "openvino"
    engine_title = "OpenVINO"
    packages = ("openvino",)
    extra = "openvino"

    @property
    def precision(self) -> str:
        """`same` for f32, else bf16."""
        return "bf16" if self.parameters.precision == "bf16" else "same"

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Both precisions; then pinned threads, and fewer of them."""
        both = [cls.Parameters("f32"), cls.Parameters("bf16")]
        pinned = [cls.Parameters("f32", "", True), cls.Parameters("bf16", "", True)]
        fewer = [cls.Parameters(p, name) for name in fewer_threads() for p in ("f32", "bf16")]
        return (*both, *pinned, *fewer)

    def libraries(self) -> dict[str, str]:
        """The version of OpenVINO."""
        return openvino.libraries()

    def convert(self, exported: Exported) -> Mapping[str, Any]:
        """Converts to OpenVINO's IR."""
        return openvino.convert(exported)

    def load(self, parts: Mapping[str, Any], form: Form) -> Run:
        """Compiles the IR and proves device and precision."""
        asked = self.parameters
        threads = thread_count(asked.threads)
        return openvino.load(parts, form, asked.precision, threads, asked.pinned)
