from __future__ import annotations

from collections import deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from steadytorch.transforms.base import Applicable
from steadytorch.transforms.inference_mode import InferenceMode
from steadytorch.workload.workload import Workload

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    value: object


@dataclass(slots=True)
class Slotted:
    value: object


class OneSlot:
    __slots__ = "value"

    def __init__(self, value):
        self.value = value


class PrivateSlot:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value

    @property
    def value(self):
        return self.__value


def called(model, *args, **kwargs):
    with InferenceMode().applied(Workload(model, args, kwargs)) as changed, torch.no_grad():
        return changed.model(*args, **kwargs)


def test_calls_run_in_inference_mode_and_the_time_between_does_not():
    workload = Workload(torch.is_inference_mode_enabled, ())
    with InferenceMode().applied(workload) as changed:
        assert changed.model()
        assert not torch.is_inference_mode_enabled()


def test_a_call_that_raises_leaves_inference_mode():
    def fails():
        raise ZeroDivisionError

    with InferenceMode().applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert not torch.is_inference_mode_enabled()


def test_training_is_refused(cpu, conv_workload):
    training = Workload.training(
        conv_workload.model, conv_workload.inputs, torch.sum, torch.optim.SGD
    )
    assert "no gradients" in InferenceMode().applies_to(training, cpu).reason
    assert InferenceMode().applies_to(conv_workload, cpu) == Applicable()


# -- what callers get ---------------------------------------------------------------------------


def test_outputs_can_be_written_to_and_computed_with_as_those_of_the_model():
    y = called(nn.Linear(3, 2), torch.ones(4, 3))
    with torch.no_grad():
        y.mul_(2).relu_()
        y[0] = 0
    head = nn.Linear(2, 1)
    head(y).sum().backward()
    assert torch.equal(head.weight.grad, y.sum(0, keepdim=True))


def test_within_inference_mode_outputs_are_inference_tensors_as_the_models():
    with torch.inference_mode():
        assert called(nn.Linear(3, 2), torch.ones(4, 3)).is_inference()


def test_outputs_are_not_copied():
    made = []

    def model(x):
        made.append((x * 2)[1:, ::2])
        return made[-1]

    y = called(model, torch.ones(4, 4))
    assert (y.data_ptr(), y.stride(), y.shape) == (made[0].data_ptr(), (4, 2), (3, 2))
    assert y.storage_offset() == 4


CONTAINERS = {
    "tuple": lambda y: (y, 1),
    "named": lambda y: Pair(y, [y + 1]),
    "torch.return_types": lambda y: y.max(0),
    "list": lambda y: [y, {"a": y * 2}],
    "dict": lambda y: {"a": y, "b": (None, y + 1)},
    "deque": lambda y: deque([y]),
    "object": Frozen,
    "slots": Slotted,
    "one slot": OneSlot,
    "private slot": PrivateSlot,
    "nested object": lambda y: Frozen([Slotted({"a": y})]),
}


def tensors(value):
    """All tensors in a value, in objects too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, (Frozen, Slotted, OneSlot, PrivateSlot)):
        value = [value.value]
    elif not isinstance(value, (tuple, list, deque)):
        return []
    return [tensor for item in value for tensor in tensors(item)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_outputs_in_containers_and_objects_are_ordinary(name):
    contain, x = CONTAINERS[name], torch.arange(6.0).reshape(2, 3)
    found, expected = called(lambda x: contain(x * 2), x), contain(x * 2)
    assert type(found) is type(expected)
    assert len(tensors(found)) == len(tensors(expected)) > 0
    assert not any(tensor.is_inference() for tensor in tensors(found))
    assert all(map(torch.equal, tensors(found), tensors(expected)))


KINDS = {
    "conjugate": lambda y: (y * 1j).conj(),
    "negative": lambda y: (y * 1j).conj().imag,
    "sparse": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "quantized": lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8),
    "nested": lambda y: torch.nested.nested_tensor([y[0], y[1, :2]], layout=torch.jagged),
    "expanded": lambda y: y[:1].expand(3, 3),
    "empty": lambda y: y[:0],
    "number": lambda y: y.sum(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_tensors_of_all_kinds_are_ordinary_and_equal(name, count):
    make, x = KINDS[name], torch.arange(6.0).reshape(2, 3)
    found = called(lambda x: [make(x + 1)] * count if count > 1 else make(x + 1), x)
    for y in found if count > 1 else [found]:
        expected = make(x + 1)
        assert not y.is_inference()
        assert (type(y), y.dtype, y.layout) == (type(expected), expected.dtype, expected.layout)
        for one, other in zip(plain(y), plain(expected), strict=True):
            assert torch.equal(one, other)


def plain(tensor):
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return [tensor.dequantize()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def test_views_of_one_memory_stay_views_of_it_and_one_tensor_one():
    def model(x):
        y = x * 2
        return y, y[1], y.conj(), y

    y, row, same, again = called(model, torch.ones(2, 3))
    assert y is same is again
    before = row._version
    y.zero_()
    assert row.sum() == 0
    assert row._version > before  # so that autograd notices


def test_real_and_complex_views_of_one_memory_share_it():
    def model(x):
        y = torch.complex(x, x)
        return y, torch.view_as_real(y), y.conj(), y[0]

    y, parts, conjugate, row = called(model, torch.ones(2, 3))
    y.zero_()
    assert parts.abs().sum() == row.abs().sum() == 0
    assert torch.equal(conjugate, torch.full((2, 3), 1 - 1j))  # a copy: it has no strides for this


@pytest.mark.parametrize("is_inference", [False, True])
def test_inputs_and_weights_that_are_handed_through_are_themselves(is_inference):
    class Hands(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.ones(2))

        def forward(self, x, also):
            return self.weight, self.table, x, also["y"], x + 1

    with torch.inference_mode(is_inference):
        model, x, y = Hands(), torch.ones(2), torch.ones(2)
    found = called(model, x, {"y": y})
    assert all(map(lambda a, b: a is b, found, (model.weight, model.table, x, y)))
    assert not found[-1].is_inference()
    assert called(lambda x: x, x) is x


def test_containers_that_are_handed_through_are_themselves():
    given = {"x": torch.ones(2)}

    def model(given):
        given["y"] = given["x"] + 1
        return given

    assert called(model, given) is given
    assert not given["y"].is_inference()


def test_what_refers_to_itself_is_gone_through_once():
    def model(x):
        found = [x + 1]
        found.append(found)
        return found

    found = called(model, torch.ones(2))
    assert found[1] is found
    assert not found[0].is_inference()
