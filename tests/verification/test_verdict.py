import pytest
import torch

from steadytorch.runtime.agreement import MAX_ERROR_FACTOR, TOLERANCES
from steadytorch.verification.verdict import (
    GRADIENTS,
    SAME_FACTOR,
    OutputError,
    Reference,
    Verification,
    decide,
    worst,
)

INF, NAN = float("inf"), float("nan")


REFERENCE = Reference(OutputError(1e-6, 4e-6), "float64", True, True)


def _decide(l2, largest, precision="same", tolerance=None, reference=REFERENCE):
    return decide(Verification(OutputError(l2, largest)), reference, precision, tolerance)


def test_same_allows_a_few_times_the_error_of_the_untouched_workload():
    assert _decide(SAME_FACTOR * 1e-6, SAME_FACTOR * 4e-6) is None
    assert _decide(SAME_FACTOR * 1.01e-6, 0) == "relative error 4.0e-06 exceeds 4.0e-06"
    assert _decide(0, SAME_FACTOR * 4.1e-6) == "largest error 1.6e-05 exceeds 1.6e-05"


def test_same_allows_one_rounding_where_the_untouched_workload_is_exact():
    exact = Reference(OutputError(0.0, 0.0), "float64", True, True)
    eps = float(torch.finfo(torch.float32).eps)
    assert _decide(eps, eps, reference=exact) is None
    assert _decide(10 * eps, 0, reference=exact) is not None


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16", "int8"])
def test_lower_precisions_have_the_bounds_of_their_class(precision):
    bound = TOLERANCES[precision]
    assert _decide(bound, MAX_ERROR_FACTOR * bound, precision) is None
    assert "exceeds" in _decide(1.01 * bound, 0, precision)
    assert "largest error" in _decide(0, 1.01 * MAX_ERROR_FACTOR * bound, precision)


def test_the_classes_allow_more_the_fewer_bits_they_keep():
    bounds = [TOLERANCES[name] for name in ("tf32", "fp16", "bf16", "int8")]
    assert bounds == sorted(set(bounds))


@pytest.mark.parametrize("tolerance", [1e-4, 0.2])
def test_a_tolerance_replaces_the_bound_of_a_lower_precision(tolerance):
    assert _decide(tolerance, 0, "bf16", tolerance) is None
    assert _decide(1.01 * tolerance, 0, "bf16", tolerance) is not None


def test_a_tolerance_does_not_loosen_the_class_same():
    assert _decide(1e-3, 1e-3, "same", 0.5) is not None


@pytest.mark.parametrize("error", [(NAN, 0.0), (0.0, NAN), (INF, 0.0)])
@pytest.mark.parametrize("precision", ["same", "bf16"])
def test_an_error_that_is_no_number_is_rejected(error, precision):
    assert _decide(*error, precision) is not None


def test_a_fault_is_the_reason_whatever_the_error():
    assert decide(Verification(OutputError(0, 0), "holds NaN"), REFERENCE, "bf16", 0.9) == (
        "holds NaN"
    )
    assert decide(Verification(None), REFERENCE, "same", None) == "returned no outputs to compare"


# -- training steps ---------------------------------------------------------------------------

PARTS = ("outputs", "loss", GRADIENTS, "buffers")


def _step(explained=1e-5, largest=1e-5, **others):
    """A reference of a training step, equal for all parts except the `others`."""
    parts = {part: OutputError(explained, largest) for part in PARTS}
    parts |= {part: OutputError(error, error) for part, error in others.items()}
    classes = dict.fromkeys(("same", *TOLERANCES), parts)
    return Reference(OutputError(1e-6, 1e-6), "float64", True, True, "", classes)


def _found(**errors):
    """A candidate that is exact except for some parts."""
    parts = {part: OutputError(0.0, 0.0) for part in PARTS}
    parts |= {part: OutputError(*error) for part, error in errors.items()}
    return Verification(worst(parts.values()), None, parts)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_step_may_be_twice_as_far_off_as_rounding_explains(part):
    assert decide(_found(**{part: (1.9e-5, 0.0)}), _step(), "same", None) is None
    reason = decide(_found(**{part: (2.1e-5, 0.0)}), _step(), "same", None)
    assert reason == f"{part}: relative error 2.1e-05 exceeds 2.0e-05"


def test_a_single_tensor_of_a_step_may_be_four_times_as_far_off():
    step = _step(largest=3e-5)
    assert decide(_found(gradients=(1e-5, 1.1e-4)), step, "same", None) is None
    reason = decide(_found(gradients=(1e-5, 1.3e-4)), step, "same", None)
    assert reason == "gradients: largest error 1.3e-04 exceeds 1.2e-04"


def test_a_step_that_is_exact_may_be_rounded_once():
    eps = float(torch.finfo(torch.float32).eps)
    step = _step(explained=0.0, largest=0.0)
    assert decide(_found(gradients=(eps, eps)), step, "same", None) is None
    assert decide(_found(gradients=(3 * eps, eps)), step, "same", None) is not None


@pytest.mark.parametrize("precision", TOLERANCES)
def test_lower_classes_have_their_tolerance_or_what_rounding_explains(precision):
    bound = TOLERANCES[precision]
    within, beyond = _found(gradients=(bound, bound)), _found(gradients=(1.1 * bound, bound))
    assert decide(within, _step(), precision, None) is None
    assert "gradients: relative error" in decide(beyond, _step(), precision, None)
    assert decide(beyond, _step(gradients=0.6 * bound), precision, None) is None


def test_a_tolerance_of_the_user_bounds_every_part_whatever_rounding_explains():
    step = _step(explained=0.3, largest=0.3)
    assert decide(_found(gradients=(0.2, 0.2)), step, "bf16", None) is None
    reason = decide(_found(gradients=(0.2, 0.2)), step, "bf16", 0.1)
    assert reason == "gradients: relative error 2.0e-01 exceeds 1.0e-01"


@pytest.mark.parametrize(
    ("part", "precision"),
    [("outputs", "same"), ("outputs", "bf16"), (GRADIENTS, "same"), ("buffers", "tf32")],
)
def test_where_rounding_explains_anything_nothing_is_verified(part, precision):
    reason = decide(_found(), _step(**{part: 0.6}), precision, None)
    assert reason == (
        f"cannot be verified: rounding alone moves the untouched workload's {part} by 60%"
    )


def test_gradients_of_a_coarse_class_may_be_beyond_recognition():
    assert decide(_found(gradients=(1.3, 1.6)), _step(gradients=1.3), "bf16", None) is None


@pytest.mark.parametrize("error", [(NAN, 0.0), (0.0, NAN), (INF, 0.0)])
@pytest.mark.parametrize("precision", ["same", "bf16"])
def test_a_part_whose_error_is_no_number_is_rejected(error, precision):
    assert decide(_found(loss=error), _step(), precision, None) is not None


def test_the_worst_of_errors_is_the_worst_of_each_measure():
    assert worst([OutputError(1.0, 4.0), OutputError(2.0, 3.0)]) == OutputError(2.0, 4.0)
