from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.runtime import slices
from steadytorch.runtime.slices import LEAST, ROUNDINGS, SMALLEST, explained, largest, norms

UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("compared", [1, 500, 1 << 22])
def test_norms_are_those_of_each_slice_of_enough_elements(compared, monkeypatch):
    monkeypatch.setattr(slices, "COMPARED", compared)
    out, ref = torch.randn(2, 40, 8, 8), torch.randn(2, 40, 8, 8)
    ref[0, 3, 1, 1], out[1, 2, 0, 0] = float("inf"), float("nan")
    found = norms(out, ref)
    delta = (out.double() - ref.double()).where(out.isfinite() & ref.isfinite(), 0.0)
    assert list(found) == [0, 1, 2, 3]
    for dim, each in found.items():
        expected = torch.stack([part.norm() for part in delta.unbind(dim)])
        torch.testing.assert_close(each, expected)
    assert list(norms(torch.randn(1, LEAST - 1, LEAST))) == [1]
    assert norms(torch.randn(5)) == norms(torch.ones(64, 64, dtype=torch.int64)) == {}


@given(st.integers(0, 63), st.floats(1e-3, 1e3), st.floats(1e-6, 1.0))
def test_the_worst_slice_is_found_whatever_its_size(index, size, share):
    ref = torch.ones(64, 128, dtype=torch.float64)
    ref[index] *= size
    out = ref.clone()
    out[index] *= 1 + share
    found, where = largest(out, ref, explained(ref, ref, UNIT))
    assert found == pytest.approx(share / ROUNDINGS)
    assert where == f"[{index}]"


def test_a_slice_may_err_as_much_as_the_untouched_workload_in_roundings():
    ref = torch.ones(64, 128, dtype=torch.float64)
    own = ref.clone()
    own[:, 7] += 100 * UNIT
    out = ref.clone()
    out[:, 7] += 100 * 2.0**-8
    assert largest(out, ref, explained(own, ref, UNIT))[0] == pytest.approx(2.0**-8)


def test_slices_that_are_tiny_or_carried_by_few_elements_are_not_judged():
    ref = torch.ones(4, 64, dtype=torch.float64)
    ref[1] *= SMALLEST / 2
    ref[2], ref[2, : LEAST - 1] = 0.0, 1.0
    ref[3], ref[3, :LEAST] = 0.0, 1.0
    due = explained(ref, ref, UNIT)[0]
    assert due.isinf().tolist() == [False, True, True, False]
