from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch.runtime import slices
from steadytorch.runtime.slices import LEAST, ROUNDINGS, SMALLEST, explained, largest, norms
from steadytorch.verification.verdict import decide
from steadytorch.verification.verify import make_reference, verify
from steadytorch.workload.workload import Workload

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


class Detector(nn.Module):
    """Boxes in pixels, beside scores between 0 and 1."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 12, 3)

    def forward(self, image):
        raw = self.head(image).flatten(2)
        return torch.cat([raw[:, :4].sigmoid() * 640, raw[:, 4:].sigmoid() / 4], 1)


def verdict(change, precision, tolerance=None):
    model = Detector().eval()
    workload = Workload(model, torch.randn(1, 3, 16, 16))
    data, reference = make_reference(workload, 0)
    found = verify(lambda image: change(model(image)), workload, data)
    return decide(found, reference, precision, tolerance)


def wrong_scores(change):
    return lambda out: torch.cat([out[:, :4], change(out[:, 4:])], 1)


@pytest.mark.parametrize("precision", ["same", "tf32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda scores: scores.flip(1),
        lambda scores: scores.roll(1, 2),
        lambda scores: scores * 2,
        lambda scores: scores.mean((1, 2), keepdim=True).expand_as(scores),
        lambda scores: (scores * 3).round() / 3,
    ],
)
def test_wrong_scores_are_rejected_beside_large_coordinates(change, precision):
    refused = verdict(wrong_scores(change), precision)
    assert refused is not None
    assert precision == "same" or "output 0[:, " in refused


@pytest.mark.parametrize(("kind", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_rounding_to_the_class_passes(kind, precision):
    assert verdict(lambda out: out.to(kind).float(), precision) is None


def test_a_larger_tolerance_of_the_user_holds_for_slices_too():
    worse = wrong_scores(lambda scores: scores * 1.3)
    assert "output 0[:, " in verdict(worse, "bf16")
    assert verdict(worse, "bf16", tolerance=0.4) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_slices_are_judged_only_against_a_higher_precision(dtype):
    model = Detector().eval().to(dtype)
    workload = Workload(model, torch.randn(1, 3, 16, 16, dtype=dtype))
    data, reference = make_reference(workload, 0)
    assert all(bool(each[0]) == (dtype != torch.float64) for each in data["slices"])
    assert decide(verify(model, workload, data), reference, "same", None) is None


def test_complex_outputs_are_judged_by_their_real_and_imaginary_parts():
    def model(x):
        return torch.complex(x * 1000, x)

    workload = Workload(model, torch.randn(8, 64))
    data, reference = make_reference(workload, 0)
    found = verify(lambda x: torch.complex(x * 1000, x * 0), workload, data)
    assert "output 0[:, :, 1]" in decide(found, reference, "bf16", None)


def test_sparse_outputs_have_no_slices():
    def model(x):
        return x, torch.complex(x, x).to_sparse()

    workload = Workload(model, torch.randn(8, 64))
    data, reference = make_reference(workload, 0)
    assert [bool(each) for each in data["slices"][0]] == [True, False]
    assert "is sparse" in decide(verify(model, workload, data), reference, "same", None)
