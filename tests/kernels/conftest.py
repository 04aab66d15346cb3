from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steadytorch import kernels
from steadytorch.kernels import (
    activated_linear,
    bias_add_relu,
    conv_relu_max_pool,
    depthwise_conv,
    pointwise_conv,
    relu_max_pool,
    small_channel_conv,
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels in Triton's interpreter, on CPU tensors."""
    pytest.importorskip("triton", reason="the programs are interpreted by Triton: not installed")
    # Read where a program is defined: this copy of the file is for the interpreter alone.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for file in ("programs", "separable_programs"):
        name = f"{kernels.__name__}.{file}"
        spec = importlib.util.spec_from_file_location(
            name, Path(kernels.__path__[0]) / f"{file}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        programs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(programs)
        monkeypatch.setitem(sys.modules, name, programs)
        monkeypatch.setattr(kernels, file, programs, raising=False)
    language: Any = importlib.import_module("triton.language")
    largest = language.standard._elementwise_max
    # As Triton writes it, which was read before: for a GPU.
    monkeypatch.setattr(language, "max", lambda x, axis: language.reduce(x, axis, largest))
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # As Triton writes it, NumPy 2.4 refuses: how often a loop runs is an array of one number.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder: Any = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        # As Triton writes it, it multiplies what bits of bfloat16 mean as integers.
        a, b = (
            self.create_fp_ext(t, language.float32) if t.dtype.scalar == language.bfloat16 else t
            for t in (a, b)
        )
        return dot(self, a, b, *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(builder, "create_dot", widened)
    separable = (pointwise_conv, depthwise_conv, small_channel_conv, activated_linear)
    operators = (relu_max_pool, bias_add_relu, conv_relu_max_pool, *separable)
    for module in operators:
        module.prepared.cache_clear()
    yield
    for module in operators:
        module.prepared.cache_clear()
