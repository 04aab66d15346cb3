"""Base class of transforms that convert the whole model and run it outside PyTorch."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import msgspec
import torch

from steadytorch.backends import int8
from steadytorch.backends.call import EngineModel, Run
from steadytorch.backends.exported import Exported, Form, export
from steadytorch.compiled import artefact
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import SteadyError, UnsupportedError, one_line
from steadytorch.results.candidate import NOT_INSTALLED
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import (
    INFERENCE_ONLY,
    PLAIN_CALLABLE,
    Objection,
    decide,
    not_float32,
    refuse_if,
    steered,
)
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

ThreadsName = Literal["", "one fewer", "half"]
"""The number of threads of an engine, relative to PyTorch's; "" for the same number."""
FORM = "form.json"
"""Part of every artefact: the form of calls."""
_ALTERED = "an engine converts the untouched model, so no other transform of the model applies"


class Engine(Transform):
    """Runs the whole model on a CPU inference engine other than PyTorch.

    The model is exported with static shapes, converted, and loaded by the engine. The engine holds
    copies of the weights, so later changes to the model have no effect. The converted model is
    stored as an artefact (see `compiled.artefact`). Subclasses implement `convert` and `load` with
    functions from `backends`.

    Attributes:
        engine_title: name of the engine, for messages.
        packages: import names of the packages it needs.
        extra: the extra of steadytorch that installs them.
    """

    engine = True
    risk = Risk.EXACT
    process_wide = False
    engine_title: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    extra: ClassVar[str]

    @abstractmethod
    def convert(self, exported: Exported) -> Mapping[str, Any]:
        """Converts an exported model; returns its parts by name, each a bytes-like object."""

    @abstractmethod
    def load(self, parts: Mapping[str, Any], form: Form) -> Run:
        """Loads a converted model; checks that it runs on the requested device and precision."""

    def converters(self) -> dict[str, str]:
        """Versions of the libraries that write and read the converted model."""
        return self.libraries()

    @property
    def narrows_integers(self) -> bool:
        """True: both engines compute some operators on integers, such as `//`, in float32."""
        return True

    @property
    def drops_nan(self) -> bool:
        """True: OpenVINO's ReLU and both engines' pooling and normalisation replace NaN."""
        return True

    @property
    def is_quantised(self) -> bool:
        """Whether the model is converted to ONNX and quantised to int8 by ONNX Runtime."""
        return False

    @property
    def artefact(self) -> str:
        """Name of the converted model; all engines share the int8 model."""
        return "int8" if self.is_quantised else self.name

    def objections(self, workload: Workload) -> tuple[Objection, ...]:
        """Engine-specific reasons why the transform does not apply."""
        return ()

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs the engine's packages, a CPU, and float32 inference in evaluation mode."""
        module = workload.module
        inputs = tensors_of((workload.inputs, dict(workload.kwargs)))
        return decide(
            (facts.device != "cpu", "for workloads on a CPU only"),
            (workload.is_training, INFERENCE_ONLY),
            (module is None, PLAIN_CALLABLE),
            (module is not None and module.training, "needs a model in evaluation mode"),
            not_float32(workload),
            (any(t.is_complex() for t in inputs), "an input is complex"),
            (any(t.layout != torch.strided for t in inputs), "an input is sparse"),
            steered(workload),
            *self.objections(workload),
            # Last, so that users are told to install packages only where that would help.
            not_installed(type(self)),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with the model on the engine; there is nothing to undo.

        Raises:
            UnsupportedError: the model cannot be converted, or another device or precision engaged.
        """
        if workload.model is not workload.untouched:
            raise UnsupportedError(_ALTERED)
        refuse_if(steered(workload))
        parts = artefact.obtain(
            self.artefact,
            self.converters(),
            workload,
            lambda: self._converted(workload),
            calibrated=self.is_quantised,
        )
        form = msgspec.json.decode(bytes(parts[FORM]), type=Form)
        run = self._explained("load", lambda: self.load(parts, form))
        yield workload.with_model(EngineModel(self.engine_title, run, form, workload))

    def _converted(self, workload: Workload) -> dict[str, Any]:
        exported = self._explained("convert", lambda: export(workload))
        form = exported.form
        parts = self._explained("convert", lambda: self.convert(exported))
        if self.is_quantised:
            converted = parts
            parts = self._explained("quantise", lambda: int8.quantize(converted, form, workload))
        return {FORM: msgspec.json.encode(form), **parts}

    def _explained(self, action: str, work: Any) -> Any:
        """Calls a library function and turns the library's exceptions into `UnsupportedError`."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries, about each other
                return work()
        except SteadyError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{self.engine_title} cannot {action} the model: {one_line(error)}"
            ) from error


def not_installed(kind: type[Engine]) -> Objection:
    """Objection if a Python package of an engine is not installed."""
    missing = any(find_spec(name) is None for name in kind.packages)
    return missing, f"needs {kind.engine_title}, {NOT_INSTALLED} 'steadytorch[{kind.extra}]'"


def thread_count(given: ThreadsName) -> int:
    """The number of threads for an engine."""
    present = torch.get_num_threads()
    return max(1, {"": present, "one fewer": present - 1, "half": present // 2}[given])


def thread_settings() -> list[tuple[ThreadsName, bool]]:
    """Thread settings to try: PyTorch's count without and with the engine's option, then fewer.

    Returns:
        The number of threads, and whether the engine's option for threads is on.
    """
    present = torch.get_num_threads()
    names: tuple[ThreadsName, ...] = ("one fewer", "half")
    found = {thread_count(name): name for name in reversed(names)}
    fewer: list[ThreadsName] = [name for name in names if name in found.values() and present > 1]
    return [("", False), ("", True), *((name, False) for name in fewer)]
