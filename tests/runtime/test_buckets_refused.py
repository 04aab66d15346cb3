from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.runtime.buckets import Buckets, Fitted


def _refusal(declared, model, *args, **kwargs):
    reason = Buckets(declared, model).fit(args, kwargs)
    assert isinstance(reason, str)
    return reason


def _refuse_calls(*args, **kwargs):
    raise AssertionError("called")


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x: x - x.mean(0),
        lambda x: x.mean(0),
        lambda x: x.softmax(0),
        lambda x: x / x.norm(),
        lambda x: x - x.amax(0),
        lambda x: x.amax(0),
        lambda x: x.sum(0),
        lambda x: x.flip(0),
        lambda x: (x, x.shape[0]),
        lambda x: x + x.shape[0],
    ],
)
@pytest.mark.parametrize("x", [torch.rand(3, 4) + 1, torch.zeros(3, 4), torch.ones(3, 4)])
def test_a_model_that_mixes_rows_is_refused(mixing, x):
    assert "padding changes the results" in _refusal({"batch": [8]}, mixing, x)


@pytest.mark.parametrize(
    "mixing", [lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x / x.norm()]
)
def test_rows_mixed_in_small_values_beside_large_ones_are_seen(mixing):
    def model(x):
        return torch.stack([x.cumsum(-1) * 1e6, mixing(x)], 1)

    refused = _refusal({"batch": [8]}, model, torch.rand(3, 64) + 1)
    assert "padding changes the results: output 0 is off by" in refused
    assert "in [:, 1]" in refused
    fitted = Buckets({"batch": [8]}, lambda x: torch.stack([x * 1e6, x.sin()], 1)).fit(
        (torch.rand(3, 64),), {}
    )
    assert isinstance(fitted, Fitted)


@pytest.mark.parametrize("rows", [3, 7])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mixing", [lambda x: x - x.amax(0), lambda x: x - x.amin(0)])
def test_a_maximum_or_minimum_is_refused_for_any_numbers(mixing, sign, rows):
    for seed in range(50):
        torch.manual_seed(seed)
        x = sign * (torch.rand(rows, 1) + 1)
        assert "padding changes the results" in _refusal({"batch": [8]}, mixing, x)


def test_batch_norm_in_training_is_refused_and_its_statistics_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "padding changes the results" in _refusal({"batch": [8]}, model, torch.randn(3, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    fitted = Buckets({"batch": [8]}, model.eval()).fit((torch.randn(3, 4),), {})
    assert isinstance(fitted, Fitted)


def test_switching_the_mode_is_a_new_verification():
    model = nn.BatchNorm1d(4).eval()
    buckets, x = Buckets({"batch": [8]}, model), torch.randn(3, 4)
    assert isinstance(buckets.fit((x,), {}), Fitted)
    model.train()
    assert "padding changes" in buckets.fit((x,), {})


def test_randomness_is_refused_and_the_random_numbers_put_back():
    model, x = nn.Dropout(0.5).train(), torch.randn(5, 40)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert "padding changes the results" in _refusal({"batch": [8]}, model, x)
    assert torch.equal(torch.rand(4), expected)


def test_state_of_the_model_is_not_touched():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.seen.append(x)
            self.count += 1
            return x * 2

    model = Counting()
    assert isinstance(Buckets({"batch": [8]}, model).fit((torch.randn(3, 2),), {}), Fitted)
    assert (model.calls, model.seen, model.count.item()) == (0, [], 0)


def test_a_model_that_writes_to_its_inputs_is_refused_and_has_not_written():
    x = torch.randn(3, 2)
    before = x.clone()
    assert _refusal({"batch": [8]}, torch.relu_, x) == "the model writes to its inputs"
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda x: x.flatten(), "has another size"),
        (lambda x: x[::2], "has another size"),
        (lambda x: x.nonzero(), "padding changes the results"),
        (lambda x: list(x), "nested"),
        (lambda x: x if len(x) < 4 else x[None], "number of dimensions"),
        (lambda x: x.view(3, 4), "fails on padded inputs: RuntimeError"),
    ],
)
def test_outputs_that_cannot_be_cut_are_refused(model, words):
    assert words in _refusal({"batch": [8]}, model, torch.randn(3, 4))


def test_a_dimension_that_follows_two_buckets_is_refused():
    declared = {"batch": [8], "length": {"dim": 1, "sizes": [8]}}
    refusal = _refusal(declared, lambda x: x.sum(1) + x.sum(0), torch.randn(3, 3))
    assert "padding changes" in refusal or "several" in refusal or "fails" in refusal


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.ones(3, 2), torch.ones(4, 2)), "the inputs differ along batch"),
        ((torch.tensor(1.0),), "no input has the dimension"),
        ((), "no input has the dimension"),
        ((torch.ones(0, 2),), "batch is empty"),
        ((torch.ones(9, 2),), "exceeds its largest bucket"),
        ((torch.ones(3, 2).to_sparse(),), "not a dense tensor"),
        ((torch.ones(3, 2), object()), "no signature"),
    ],
)
def test_inputs_without_a_bucket_are_not_fitted(args, words):
    assert words in Buckets({"batch": [8]}, _refuse_calls).fit(args, {})


def test_padding_that_the_type_cannot_hold_is_a_reason():
    declared = {"batch": {"sizes": [8], "pad": float("-inf")}}
    assert "could not be padded" in _refusal(declared, nn.ReLU(), torch.ones(3, 2).long())


def test_inputs_that_look_like_padding_do_not_verify_a_bucket():
    """The mean of equal rows hides that the model takes a mean."""
    embedding = nn.Embedding(5, 2)
    buckets = Buckets({"batch": [8]}, lambda ids: embedding(ids).mean(0))
    assert "other inputs must verify" in buckets.fit((torch.zeros(3, 2, dtype=torch.long),), {})
    assert "padding changes" in buckets.fit((torch.tensor([[1, 2], [3, 4], [0, 1]]),), {})


def test_inputs_that_the_model_rejects_do_not_settle_the_bucket():
    def positive(x):
        assert x.min() >= 0
        return x

    buckets = Buckets({"batch": {"sizes": [8], "pad": 0}}, positive)
    assert buckets.fit((-torch.ones(3),), {}) == "the model raises on these inputs"
    assert isinstance(buckets.fit((torch.ones(3),), {}), Fitted)
