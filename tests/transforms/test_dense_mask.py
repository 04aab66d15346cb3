from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.transforms.base import Applicable
from steadytorch.transforms.dense_mask import DenseMask, dense
from steadytorch.workload.workload import Workload

KEYS, QUERIES, BATCH = 6, 5, 2


class Attention(nn.Module):
    """Attention with a mask that only depends on the query, broadcast along the keys."""

    def __init__(self, by_name: bool = True) -> None:
        super().__init__()
        self.by_name = by_name

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(QUERIES) > 1)[None, None, :, None].expand(BATCH, 1, QUERIES, KEYS)
        if self.by_name:
            return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
        return F.scaled_dot_product_attention(query, key, key, mask, 0.0)


class Causal(nn.Module):
    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(BATCH, 3, QUERIES, 4, generator=generator),
        torch.randn(BATCH, 3, KEYS, 4, generator=generator),
    )


def traced(model: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    """The masks that attention gets within a model as it is compiled."""
    found = []

    def backend(graph, _):
        class See(torch.fx.Interpreter):
            def call_function(self, target, args, kwargs):
                if target is F.scaled_dot_product_attention:
                    found.append(args[3] if len(args) > 3 else kwargs.get("attn_mask"))
                return super().call_function(target, args, kwargs)

        return See(graph).run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*given)
    return found


@pytest.mark.parametrize("by_name", [True, False])
def test_attention_gets_the_mask_written_out_in_compiled_code(by_name):
    (before,) = traced(Attention(by_name), *inputs())
    assert before.stride(-1) == 0
    workload = Workload(Attention(by_name).eval(), inputs())
    with DenseMask().applied(workload) as changed:
        (after,) = traced(changed.model, *inputs())
        assert after.stride(-1) == 1
        assert torch.equal(before, after)


@pytest.mark.parametrize("by_name", [True, False])
def test_results_stay_nan_of_rows_without_keys_included(by_name):
    workload = Workload(Attention(by_name).eval(), inputs())
    with torch.no_grad(), DenseMask().applied(workload) as changed:
        expected, found = workload.model(*inputs()), changed.model(*inputs())
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_model_without_masks_runs_as_ever():
    query, _ = inputs()
    workload = Workload(Causal().eval(), (query,))
    with torch.no_grad(), DenseMask().applied(workload) as changed:
        assert torch.equal(changed.model(query), workload.model(query))


@pytest.mark.parametrize(
    ("mask", "numbers"),
    [
        (torch.ones(1, 1, 5, 1, dtype=torch.bool).expand(2, 3, 5, 6), 30),
        (torch.randn(2, 1, 1, 1).expand(2, 3, 5, 6), 12),
        (torch.randn(2, 3, 6, 5).mT, 180),
        (torch.randn(1).expand(5, 6), 6),
    ],
    ids=["by query", "by image", "transposed", "one value"],
)
def test_no_more_is_written_out_than_must_be(mask, numbers):
    found = dense(mask)
    assert found.stride(-1) == 1
    assert torch.equal(found, mask)
    assert found.untyped_storage().nbytes() == numbers * mask.element_size()


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.randn(5, 6),
        torch.randn(1, 1, 1, 6).expand(2, 3, 5, 6),
        torch.tensor(1.0),
        torch.randn(0, 1).expand(0, 6),
    ],
    ids=["none", "dense", "dense over keys", "no axis", "empty"],
)
def test_other_masks_are_left_alone(mask):
    assert dense(mask) is mask


def test_gradients_pass_through_a_mask_that_is_learnt():
    bias = torch.zeros(1, 1, 5, 1, requires_grad=True)
    dense(bias.expand(2, 3, 5, 6)).sum().backward()
    assert torch.equal(bias.grad, torch.full((1, 1, 5, 1), 36.0))


class Config:
    _attn_implementation = "sdpa"


def test_it_is_for_models_that_may_give_attention_a_mask(gpu, on_gpu):
    assert DenseMask().applies_to(on_gpu(Attention()), gpu) == Applicable()
    configured = nn.Linear(2, 2)
    configured.config = Config()
    assert DenseMask().applies_to(on_gpu(configured), gpu) == Applicable()
    for model in (Causal(), nn.MultiheadAttention(4, 1), nn.Linear(2, 2)):
        answer = DenseMask().applies_to(on_gpu(model), gpu)
        assert answer.reason == "the model passes no mask to attention"
