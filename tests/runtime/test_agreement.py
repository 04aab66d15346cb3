from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch.runtime import agreement
from steadytorch.runtime.agreement import (
    CPU_CHUNK,
    SIZED,
    SIZES,
    bound,
    disagreement,
    memory_of,
    norm,
    together,
    wrong_size,
)

X = torch.linspace(-3, 5, 101)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, 2e-13), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)],
)
def test_same_is_bounded_by_the_arithmetic_of_the_model(dtype, expected):
    assert bound("same", nn.Linear(2, 2).to(dtype), (torch.ones(1, 2, dtype=dtype),)) == expected


def test_the_coarsest_type_in_play_decides():
    assert bound("same", nn.Linear(2, 2), (torch.ones(1, dtype=torch.bfloat16),)) == 5e-2
    assert bound("same", lambda x: x, {"ids": torch.ones(1, dtype=torch.long)}) == 1e-4
    assert bound("same", nn.Linear(2, 2, dtype=torch.complex64), ()) == 1e-4


def test_a_lower_class_is_bounded_by_its_tolerance_or_the_users():
    model = nn.Linear(2, 2)
    assert bound("fp16", model, ()) == 1e-2
    assert bound("fp16", model, (), tolerance=0.3) == 0.3
    assert bound("fp16", model.bfloat16(), (), tolerance=1e-3) == 5e-2
    assert bound("same", nn.Linear(2, 2), (), tolerance=0.3) == 1e-4


def test_rounding_of_another_order_of_sums_agrees():
    a, b = torch.randn(64, 4096), torch.randn(4096, 64)
    found = sum(x @ y for x, y in zip(a.split(512, 1), b.split(512, 0), strict=True))
    assert disagreement(found, a @ b, 1e-4) is None


def test_arithmetic_of_16_bits_is_not_the_same():
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    found = (a.bfloat16() @ b.bfloat16()).float()
    assert "relative L2" in disagreement(found, a @ b, 1e-4)
    assert disagreement(found, a @ b, 5e-2) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (X + 1, "relative L2"),
        (X.double(), "float64"),
        (X[:-1], "shape"),
        (X.reshape(1, -1), "shape"),
        (X.to("meta"), "meta"),
        (X.to_sparse(), "dense"),
        (torch.full_like(X, NAN), "NaN"),
        (X.where(X > 0, NAN), "NaN"),
        (X.where(X < 4.99, INF), "infinite"),
        (torch.zeros_like(X), "off by 1.0e"),
        (3.0, "expected a tensor"),
        (None, "expected a tensor"),
        ((X,), "containers"),
        ({"x": X}, "containers"),
    ],
)
def test_what_differs_is_named(found, words):
    assert words in disagreement(found, X, 1e-4)


def test_one_element_far_off_is_seen_where_the_norm_hides_it():
    wide = torch.ones(1_000_000)
    found = wide.clone()
    found[7] += 0.01
    assert "one element" in disagreement(found, wide, 1e-4)


def test_nan_and_infinity_in_the_same_places_agree():
    holed = X.where(X > 0, NAN)
    holed[0], holed[1] = INF, -INF
    assert disagreement(holed.clone(), holed, 1e-4) is None
    assert "infinite" in disagreement(-holed, holed, 1e-4)


@pytest.mark.parametrize(
    "value",
    [X, X.to(torch.complex64) * 1j, X > 0, X.int(), X[:0], torch.zeros(3), 3.5, 2, "a", None],
)
def test_equal_values_of_any_type_agree(value):
    copied = value.clone() if isinstance(value, torch.Tensor) else value
    assert disagreement({"x": [value]}, {"x": [copied]}, 0.0) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [(3, 4), ("a", "b"), (True, 1), (1.0, 2.0), (1.0, 1), (X > 0, X > 1), (X.int(), X.int() + 1)],
)
def test_constants_and_integers_that_differ_are_seen(found, expected):
    assert disagreement(found, expected, 1e-4)


def test_numbers_are_compared_within_the_bound():
    assert disagreement(1.0 + 1e-6, 1.0, 1e-4) is None


class Opaque:
    def __init__(self, x):
        self.x = x


def test_opaque_objects_do_not_agree():
    value = Opaque(X)
    assert "Opaque, which cannot be compared" in disagreement(value, value, 1e-4)


@given(st.floats(1e-9, 1e-1), st.floats(1e-9, 1e-1))
def test_agreement_is_decided_by_the_relative_error(error, limit):
    fault = disagreement(X.double() * (1 + error), X.double(), limit)
    assert (fault is None) == (error <= limit) or abs(error - limit) < 1e-12


def test_large_results_are_compared_in_parts(monkeypatch):
    monkeypatch.setattr(agreement, "CHUNK", 10)
    found = X.clone()
    found[95] = NAN
    assert disagreement(X.clone(), X, 0.0) is None
    assert "NaN" in disagreement(found, X, 1e-4)


def test_memory_is_that_of_the_storage():
    assert memory_of([X[3:], {"x": X.view(101, 1)}]) == {X.data_ptr()}
    assert memory_of([X[:0], 3]) == set()


# -- sizes ------------------------------------------------------------------------------------

EXPECTED = {"large": torch.full((4,), 3.0), "small": torch.full((4,), 0.1)}


@given(factor=st.floats(0, 1e6), name=st.sampled_from(sorted(EXPECTED)))
def test_sizes_within_a_factor_of_two_are_right(factor, name):
    found = wrong_size(EXPECTED | {name: factor * EXPECTED[name]}, EXPECTED)
    if SIZES[0] * 1.001 < factor < SIZES[1] * 0.999:
        assert found is None
    elif not SIZES[0] * 0.999 < factor < SIZES[1] * 1.001:
        assert found == (name, pytest.approx(factor, rel=1e-5))


def test_tensors_with_negligible_norm_are_not_checked():
    expected = EXPECTED | {"noise": torch.full((4,), 0.5 * SIZED)}
    assert wrong_size(expected | {"noise": torch.zeros(4)}, expected) is None
    assert wrong_size(expected | {"noise": torch.ones(4)}, expected) is None


def test_a_nan_norm_is_wrong():
    found = wrong_size(EXPECTED | {"large": torch.full((4,), NAN)}, EXPECTED)
    assert found is not None
    assert found[0] == "large"


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_a_difference_is_that_in_float64(other):
    one = torch.randn(3, CPU_CHUNK, generator=torch.Generator().manual_seed(0)).T[5:]
    two = (one + 1e-3).to(other)
    expected = float((one.double() - two.double()).norm())
    assert norm(one, two) == pytest.approx(expected, rel=1e-12)
    assert norm(one, one + 0j) == 0.0


def test_norms_are_summed_in_double_precision():
    tensor = torch.full((3,), 1e30)
    assert norm(tensor) == pytest.approx(3**0.5 * 1e30)
    assert norm(torch.tensor([3 + 4j])) == pytest.approx(5.0)
    assert together([3.0, 4.0]) == 5.0
