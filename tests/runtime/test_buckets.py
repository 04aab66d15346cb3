from __future__ import annotations

from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.runtime import buckets as rooms
from steadytorch.runtime.buckets import Buckets, Fitted

Pair = namedtuple("Pair", "logits hidden")


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval()


def _served(buckets, model, *args, **kwargs):
    """What a caller gets through the bucket, which must be one."""
    fitted = buckets.fit(args, kwargs)
    assert isinstance(fitted, Fitted), fitted
    with torch.no_grad():
        return fitted.slice_outputs(model(*fitted.args, **fitted.kwargs))


def _check(declared, model, *args, **kwargs):
    with torch.no_grad():
        expected = model(*args, **kwargs)
    found = _served(Buckets(declared, model), model, *args, **kwargs)
    torch.testing.assert_close(found, expected)
    return found


def test_inputs_are_padded_and_outputs_cut():
    model = _network()
    fitted = Buckets({"batch": [4, 8]}, model).fit((torch.randn(3, 5),), {})
    assert fitted.args[0].shape == (4, 5)
    assert not fitted.args[0][3:].any()
    assert fitted.slice_outputs(model(*fitted.args)).shape == (3, 3)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([[1, 8, 32], None]))
def test_rows_are_those_of_the_untouched_model_or_it_runs_untouched(sizes, declared):
    model = _network()
    buckets = Buckets({"batch": declared or "powers of two"}, model)
    for size in sizes:
        x = torch.randn(size, 5)
        fitted = buckets.fit((x,), {})
        if declared and size > 32:
            assert fitted == "batch exceeds its largest bucket"
            continue
        room = fitted.args[0].shape[0]
        assert room in (declared or [1 << i for i in range(7)])
        with torch.no_grad():
            found, expected = fitted.slice_outputs(model(*fitted.args)), model(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_inputs_of_a_buckets_size_are_passed_as_they_are():
    x = torch.randn(8, 5)
    fitted = Buckets({"batch": [8]}, _refuse_calls).fit((x,), {"mode": "fast"})
    assert fitted.args[0] is x
    assert fitted.kwargs == {"mode": "fast"}
    assert fitted.slice_outputs("anything") == "anything"


def _refuse_calls(*args, **kwargs):
    raise AssertionError("called")


def test_output_dimensions_are_found_by_movement_not_by_number():
    """The model has 3 features: as many as rows come, and as many as the bucket has for 4."""

    class Square(nn.Module):
        def forward(self, x):
            return x @ torch.ones(3, 3), x.T + 1, torch.eye(3), torch.eye(4)

    found = _check({"batch": [4]}, Square(), torch.randn(3, 3))
    assert [tuple(t.shape) for t in found] == [(3, 3), (3, 3), (3, 3), (4, 4)]


def test_two_dimensions_of_one_size_are_told_apart():
    declared = {"batch": [8], "length": {"dim": 1, "sizes": [8]}}
    found = _check(declared, lambda x: (x.transpose(0, 1) * 2, x[..., 0]), torch.randn(3, 3, 2))
    assert found[0].shape == (3, 3, 2)


def test_each_dimension_is_padded_only_where_it_falls_short():
    model = nn.Linear(4, 4)
    buckets = Buckets({"batch": [4, 8], "length": {"dim": 1, "sizes": [16]}}, model)
    for shape in ((4, 9, 4), (3, 16, 4), (3, 9, 4), (7, 2, 4)):
        assert _served(buckets, model, torch.randn(shape)).shape == shape


class Attention(nn.Module):
    """Token ids and a mask to one vector per sequence and one per token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, ids, attention_mask):
        hidden = self.mix(self.embedding(ids), src_key_padding_mask=attention_mask == 0)
        weight = attention_mask[..., None].float()
        return {"pooled": (hidden * weight).sum(1) / weight.sum(1), "hidden": hidden * weight}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_a_masked_model_is_served_along_batch_and_length():
    torch.manual_seed(0)
    model = Attention().train()
    declared = {
        "batch": {"sizes": "powers of two", "pad": {"attention_mask": 1}},
        "length": {"dim": 1, "sizes": [16, 32], "pad": {0: 49, "attention_mask": 0}},
    }
    ids = torch.randint(50, (3, 11))
    mask = (torch.arange(11) < torch.tensor([[11], [7], [4]])).long()
    found = _check(declared, model, ids, attention_mask=mask)
    assert found["hidden"].shape == (3, 11, 8)


def test_named_inputs_alone_are_padded():
    model = nn.Bilinear(2, 2, 2)

    def call(x, table):
        return model(x, x) @ table

    declared = {"batch": {"inputs": [0], "sizes": [4]}}
    assert _check(declared, call, torch.randn(3, 2), torch.randn(2, 2)).shape == (3, 2)


@dataclass
class Answer:
    rows: torch.Tensor
    note: str


pytree.register_dataclass(Answer)


def test_nested_inputs_and_outputs_are_handled():
    def call(images, *, extra):
        x = images["left"] + images["pair"][1]
        pair = Pair(x, [x[:, 0], extra])
        return {"pair": pair, "answer": Answer(-x, "kept"), "none": None}

    left, right = torch.randn(3, 2), torch.randn(3, 2)
    images = {"left": left, "pair": (1, right)}
    found = _served(Buckets({"batch": [4]}, call), call, images, extra=5)
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].logits, left + right)
    assert torch.equal(found["answer"].rows, -left - right)
    assert (found["answer"].note, found["none"], found["pair"].hidden[1]) == ("kept", None, 5)


def test_the_memory_format_of_inputs_and_outputs_is_kept():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 8, 8).to(memory_format=torch.channels_last)
    fitted = Buckets({"batch": [4]}, model).fit((x,), {})
    assert fitted.args[0].is_contiguous(memory_format=torch.channels_last)
    found = _check({"batch": [4]}, model, x)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_an_output_cut_along_an_inner_dimension_can_be_viewed():
    declared = {"length": {"dim": 1, "sizes": [8]}}
    assert _check(declared, nn.ReLU(), torch.randn(2, 5, 3)).view(-1).shape == (30,)


def test_no_memory_is_shared_between_calls():
    buckets, x = Buckets({"batch": [4]}, nn.ReLU()), torch.randn(3, 2)
    first, second = buckets.fit((x,), {}), buckets.fit((x,), {})
    assert first.args[0].data_ptr() != second.args[0].data_ptr()
    first.args[0].fill_(9)
    assert torch.equal(second.args[0][:3], x)


def test_verification_happens_once_per_bucket():
    calls = []
    buckets = Buckets({"batch": [4, 8]}, lambda x: calls.append(len(x)) or x + 1)
    buckets.fit((torch.randn(3),), {})
    assert calls == [3, 4, 4, 4, 4]
    for size in (1, 2, 3):
        buckets.fit((torch.randn(size),), {})
    assert len(calls) == 5
    buckets.fit((torch.randn(5),), {})
    assert calls[5:] == [5, 8, 8, 8, 8]


def test_constants_of_the_call_are_part_of_what_was_verified():
    def call(x, mode):
        return x.mean(0) if mode == "mean" else x

    buckets, x = Buckets({"batch": [4]}, call), torch.randn(3, 2)
    assert isinstance(buckets.fit((x, "rows"), {}), Fitted)
    assert "padding changes" in buckets.fit((x, "mean"), {})


def test_outputs_of_another_form_than_verified_are_not_cut():
    fitted = Buckets({"batch": [4]}, nn.ReLU()).fit((torch.randn(3, 2),), {})
    for outputs in (torch.ones(5, 2), torch.tensor(1.0), (), "text"):
        with pytest.raises(UnsupportedError, match="other than those verified"):
            fitted.slice_outputs(outputs)


def test_memory_stays_bounded_when_other_dimensions_never_repeat(monkeypatch):
    monkeypatch.setattr(rooms, "MOST_REMEMBERED", 5)
    buckets = Buckets({"batch": [4]}, nn.ReLU())
    found = [buckets.fit((torch.randn(3, width),), {}) for width in range(1, 9)]
    assert [isinstance(f, Fitted) for f in found] == [True] * 5 + [False] * 3
    assert "too many shapes" in found[-1]
    assert len(buckets._known) == 5


def test_other_threads_do_not_wait_for_a_verification():
    entered, leave = Event(), Event()

    def slow(x):
        entered.set()
        assert leave.wait(60)
        return x + 1

    buckets, x = Buckets({"batch": [4]}, slow), torch.randn(3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(buckets.fit, (x,), {})
        assert entered.wait(60)
        assert buckets.fit((x,), {}) == "its bucket is being verified"
        leave.set()
        assert isinstance(first.result(), Fitted)
    assert isinstance(buckets.fit((x,), {}), Fitted)


def test_an_interrupted_verification_starts_again():
    calls = []

    def interrupted(x):
        calls.append(x)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return x

    buckets, x = Buckets({"batch": [4]}, interrupted), torch.randn(3)
    with pytest.raises(KeyboardInterrupt):
        buckets.fit((x,), {})
    assert isinstance(buckets.fit((x,), {}), Fitted)


def test_a_wrong_declaration_is_refused_when_it_is_made():
    with pytest.raises(UsageError, match="has sizes"):
        Buckets({"batch": [0]}, nn.ReLU())


def test_threads_get_their_own_rows():
    model = _network()
    buckets = Buckets({"batch": "powers of two"}, model)
    for size in (2, 4, 8, 16):
        buckets.fit((torch.randn(size - 1, 5),), {})

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(
                int(torch.randint(1, 16, (), generator=generator)), 5, generator=generator
            )
            with torch.no_grad():
                fitted = buckets.fit((x,), {})
                assert isinstance(fitted, Fitted), fitted
                torch.testing.assert_close(
                    fitted.slice_outputs(model(*fitted.args, **fitted.kwargs)), model(x)
                )
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_sizes_in_outputs_stay_sizes():
    def model(x):
        return x * 2, torch.Size([7])

    _, size = _check({"batch": [4]}, model, torch.ones(3, 5))
    assert type(size) is torch.Size
