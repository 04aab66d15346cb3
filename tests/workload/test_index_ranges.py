from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from steadytorch.workload.index_ranges import Range
from steadytorch.workload.indices import find_indices

ROWS, LOGITS = torch.randn(10, 8), torch.randn(12, 10)
LABELS = Range(0, 10, -100)
DIVISORS = Range(-(1 << 63), 1 << 63, divides=True)
IDS = torch.arange(12) % 7 + 1
FOUND = {
    "embedding": (lambda i: F.embedding(i, ROWS), Range(0, 10)),
    "a view": (lambda i: F.embedding(i.view(3, 4).t().flip(1)[None], ROWS), Range(0, 10)),
    "a part": (lambda i: F.embedding(i[1:], ROWS), None),
    "less wide": (lambda i: F.embedding(i.int(), ROWS), None),
    "wider": (lambda i: F.embedding(i.int().long(), ROWS), None),
    "a bag": (lambda i: F.embedding_bag(i.view(3, 4), ROWS), Range(0, 10)),
    "rows": (lambda i: ROWS[i], Range(-10, 10)),
    "columns": (lambda i: ROWS[:, i], Range(-8, 8)),
    "beside a mask": (lambda i: LOGITS[torch.ones(12, dtype=torch.bool), i], Range(-10, 10)),
    "select": (lambda i: ROWS.index_select(1, i), Range(0, 8)),
    "gather": (lambda i: LOGITS.gather(1, i[:, None]), Range(0, 10)),
    "take": (lambda i: ROWS.take(i), Range(-80, 80)),
    "scatter": (lambda i: torch.zeros(9, 9).scatter(1, i.view(3, 4), 1.0), Range(0, 9)),
    "one hot": (lambda i: F.one_hot(i, 9), Range(0, 9)),
    "written": (lambda i: torch.zeros(9).index_put((i,), torch.ones(())), Range(-9, 9)),
    "classes": (lambda i: F.cross_entropy(LOGITS, i), LABELS),
    "shifted": (lambda i: F.cross_entropy(LOGITS, F.pad(i, (0, 1), value=-100)[1:]), None),
    "filled": (lambda i: torch.zeros(9).index_fill(0, i, 1.0), Range(-9, 9)),
    "rolled": (lambda i: F.cross_entropy(LOGITS, i.roll(-1)), LABELS),
    "both": (lambda i: (ROWS[i], F.embedding(i, ROWS[:9])), Range(0, 9)),
    "a divisor": (lambda i: 100 // (i.view(3, 4)), DIVISORS),
    "a remainder": (lambda i: torch.full_like(i, 100) % i, DIVISORS),
    "in place": (lambda i: torch.full_like(i, 100).remainder_(i), DIVISORS),
    "a ratio of numbers": (lambda i: LOGITS[:, 0] / i, None),
    "nothing": (lambda i: i + 1, None),
    "moved": (lambda i: F.embedding(i + 1, ROWS), None),
}


@pytest.mark.parametrize("name", FOUND)
def test_indices_have_the_range_of_what_they_index(name):
    call, expected = FOUND[name]
    found = find_indices(lambda: call(IDS), [torch.ones(1), IDS])
    assert found.given == ({} if expected is None else {1: expected})


@pytest.mark.parametrize(
    "name", [n for n, (_, r) in FOUND.items() if r and r.high <= 80 and r != LABELS]
)
@pytest.mark.parametrize("end", ["low", "high"])
def test_pytorch_raises_just_beyond_the_range(name, end):
    call, allowed = FOUND[name]
    last = {"low": allowed.low, "high": allowed.high - 1}[end]
    for value, raises in ((last, False), (last + (1 if end == "high" else -1), True)):
        ids = IDS.clone()
        ids[5] = value
        assert allowed.excludes(ids) is raises
        if raises:
            with pytest.raises((IndexError, RuntimeError)):
                call(ids)
        else:
            call(ids)


@given(
    values=st.lists(st.integers(-20, 20), max_size=8),
    low=st.integers(-10, 5),
    size=st.integers(1, 10),
    other=st.none() | st.integers(-20, 20),
    divides=st.booleans(),
)
def test_a_range_excludes_what_lies_outside(values, low, size, other, divides):
    within = all(low <= value < low + size or value == other for value in values)
    within = within and not (divides and 0 in values)
    tensor = torch.tensor(values, dtype=torch.int64)
    assert Range(low, low + size, other, divides).excludes(tensor) is not within
