from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steadytorch import kernels
from steadytorch.kernels import bias_add_relu, conv_relu_max_pool, depthwise_conv, relu_max_pool


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has Triton's interpreter run the programs, on tensors of the CPU."""
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
    operators = (relu_max_pool, bias_add_relu, conv_relu_max_pool, depthwise_conv)
    for module in operators:
        module._fused.cache_clear()
    yield
    for module in operators:
        module._fused.cache_clear()
