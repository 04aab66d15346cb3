from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from steadytorch.conv.check import operands, verify
from steadytorch.conv.engines import OUTPUT
from steadytorch.conv.executables import DTYPES, empty
from steadytorch.conv.problem import parse

SHAPES = "i2x16x9x9/w8x4x3x3/s2x2/p1x1/d1x1/g4"
BOUNDS = {"fp32": 1e-6, "tf32": 1e-6, "bf16": 6e-3, "fp16": 1e-3}
RESULTS = {"fprop": (2, 8, 5, 5), "dgrad": (2, 16, 9, 9), "wgrad": (8, 4, 3, 3)}


@pytest.mark.parametrize("number", BOUNDS)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("operation", RESULTS)
def test_pytorch_is_as_near_to_the_reference_as_its_type_allows(operation, layout, number):
    given = operands(parse(f"{operation}/none/{number}/{layout}/{SHAPES}"), torch.device("cpu"))
    found = given.by_pytorch()
    assert found.shape == given.reference.shape == RESULTS[operation]
    assert given.error_of(found) < BOUNDS[number]


@pytest.mark.parametrize("operation", RESULTS)
def test_results_are_about_1(operation):
    given = operands(parse(f"{operation}/none/fp16/last/{SHAPES}"), torch.device("cpu"))
    assert 0.3 < float(given.reference.square().mean().sqrt()) < 3


@pytest.mark.parametrize(("number", "precision"), [("fp32", "ieee"), ("tf32", "tf32")])
@pytest.mark.parametrize("ambient", ["ieee", "tf32"])
def test_float32_is_computed_as_the_problem_says_and_the_setting_stays(
    number, precision, ambient, monkeypatch
):
    from steadytorch.conv import check

    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    seen, plain = [], check.aten_conv
    monkeypatch.setattr(
        check, "aten_conv", lambda *given: seen.append(conv.fp32_precision) or plain(*given)
    )
    before = conv.fp32_precision
    conv.fp32_precision = ambient
    try:
        operands(parse(f"fprop/none/{number}/last/{SHAPES}"), torch.device("cpu")).by_pytorch()
        assert seen == ["ieee", precision]
        assert conv.fp32_precision == ambient
    finally:
        conv.fp32_precision = before


class Answering:
    """Fake built plan: its runs return PyTorch's result times these factors."""

    workspace_bytes = 0

    def __init__(self, given: Any, *factors: float) -> None:
        self._given, self._factors = given, list(factors)

    def enqueue(self, pointers: dict[int, int], workspace: int) -> bool:
        if not self._factors:
            return False
        problem, result = self._given.problem, self._given.by_pytorch()
        made = empty(
            tuple(result.shape), DTYPES[problem.number], torch.device("cpu"), problem.layout
        ).copy_(result * self._factors.pop(0))
        ctypes.memmove(pointers[OUTPUT], made.data_ptr(), made.nbytes)
        return True


@pytest.mark.parametrize(
    ("factors", "fault", "repeats"),
    [
        ((1.0, 1.0), None, True),
        ((1.0, 1.001), "results differ from run to run", False),
        ((2.0, 2.0), "exceeds", True),
        ((float("nan"), 1.0), "not finite", None),
        ((), "does not run", None),
    ],
    ids=["the same twice", "other bits", "wrong twice", "not finite", "refuses"],
)
def test_two_runs_show_whether_an_engine_is_right_and_repeats_itself(factors, fault, repeats):
    given = operands(parse(f"fprop/none/fp32/last/{SHAPES}"), torch.device("cpu"))
    plan: Any = Answering(given, *factors)
    found = verify(plan, given, bound=1e-4)
    assert found.repeats is repeats
    assert fault in found.fault if fault else found.fault is None


class Straying(Answering):
    """Returns PyTorch's result, then writes to the given places."""

    def __init__(self, given: Any, stray: Any, workspace_bytes: int = 0) -> None:
        super().__init__(given, 1.0, 1.0)
        self._stray, self.workspace_bytes = stray, workspace_bytes

    def enqueue(self, pointers: dict[int, int], workspace: int) -> bool:
        done = super().enqueue(pointers, workspace)
        size = self._given.reference.numel() * self._given.first.element_size()
        self._stray(pointers[OUTPUT], size, workspace, self.workspace_bytes)
        return done


def keeps_inside(output, size, workspace, scratch):
    ctypes.memset(workspace, 0, scratch)


def before_the_output(output, size, workspace, scratch):
    ctypes.memset(output - 4, 0, 4)


def after_the_output(output, size, workspace, scratch):
    ctypes.memset(output + size, 0, 4)


def before_the_workspace(output, size, workspace, scratch):
    ctypes.memset(workspace - 4, 0, 4)


def after_the_workspace(output, size, workspace, scratch):
    ctypes.memset(workspace + scratch, 0, 4)


@pytest.mark.parametrize("scratch", [100, 256])
@pytest.mark.parametrize("number", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("stray", "found"),
    [
        (keeps_inside, False),
        (before_the_output, True),
        (after_the_output, True),
        (before_the_workspace, True),
        (after_the_workspace, True),
    ],
)
def test_four_bytes_outside_of_output_or_workspace_are_found(stray, found, number, scratch):
    given = operands(parse(f"fprop/none/{number}/last/{SHAPES}"), torch.device("cpu"))
    plan: Any = Straying(given, stray, scratch)
    seen = verify(plan, given, bound=1e-2)
    assert seen.fault == ("writes outside of its output or workspace" if found else None)


class Halving(Answering):
    """Writes only the first half of PyTorch's result, or nothing from a certain call on."""

    def __init__(self, given: Any, last: int) -> None:
        super().__init__(given, 1.0, 1.0)
        self._last, self._calls = last, 0

    def enqueue(self, pointers: dict[int, int], workspace: int) -> bool:
        self._calls += 1
        size = self._given.reference.numel() * self._given.first.element_size()
        half = pointers[OUTPUT] + size // 2
        kept = ctypes.string_at(half, size - size // 2)
        done = super().enqueue(pointers, workspace)
        if self._calls >= self._last:
            ctypes.memmove(half, kept, len(kept))
        return done


@pytest.mark.parametrize(
    ("last", "fault"), [(1, "unwritten"), (2, "differ from run to run"), (3, None)]
)
@pytest.mark.parametrize("operation", RESULTS)
def test_an_output_that_is_written_by_half_is_found(operation, last, fault):
    given = operands(parse(f"{operation}/none/fp16/last/{SHAPES}"), torch.device("cpu"))
    plan: Any = Halving(given, last)
    seen = verify(plan, given, bound=1e-2)
    assert fault in seen.fault if fault else seen.fault is None
