from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from steadytorch.workload import indices
from steadytorch.workload.index_ranges import Range
from steadytorch.workload.indices import Indices, checked, find_indices

ROWS, OFFSETS, TABLE = torch.randn(20, 4), torch.tensor([[0, 4, 8, 12]]), torch.arange(9)
SCALE = torch.tensor(2.5)
SHAPE = (2, 4)
IDS = torch.tensor([[1, 2, 3, 4], [4, 3, 0, 1]])


def shifted(ids):
    """Inputs of a decoder, made from labels."""
    found = ids.new_zeros(ids.shape)
    found[:, 1:] = ids[:, :-1].clone()
    found[:, 0] = 2
    return found.masked_fill_(found == -100, 1)


def positions(ids):
    """Positions of tokens that are not padding."""
    kept = ids.ne(1).int()
    return (kept.cumsum(1).type_as(kept) * kept).long() + 1


def added(ids):
    torch._foreach_add_([ids], 2)
    return ids


def padded(ids):
    found = torch.zeros(2, 6, dtype=torch.long)
    found[:, :4].add_(ids)
    return found[:, 1:].flip(1)


MADE = {
    "moved": lambda ids: ids + 1,
    "scaled": lambda ids: ids * 3 + 1,
    "remainder": lambda ids: ids % 20,
    "clamped": lambda ids: ids.clamp(0, 19),
    "features": lambda ids: ids + OFFSETS,
    "looked up": lambda ids: TABLE[ids] + 10,
    "chosen": lambda ids: torch.where(ids == 3, 19, ids),
    "joined": lambda ids: torch.cat([ids, ids * 2], 1),
    "parts": lambda ids: [part + 9 for part in ids.split(2, 1)][1],
    "decoder": shifted,
    "positions": positions,
    "padded": padded,
    "pairs": lambda ids: ids[:, :-1] * 4 + ids[:, 1:],
    "differences": lambda ids: ids.diff(dim=1).abs(),
    "sorted": lambda ids: ids.sort(1).values,
    "from the smallest": lambda ids: ids - ids.min(),
    "counted": lambda ids: (ids > 4).sum(1) * 7,
    "less wide": lambda ids: ids.to(torch.uint8).long(),
    "added in place": lambda ids: added(ids.clone()),
    "quotients": lambda ids: (40 // ids.add(9)).clamp(0, 19),
    "scaled by a number": lambda ids: (ids * SCALE).long(),
    "made from random numbers": lambda ids: (torch.rand(SHAPE) * 20).long() + ids * 0,
    "largest": lambda ids: ids.argmax(1) + 15,
    "order": lambda ids: ids.sort(1).indices + 15,
    "read": lambda ids: ids + int(ids.max()),
}
UNKNOWN = ("made from random numbers", "largest", "order", "read", "remainder", "clamped")


def raises(call, ids):
    try:
        call(ids.clone())
    except (IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("name", MADE)
def test_computed_indices_are_checked(name):
    def call(ids):
        return F.embedding(MADE[name](ids), ROWS)

    found = find_indices(lambda: call(IDS), [torch.ones(1), IDS])
    assert bool(found) is (name not in UNKNOWN)
    wrong = 0
    for place in range(IDS.numel()):
        for value in (-100, -9, -7, -1, 0, 5, 8, 19, 20, 300):
            ids = IDS.clone()
            ids.view(-1)[place] = value
            is_wrong = name not in UNKNOWN and raises(call, ids)
            wrong += is_wrong
            # An index that is given is checked whole, even if a part of it is used.
            assert found.out_of_range([None, ids]) is is_wrong or (found.given and not is_wrong)
    assert wrong or name in (*UNKNOWN, "positions", "counted")


CHAINS = st.lists(
    st.sampled_from(
        [
            lambda x: x + 1,
            lambda x: x - 2,
            lambda x: x * 2,
            lambda x: x.int(),
            lambda x: x.double() / 2,
            lambda x: x.clamp(max=15),
            lambda x: x.flip(1),
            lambda x: x.roll(1, 0),
            lambda x: x[:, 1:],
            lambda x: x.t().contiguous().t(),
            lambda x: x.clone().add_(3),
            lambda x: x.clone().fill_(2),
            lambda x: x.cumsum(1),
            lambda x: torch.where(x > 9, x - 9, x),
            lambda x: x.masked_fill(x < 0, 0),
            lambda x: x.new_zeros(x.shape).copy_(x),
            lambda x: x.amax(1, keepdim=True).expand_as(x),
            lambda x: x.new_full(x.shape, 4).index_fill_(1, x.new_ones(1).long() * 0, 7),
        ]
    ),
    max_size=6,
)
VALUES = st.lists(st.integers(-30, 40), min_size=8, max_size=8)


@given(chain=CHAINS, before=st.lists(st.integers(0, 5), min_size=8, max_size=8), after=VALUES)
def test_what_is_checked_is_what_raises(chain, before, after):
    def call(ids):
        for change in chain:
            assume(ids.shape[1])
            ids = change(ids)
        return F.embedding(ids.long(), ROWS)

    first, ids = torch.tensor(before).view(SHAPE), torch.tensor(after).view(SHAPE)
    assume(not raises(call, first))
    found = find_indices(lambda: call(first), [first])
    assert not found.out_of_range([first])
    is_wrong = raises(call, ids)
    assert found.out_of_range([ids]) is is_wrong or (found.given and not is_wrong)


class Counts(torch.nn.Module):
    """Counts its calls in a buffer, and shifts indices by another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))
        self.register_buffer("shift", torch.tensor([3]))

    def forward(self, ids):
        self.calls += 1
        return F.embedding(ids + self.shift, ROWS) + F.embedding(ids + self.calls, ROWS)


def test_buffers_are_read_and_never_written():
    model, live = Counts(), torch.tensor([3])
    found = find_indices(lambda: model(IDS), [IDS], {id(model.shift): live})
    for shift, is_wrong in ((3, False), (15, False), (16, True)):
        live.fill_(shift)
        assert found.out_of_range([IDS]) is is_wrong
    assert model.calls == 1


def test_a_model_that_writes_to_its_inputs_is_not_repeated():
    ids = IDS.clone()
    found = find_indices(lambda: F.embedding(ids.add_(1), ROWS), [ids])
    before = ids.clone()
    assert not found.out_of_range([ids])
    assert torch.equal(ids, before)


def test_columns_are_told_apart():
    def call(ids):
        return ROWS[ids[:, 0]] + F.embedding(ids[:, 1], torch.cat([ROWS] * 3))

    first = torch.tensor([[1, 2], [3, 4]])
    found = find_indices(lambda: call(first), [first]).allowing([first])
    for ids, is_wrong in (([[1, 50]], False), ([[50, 1]], True), ([[1, 60]], True)):
        ids = torch.tensor(ids * 2)
        assert raises(call, ids) is is_wrong
        assert found.out_of_range([ids]) is is_wrong


def test_inputs_may_have_gaps():
    wide = torch.arange(12).view(2, 6)
    ids = wide[:, :4].clone()
    found = find_indices(lambda: F.embedding(ids.reshape(-1) + 1, ROWS), [ids])
    assert not found.out_of_range([wide[:, :4]])
    assert found.out_of_range([wide[:, :4] + 12])


def test_a_bound_makes_a_check_needless():
    found = find_indices(lambda: F.embedding((IDS + 7) % 20, ROWS), [IDS])
    assert not found
    assert find_indices(lambda: F.embedding((IDS + 7) % 21, ROWS), [IDS])


def test_one_check_that_fails_leaves_the_others():
    def call(ids):
        return F.embedding(ids + 1, ROWS).sum() + (F.embedding(ids + 3, ROWS[:5]).sum())

    first = torch.tensor([[0, 1]])
    found = find_indices(lambda: call(first), [first])
    kept = found.allowing([first + 4])  # as if the second result were masked
    assert not kept.out_of_range([first + 4])
    assert kept.out_of_range([first + 30])


@torch.library.custom_op("steadytorch_tests::shifted", mutates_args=())
def user_operator(ids: torch.Tensor) -> torch.Tensor:
    return ids + int(torch.randint(3, ()))


def test_operators_of_the_user_are_not_repeated():
    def call():
        return F.embedding(user_operator(IDS), ROWS)

    before = torch.get_rng_state()
    found = find_indices(call, [IDS])
    torch.set_rng_state(before)
    assert not found.out_of_range([IDS])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_operators_that_take_functions_run_as_before():
    def call(ids):
        tripled = torch.cond(ids.sum() > 3, lambda x: x * 3, lambda x: x * 2, (ids,))
        return F.embedding(tripled, ROWS) + F.embedding(ids + 1, ROWS)

    found = find_indices(lambda: call(IDS), [IDS])
    assert found.out_of_range([IDS + 19])
    torch.testing.assert_close(call(IDS), F.embedding(IDS * 3, ROWS) + F.embedding(IDS + 1, ROWS))


def test_long_and_large_computations_are_not_repeated(monkeypatch):
    def call(ids):
        for _ in range(3):
            ids = ids + 1
        return F.embedding(ids, ROWS)

    assert find_indices(lambda: call(IDS), [IDS])
    monkeypatch.setattr(indices, "MOST_STEPS", 2)
    assert not find_indices(lambda: call(IDS), [IDS])
    monkeypatch.undo()
    monkeypatch.setattr(indices, "MOST_ELEMENTS", 3 * 8 - 1)
    assert not find_indices(lambda: call(IDS), [IDS])
    monkeypatch.undo()
    monkeypatch.setattr(indices, "MOST_BYTES", 1)
    assert not find_indices(lambda: call(IDS), [IDS])


@pytest.mark.parametrize("integers", [False, True])
def test_the_time_to_record_calls_without_integers_is_limited(monkeypatch, integers):
    x = IDS if integers else IDS.float()
    monkeypatch.setattr(indices, "SECONDS", -1.0)
    found = find_indices(lambda: F.embedding(x.long() + 1, ROWS), [x])
    assert bool(found) is integers


def test_what_the_recorded_call_has_out_of_range_is_not_checked():
    found = Indices({0: Range(0, 3), 1: Range(0, 9)})
    kept = found.allowing([IDS, IDS])
    assert kept.given == {1: Range(0, 9)}
    both = find_indices(lambda: F.embedding(IDS + 1, ROWS), [IDS])
    assert both.allowing([IDS])
    assert not both.allowing([IDS + 30])


def test_checked_calls_raise_for_indices_out_of_range():
    call = checked(lambda x, i: x[i], Indices({1: Range(0, 3)}))
    assert torch.equal(call(ROWS, torch.tensor([0, 2])), ROWS[[0, 2]])
    with pytest.raises(IndexError):
        call(ROWS, torch.tensor([0, 3]))
    assert checked(call, Indices({})) is call
