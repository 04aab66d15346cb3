from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.runtime.padding import Extension, declared, extended


def test_batch_alone_is_dimension_0_of_everything():
    (batch,) = declared({"batch": [32, 1, 8, 8]})
    assert (batch.dim, batch.sizes, batch.inputs) == (0, (1, 8, 32), None)
    assert batch.index_in(3, torch.ones(2, 2)) == 0
    assert batch.index_in("mask", torch.ones(2)) == 0
    assert batch.index_in(0, torch.tensor(1.0)) is None


def test_a_full_declaration_says_where_and_with_what():
    (length,) = declared(
        {"length": {"dim": -1, "inputs": [0, "mask"], "sizes": [16], "pad": {0: 7, "mask": 0}}}
    )
    assert length.index_in(0, torch.ones(2, 3)) == 1
    assert length.index_in(1, torch.ones(2, 3)) is None
    assert length.index_in("mask", torch.ones(2, 3, 4)) == 2
    assert [length.value_for(place) for place in (0, "mask", 1)] == [7, 0, None]


def test_one_number_pads_every_input():
    (length,) = declared({"length": {"dim": 1, "sizes": [4], "pad": -1}})
    assert length.value_for(0) == length.value_for("mask") == -1


@given(st.integers(1, 1 << 40))
def test_powers_of_two_hold_any_size_with_less_than_twice_the_room(size):
    (batch,) = declared({"batch": "powers of two"})
    bucket = batch.bucket(size)
    assert bucket.bit_count() == 1
    assert size <= bucket < 2 * size


@given(st.sets(st.integers(1, 100), min_size=1), st.integers(1, 120))
def test_the_bucket_is_the_smallest_that_holds_the_size(sizes, size):
    (batch,) = declared({"batch": list(sizes)})
    assert batch.bucket(size) == min((s for s in sizes if s >= size), default=None)


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ({}, "write them as"),
        ([1, 8], "write them as"),
        (None, "write them as"),
        ({0: [1]}, "use a string"),
        ({"length": [1, 8]}, "does not say which dimension"),
        ({"length": "powers of two"}, "does not say which dimension"),
        ({"length": {"sizes": [1]}}, "has dim None"),
        ({"length": {"dim": "1", "sizes": [1]}}, "has dim '1'"),
        ({"length": {"dim": True, "sizes": [1]}}, "has dim True"),
        ({"length": {"dim": 1}}, "has sizes None"),
        ({"batch": []}, "has sizes"),
        ({"batch": [0, 1]}, "has sizes"),
        ({"batch": [1.5]}, "has sizes"),
        ({"batch": [True]}, "has sizes"),
        ({"batch": "powers of three"}, "has sizes"),
        ({"batch": 8}, "has sizes 8"),
        ({"batch": {"size": [1]}}, "it may have dim, sizes, inputs, pad"),
        ({"batch": {"sizes": [1], "inputs": []}}, "has inputs"),
        ({"batch": {"sizes": [1], "inputs": 0}}, "has inputs 0"),
        ({"batch": {"sizes": [1], "inputs": [-1]}}, "has inputs"),
        ({"batch": {"sizes": [1], "pad": "zero"}}, "has pad"),
        ({"batch": {"sizes": [1], "pad": {"mask": None}}}, "has pad"),
        ({"batch": {"sizes": [1], "pad": {1.5: 0}}}, "has pad"),
        ({"batch": {"sizes": [1], "pad": float("nan")}}, "has pad"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_line(buckets, words):
    with pytest.raises(UsageError, match=words) as raised:
        declared(buckets)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        ((2, 3, 4, 5), torch.channels_last),
        ((1, 3, 4, 5), torch.channels_last),
        ((2, 3, 2, 4, 5), torch.channels_last_3d),
        ((2, 3, 4, 5), torch.contiguous_format),
    ],
)
def test_the_memory_format_is_kept(shape, memory_format):
    tensor = torch.randn(shape).to(memory_format=memory_format)
    grown = extended(tensor, [Extension(0, 4, 0)])
    natural = torch.empty(4, *shape[1:]).to(memory_format=memory_format)
    assert grown.stride() == natural.stride()


def test_any_order_of_strides_is_kept():
    tensor = torch.randn(4, 2, 3).permute(1, 2, 0)
    grown = extended(tensor, [Extension(0, 5, 0)])
    assert grown.stride() == torch.empty(4, 5, 3).permute(1, 2, 0).stride()


def test_an_expanded_tensor_is_written_out():
    grown = extended(torch.arange(3.0).expand(2, 3), [Extension(0, 4, 0)])
    assert grown.is_contiguous()
    assert grown.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0], [0, 0, 0]]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
def test_the_front_is_the_tensor_and_the_rest_is_padding(shape, more, dtype):
    tensor = (torch.arange(1, 1 + torch.Size(shape).numel()) % 5).to(dtype).reshape(shape)
    extensions = [
        Extension(dim, size + extra, 3)
        for dim, (size, extra) in enumerate(zip(shape, more, strict=False))
        if extra
    ]
    grown = extended(tensor, extensions)
    front = grown[tuple(slice(0, size) for size in shape)]
    assert torch.equal(front, tensor)
    assert grown.dtype == dtype
    front.fill_(3)
    assert bool((grown == torch.tensor(3).to(dtype)).all())


def test_the_given_tensor_is_not_shared():
    tensor = torch.ones(2, 2)
    extended(tensor, [Extension(0, 4, 0)]).fill_(5)
    assert torch.equal(tensor, torch.ones(2, 2))


def test_random_padding_is_of_the_tensors_own_size():
    grown = extended(torch.full((2, 100), 1000.0), [Extension(0, 4, None)])
    assert 100 < float(grown[2:].std()) < 10000
    assert extended(torch.zeros(2, 100), [Extension(0, 4, None)])[2:].any()
