"""Language models of transformers return their caches; plans convert and copy them."""

from __future__ import annotations

import pytest
import torch

from steadytorch import Workload
from steadytorch.transforms.autocast import Autocast
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.verification.verify import make_reference, verify

transformers = pytest.importorskip("transformers")


@pytest.fixture
def workload():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    return Workload(model, torch.randint(3, 101, (2, 16)))


@pytest.mark.parametrize("kind", [Autocast, CastWeights])
def test_a_lower_precision_keeps_the_form_of_the_cache(workload, kind):
    data, _ = make_reference(workload, 0)
    with torch.no_grad(), kind(kind.Parameters("bf16")).applied(workload) as lower:
        found = verify(lower.model, workload, data)
        assert found.fault is None
        given = lower.model(*workload.inputs)
        own = workload.model(*workload.inputs)
    assert type(given.past_key_values) is type(own.past_key_values)
    keys = [cache.layers[1].keys for cache in (given.past_key_values, own.past_key_values)]
    assert keys[0].dtype == keys[1].dtype
    torch.testing.assert_close(*keys, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the argument's name changes
def test_a_cache_that_a_candidate_returned_goes_on_in_the_model(workload):
    with torch.no_grad(), Autocast(Autocast.Parameters("bf16")).applied(workload) as lower:
        cache = lower.model(*workload.inputs).past_key_values
        own = workload.model(*workload.inputs).past_key_values
        following = torch.tensor([[7], [9]])
        found = workload.model(following, past_key_values=cache).logits
        expected = workload.model(following, past_key_values=own).logits
    assert cache.get_seq_length() == own.get_seq_length() == 17
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
