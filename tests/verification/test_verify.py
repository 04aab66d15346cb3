import gc
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from steadytorch.verification.verdict import OutputError, decide
from steadytorch.verification.verify import make_reference, output_error, verify
from steadytorch.workload.workload import Workload

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


@pytest.fixture
def linear():
    return Workload(nn.Linear(16, 16).eval(), torch.randn(16, 16))


def _verdict(workload, model=None, precision="same", tolerance=None, seed=0):
    """Verdict on a candidate that runs `model` instead of the workload's own."""
    data, reference = make_reference(workload, seed)
    found = verify(workload.model if model is None else model, workload, data)
    return decide(found, reference, precision, tolerance)


# -- mutants ----------------------------------------------------------------------------------


def test_the_untouched_workload_passes_its_own_verification(linear):
    assert _verdict(linear) is None


def test_another_order_of_sums_passes(linear):
    weight, bias = linear.model.weight.double(), linear.model.bias.double()
    assert _verdict(linear, lambda x: (x.double() @ weight.T + bias).float()) is None


@pytest.mark.parametrize("factor", [1 + 1e-3, 1 + 1e-5, 1 - 1e-5, -1.0, 0.0])
def test_scaled_outputs_are_rejected(linear, factor):
    assert "relative error" in _verdict(linear, lambda x: linear.model(x) * factor)


def test_transposed_outputs_are_rejected(linear):
    assert "relative error" in _verdict(linear, lambda x: linear.model(x).T.contiguous())


def test_a_single_wrong_element_is_rejected():
    workload = Workload(nn.Linear(64, 64).eval(), torch.randn(512, 64))

    def mutant(x):
        out = workload.model(x).detach().clone()
        out[3, 5] += 4e-4
        return out

    data, reference = make_reference(workload, 0)
    found = verify(mutant, workload, data)
    assert decide(found, reference, "same", None)
    assert "largest error" in decide(found, reference, "tf32", 1e-5)


@pytest.mark.parametrize(("value", "word"), [(NAN, "NaN"), (INF, "infinity"), (-INF, "infinity")])
def test_outputs_that_are_not_finite_are_rejected_by_name(linear, value, word):
    def mutant(x):
        out = linear.model(x).detach().clone()
        out[0, 0] = value
        return out

    assert _verdict(linear, mutant, "bf16") == f"output 0 holds {word}"


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda out: out[:1], "output 0 has shape (1, 16), expected (16, 16)"),
        (lambda out: out.double(), "output 0 is float64, expected float32"),
        (lambda out: (out, out), "returns 2 values, the untouched workload returns 1"),
        (lambda out: None, "returns 0 values, the untouched workload returns 1"),
        (lambda out: out.to("meta"), "output 0 is on meta, expected cpu"),
        (lambda out: [out], "nests its outputs in other containers than the untouched workload"),
        (lambda out: {"out": out}, "nests its outputs in other containers than the untouched"),
    ],
)
def test_outputs_of_another_form_are_rejected(linear, mutate, reason):
    assert _verdict(linear, lambda x: mutate(linear.model(x))).startswith(reason)


def test_writing_to_the_inputs_is_rejected(linear):
    def mutant(x):
        out = linear.model(x)
        x.zero_()
        return out

    assert _verdict(linear, mutant) == "writes to its inputs"


def _static(model):
    buffers = {}

    def mutant(*inputs):
        with torch.no_grad():
            out = model(*inputs)
            return buffers.setdefault(out.shape, torch.empty_like(out)).copy_(out)

    return mutant


def _not_finite(*outputs):
    """A workload that returns these values for any input."""
    return Workload(lambda x: [out.clone() for out in outputs], torch.randn(4))


@pytest.mark.parametrize("precision", ["same", "bf16"])
@pytest.mark.parametrize("value", [NAN, INF, complex(NAN, NAN)])
def test_where_nothing_is_finite_nothing_is_verified(value, precision):
    workload = _not_finite(torch.full((3,), value), torch.empty(0))
    assert _verdict(workload, precision=precision) == (
        "cannot be verified: the untouched workload returns no finite number to compare"
    )


@pytest.mark.parametrize("other", [torch.tensor([1.0, NAN]), torch.tensor(2), torch.tensor(False)])
def test_one_finite_number_can_be_compared(other):
    assert _verdict(_not_finite(torch.full((3,), NAN), other)) is None


@pytest.mark.parametrize(
    ("convert", "kind"),
    [("to_sparse", "sparse_coo"), ("to_mkldnn", "_mkldnn")],
)
def test_outputs_that_are_not_dense_are_refused_with_the_reason(convert, kind):
    workload = Workload(lambda x: (x.sum(), getattr(x, convert)()), torch.eye(4))
    assert _verdict(workload) == (
        f"cannot be verified: output 1 is {kind}, but only dense tensors can be compared"
    )


def test_sparse_inputs_are_verified_as_they_are():
    sparse = torch.eye(4).to_sparse()
    weight = torch.randn(4, 4)
    workload = Workload(lambda x: torch.sparse.mm(x, weight.to(x.dtype)), sparse)
    assert _verdict(workload) is None
    assert "relative error" in _verdict(workload, lambda x: 2 * workload.model(x))

    def writes(x):
        out = workload.model(x)
        x._values().zero_()
        return out

    assert _verdict(workload, writes) == "writes to its inputs"


class Items(list):
    pass


class Fields(dict):
    pass


@pytest.mark.parametrize("wrap", [lambda x: Items([x]), lambda x: Fields(x=x)])
def test_what_subclasses_of_containers_hold_is_compared(linear, wrap):
    workload = Workload(lambda x: (x.sum(), wrap(linear.model(x))), linear.inputs)
    assert _verdict(workload) is None
    wrong = _verdict(workload, lambda x: (x.sum(), wrap(2 * linear.model(x))))
    assert "relative error" in wrong


def test_empty_outputs_pass():
    assert _verdict(_not_finite(torch.empty(0))) is None


def test_a_buffer_that_the_next_call_overwrites_is_rejected(linear):
    assert _verdict(linear, _static(linear.model)) == (
        "two calls return the same memory, which is not the model's"
    )


def test_a_gradient_of_the_output_makes_no_difference(linear):
    with torch.no_grad():
        assert _verdict(linear) is None
    assert _verdict(linear, torch.inference_mode()(linear.model.forward)) is None
    assert _verdict(linear, lambda x: linear.model(x).requires_grad_()) is None


# -- outputs of every kind --------------------------------------------------------------------


def test_nested_outputs_are_compared_leaf_by_leaf():
    def untouched(x):
        return {"logits": x * 2, "cache": [(x + 1, x - 1), None], "length": 3}

    def mutant(x):
        return {"logits": x * 2, "cache": [(x + 1, x - 0.99), None], "length": 3}

    workload = Workload(untouched, torch.randn(4, 4))
    assert _verdict(workload) is None
    assert "relative error" in _verdict(workload, mutant)


@pytest.mark.parametrize("kind", [lambda x: x > 0, lambda x: x.argmax(-1)])
def test_integers_and_booleans_count_the_elements_that_differ(kind):
    workload = Workload(kind, torch.randn(8, 8))
    assert _verdict(workload) is None
    assert "relative error 1.0e+00" in _verdict(
        workload, lambda x: ~kind(x) if kind(x).dtype == torch.bool else kind(x) + 1
    )


def test_the_error_of_an_integer_output_is_the_fraction_that_differs():
    error = output_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])])
    assert error == OutputError(0.25, 0.25)


@pytest.mark.parametrize("compared", [1, 7, 64])
def test_errors_do_not_depend_on_how_many_elements_are_compared_at_a_time(compared, monkeypatch):
    ref = torch.randn(6, 8, dtype=torch.float64)
    out = (ref.T.contiguous() + 1e-3 * torch.randn(8, 6, dtype=torch.float64)).T
    ref[2, 3] = out[2, 3] = INF
    monkeypatch.setattr("steadytorch.verification.verify.COMPARED", compared)
    found = output_error([out.float()], [ref])
    finite = ref.isfinite()
    delta = (out.float().double() - ref)[finite]
    assert found.relative_l2 == pytest.approx(float(delta.norm() / ref[finite].norm()))
    assert found.relative_max == pytest.approx(float(delta.abs().max() / ref[finite].abs().max()))


def test_the_number_of_outputs_may_depend_on_the_inputs(linear):
    def returning(factor):
        return lambda x: [row * factor for row in linear.model(x) if row[0] > 0]

    workload = Workload(returning(1.0), torch.randn(200, 16))
    data, reference = make_reference(workload, 0)
    assert len({len(outputs) for outputs in data["own"]}) > 1
    assert decide(verify(returning(1.0), workload, data), reference, "same", None) is None
    assert "relative error" in decide(
        verify(returning(1.5), workload, data), reference, "same", None
    )


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def test_outputs_in_slots_are_compared(linear):
    def returning(factor):
        def model(x):
            found = linear.model(x)
            return {"scores": found, "more": Slotted(found * factor)}

        return model

    workload = Workload(returning(1.0), *linear.inputs)
    assert _verdict(workload, returning(1.0)) is None
    assert "relative error" in _verdict(workload, returning(1.5))


def test_outputs_are_freed_without_garbage_collection(linear):
    outputs = []

    def model(x):
        found = linear.model(x)
        outputs.append(weakref.ref(found))
        return {"scores": found}

    workload = Workload(model, *linear.inputs)
    data, _ = make_reference(workload, 0)
    gc.disable()
    try:
        assert verify(model, workload, data).fault is None
        assert [reference() for reference in outputs] == [None] * len(outputs)
    finally:
        gc.enable()


def test_complex_outputs_are_compared_as_numbers():
    workload = Workload(torch.fft.fft, torch.randn(4, 16))
    data, reference = make_reference(workload, 0)
    assert reference.error.relative_l2 < 1e-6
    assert decide(verify(torch.fft.fft, workload, data), reference, "same", None) is None
    wrong = verify(lambda x: torch.fft.fft(x).conj(), workload, data)
    assert "relative error" in decide(wrong, reference, "same", None)


def test_complex_weights_stay_complex_in_the_reference():
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x):
            return torch.view_as_real(x * self.phase)

    _, reference = make_reference(Workload(Rotation(), torch.randn(4, 8)), 0)
    assert reference.error.relative_l2 < 1e-6


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_outputs_without_elements_pass_in_the_right_shape_only(shape):
    workload = Workload(lambda x: x * 2, torch.randn(shape))
    assert _verdict(workload) is None
    assert "has shape" in _verdict(workload, lambda x: torch.empty(0, 9))


def test_an_all_zero_output_is_compared_in_absolute_terms():
    workload = Workload(torch.zeros_like, torch.randn(4))
    assert _verdict(workload) is None
    assert "relative error 2.0e-02" in _verdict(workload, lambda x: torch.full_like(x, 0.01))


def _masked(x):
    return x.masked_fill(torch.eye(4, dtype=torch.bool), -INF)


@pytest.mark.parametrize(
    ("mutant", "reason"),
    [
        (lambda x: torch.full_like(x, NAN), "output 0 holds NaN"),
        (lambda x: x.clone(), "differs where the untouched workload's is infinite"),
        (lambda x: -_masked(-x), "differs where the untouched workload's is infinite"),
        (lambda x: _masked(x * 1.01), "relative error"),
    ],
)
def test_an_infinite_output_hides_no_fault_elsewhere(mutant, reason):
    workload = Workload(_masked, torch.randn(4, 4))
    assert _verdict(workload) is None
    assert reason in _verdict(workload, mutant, "bf16", 1e-3)


def test_a_workload_that_returns_no_tensor_cannot_be_verified():
    workload = Workload(lambda x: float(x.sum()), torch.randn(4))
    assert "returns no tensor to compare" in _verdict(workload)


class Says(nn.Linear):
    """Returns its output and a non-tensor that `say` derives from it."""

    def __init__(self, say):
        super().__init__(16, 16)
        self.say = say

    def forward(self, x):
        y = super().forward(x)
        return y, self.say(y)


@pytest.mark.parametrize(
    ("say", "mutate", "reason"),
    [
        (lambda y: float(y.norm()), lambda said: said * (1 + 1e-3), "relative error 1.0e-03"),
        (lambda y: complex(y.norm(), 1), lambda said: -said, "relative error 2.0e+00"),
        (lambda y: float(y.norm()), lambda said: INF, "output 1 holds infinity"),
        (lambda y: NAN, lambda said: 1.0, "output 1 differs where"),
        (lambda y: float(y.norm()), torch.tensor, "output 1 has shape (), expected (1,)"),
        (lambda y: float(y.norm()), complex, "an output is a complex, expected a float"),
        (lambda y: int(y.norm()), lambda said: said + 1, "an output is "),
        (lambda y: bool(y.norm() > 0), int, "an output is 1, expected True"),
        (lambda y: str(y.dtype), lambda said: "half", "an output is 'half', expected 'torch."),
        (lambda y: None, lambda said: 0, "an output is 0, expected None"),
        (lambda y: y.device, lambda said: torch.device("meta"), "expected device(type='cpu')"),
        (
            lambda y: Cache(float(y.norm())),
            lambda said: Cache(said.keys * (1 + 1e-3)),
            "relative error 1.0e-03",
        ),
        (lambda y: Cache(int(y.norm())), lambda said: Cache(said.keys + 1), "an output is "),
    ],
)
def test_what_is_returned_beside_tensors_is_compared_too(say, mutate, reason):
    workload = Workload(Says(say).eval(), torch.randn(16, 16))

    def mutant(x):
        y, said = workload.model(x)
        return y, mutate(said)

    assert _verdict(workload) is None
    assert reason in _verdict(workload, mutant)


def test_a_number_has_the_tolerance_of_the_precision():
    workload = Workload(Says(lambda y: float(y.norm())).eval(), torch.randn(16, 16))

    def less_precise(x):
        y, said = workload.model(x)
        return y, said * (1 + 1e-3)

    assert _verdict(workload, less_precise, "tf32") is None
    assert "relative error" in _verdict(workload, less_precise, "tf32", 1e-4)


def test_a_constant_that_changes_between_calls_is_not_repeatable():
    calls = iter(range(100))
    workload = Workload(Says(lambda y: next(calls)).eval(), torch.randn(16, 16))
    _, reference = make_reference(workload, 0)
    assert not reference.repeatable


@dataclass
class Result:
    scores: torch.Tensor
    cache: object = None


class Cache:
    """An object that hides its tensors from containers and refers to itself."""

    def __init__(self, keys):
        self.keys, self.own = keys, self


class Hiding(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return x, Result(y, Cache([y * 2]))


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda found: found, None),
        (lambda found: (found[0], Result(found[1].scores.bfloat16())), "returns 2 values"),
        (
            lambda found: (found[0], Result(found[1].scores.bfloat16(), found[1].cache)),
            "output 1 is bfloat16, expected float32",
        ),
        (
            lambda found: (found[0], Result(found[1].scores, Cache([found[1].scores]))),
            "relative error",
        ),
    ],
    ids=["the same", "fewer", "another type", "another value"],
)
def test_tensors_within_objects_are_compared_too(mutate, reason):
    workload = Workload(Hiding(16, 16).eval(), torch.randn(16, 16))
    found = _verdict(workload, lambda x: mutate(workload.model(x)))
    assert found is None if reason is None else reason in found


# -- strides and containers ----------------------------------------------------------------------


def test_other_strides_are_rejected(linear):
    reason = _verdict(linear, lambda x: linear.model(x).T.contiguous().T)
    assert (
        reason
        == "an output is a tensor with strides (1, 16), expected a tensor with strides (16, 1)"
    )


def test_strides_of_dimensions_of_one_element_say_nothing():
    workload = Workload(nn.Linear(16, 16).eval(), torch.randn(1, 16))
    assert _verdict(workload, lambda x: workload.model(x).as_strided((1, 16), (1, 1))) is None


class Collecting(nn.Module):
    """Stores its results in the caller's containers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch, features):
        batch["scores"] = self.layer(batch["x"])
        features.append(batch["scores"] + 1)
        return batch["scores"].softmax(-1)


@pytest.fixture
def collecting():
    return Workload(Collecting().eval(), ({"x": torch.randn(3, 4)}, []))


def test_what_a_model_writes_to_containers_is_verified_and_left_to_it(collecting):
    assert _verdict(collecting) is None
    batch, features = collecting.inputs
    assert (list(batch), features) == (["x"], [])


LOSSES = {
    "nothing written": lambda m, batch, features: m(dict(batch), list(features)),
    "no entry": lambda m, batch, features: m(dict(batch), features),
    "no item": lambda m, batch, features: m(batch, list(features)),
    "twice": lambda m, batch, features: (m(batch, features), m(batch, features))[1],
    "other values": lambda m, batch, features: (m(batch, features), batch["scores"].add_(1))[0],
    "other strides": lambda m, batch, features: (
        m(batch, features),
        batch.update(scores=batch["scores"].T.contiguous().T),
    )[0],
    "another type": lambda m, batch, features: (
        m(batch, features),
        batch.update(scores=batch["scores"].double()),
    )[0],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_lost_on_the_way_to_a_container_is_rejected(collecting, loss):
    mutant = partial(LOSSES[loss], collecting.model)
    assert _verdict(collecting, lambda *given: mutant(*given)) is not None
