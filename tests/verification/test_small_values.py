"""Small values of an output beside large ones, through the whole verification."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.verification.verdict import decide
from steadytorch.verification.verify import make_reference, verify
from steadytorch.workload.workload import Workload


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


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
