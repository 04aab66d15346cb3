from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.errors import UnsupportedError
from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.workload.workload import Workload

BF16 = CastWeights.Parameters("bf16")


class Mixed(nn.Module):
    """Takes integers and floats, returns one of each and remembers the type it computed in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.ones(2))
        self.register_buffer("index", torch.tensor([1, 0]))

    def forward(self, x, ids):
        self.seen = x.dtype, ids.dtype, self.offset.dtype
        return (x * self.weight + self.offset)[self.index], ids


def mixed():
    return Workload(Mixed().eval(), (torch.ones(2), torch.tensor([3])))


def test_it_computes_in_the_type_and_returns_the_workloads_own():
    with CastWeights(BF16).applied(mixed()) as cast:
        output, ids = cast.model(torch.ones(2), torch.tensor([3]))
    assert cast.model.inner.seen == (torch.bfloat16, torch.int64, torch.bfloat16)
    assert (output.dtype, ids.dtype) == (torch.float32, torch.int64)


def test_the_inputs_stay_the_callers():
    made = mixed()
    with CastWeights(BF16).applied(made) as cast:
        assert all(now is before for now, before in zip(cast.inputs, made.inputs, strict=True))


def test_precision_is_the_element_type():
    assert CastWeights(BF16).precision == "bf16"


def test_fp16_on_a_cpu_is_refused(cpu):
    answer = CastWeights(CastWeights.Parameters("fp16")).applies_to(mixed(), cpu)
    assert answer == NotApplicable("fp16 arithmetic is emulated on a CPU")


def test_a_16_bit_model_is_refused(cpu):
    made = Workload(Mixed().bfloat16(), ())
    assert "bfloat16" in CastWeights(BF16).applies_to(made, cpu).reason


def test_a_plain_callable_is_refused(cpu):
    answer = CastWeights(BF16).applies_to(Workload(abs, torch.ones(1)), cpu)
    assert answer.reason == "the model is a plain callable, not an nn.Module"


def test_a_float32_module_will_do(cpu):
    assert CastWeights(BF16).applies_to(mixed(), cpu) == Applicable()


def test_a_model_with_hooks_is_refused_as_they_would_be_given_other_types(cpu):
    made = mixed()
    made.model.register_forward_hook(lambda *given: None)
    assert "hooks" in CastWeights(BF16).applies_to(made, cpu).reason
    with pytest.raises(UnsupportedError, match="hooks"), CastWeights(BF16).applied(made):
        pass


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_norms_of_weights_are_hooks_that_may_be_given_other_types(cpu):
    made = Workload(nn.utils.weight_norm(nn.Linear(2, 2)).eval(), (torch.ones(1, 2),))
    assert made.model._forward_pre_hooks
    assert CastWeights(BF16).applies_to(made, cpu) == Applicable()
    with CastWeights(BF16).applied(made) as cast:
        torch.testing.assert_close(
            cast.model(*made.inputs), made.model(*made.inputs), rtol=0.05, atol=0.05
        )
