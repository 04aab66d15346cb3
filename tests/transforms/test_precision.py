import pytest

from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.precision import ALLOWED, PRECISIONS, half_of, precision_of

LAYOUT, TF32 = TransformSpec("channels_last"), TransformSpec("tf32")
BF16 = TransformSpec("cast_weights", (("dtype", "bf16"),))
INT8 = TransformSpec("openvino", (("precision", "int8"),))


def test_every_class_admits_itself_and_the_exact_one():
    assert set(ALLOWED) == set(PRECISIONS)
    assert all({"same", precision} <= ALLOWED[precision] for precision in PRECISIONS)
    assert "fp16" not in ALLOWED["bf16"]
    assert "bf16" not in ALLOWED["fp16"]


def test_int8_is_the_lowest_class_and_includes_bf16():
    assert PRECISIONS[-1] == "int8"
    assert ALLOWED["bf16"] < ALLOWED["int8"]
    assert [half_of(name) for name in ("same", "bf16", "fp16", "int8")] == [
        *("same", "bf16", "fp16", "bf16")
    ]


@pytest.mark.parametrize(
    ("candidate", "precision"),
    [
        ((), "same"),
        ((LAYOUT,), "same"),
        ((LAYOUT, TF32), "tf32"),
        ((BF16,), "bf16"),
        ((INT8,), "int8"),
    ],
)
def test_a_candidate_is_of_the_class_of_its_least_precise_part(candidate, precision):
    assert precision_of(candidate) == precision


def test_what_is_no_transform_has_no_class():
    with pytest.raises(UsageError, match="no_such"):
        precision_of((TransformSpec("no_such"),))
