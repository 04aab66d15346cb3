"""Prefetched batches: their values under every order of events, and what is freed when."""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch

from steadytorch.runtime.prefetch import prefetch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

COUNT = 1 << 20


class Sample(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor
    name: str


def loader(count, size=COUNT):
    for i in range(count):
        yield torch.full((size,), float(i))


def busy():
    """Keeps the current stream occupied for some 25 ms."""
    torch.cuda._sleep(50_000_000)


def test_tensors_are_moved_wherever_they_stand_and_the_rest_is_passed_on():
    sample = Sample(torch.arange(4.0), torch.tensor(3), "a")
    (found,) = prefetch([{"samples": [sample, None], "scale": 2.0}])
    moved = found["samples"][0]
    assert isinstance(moved, Sample)
    assert moved.image.is_cuda
    assert moved.image.tolist() == [0, 1, 2, 3]
    assert (moved.label.item(), moved.name, found["samples"][1], found["scale"]) == (
        3,
        "a",
        None,
        2,
    )
    assert not sample.image.is_cuda


def test_types_and_layouts_are_kept():
    given = (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.empty(0, 3),
        torch.randint(9, (3,), dtype=torch.uint8),
        torch.randn(3).pin_memory(),
    )
    (found,) = prefetch([given])
    for one, other in zip(found, given, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)
    assert found[0].stride() == given[0].stride()


def test_what_is_on_the_device_already_stays_where_it_is():
    there = torch.ones(3, device="cuda")
    (found,) = prefetch([there])
    assert found.data_ptr() == there.data_ptr()


def test_values_are_right_while_the_device_lags_behind():
    sums = []
    for batch in prefetch(loader(12)):
        busy()
        sums.append(batch.sum())
        del batch
    assert [s.item() for s in sums] == [float(i) * COUNT for i in range(12)]


def test_values_are_right_on_a_stream_of_the_consumers_own():
    sums, side = [], torch.cuda.Stream()
    with torch.cuda.stream(side):
        for batch in prefetch(loader(12)):
            busy()
            sums.append(batch.sum())
            del batch
    side.synchronize()
    assert [s.item() for s in sums] == [float(i) * COUNT for i in range(12)]


def test_batches_that_are_kept_keep_their_values():
    kept = list(prefetch(loader(6)))
    assert [batch.unique().tolist() for batch in kept] == [[float(i)] for i in range(6)]


def test_a_host_buffer_that_the_loader_uses_again_does_no_harm():
    buffer = torch.empty(COUNT)

    def again():
        for i in range(8):
            yield buffer.fill_(i)

    busy()
    found = [batch[-1].clone() for batch in prefetch(again())]
    assert [f.item() for f in found] == list(range(8))


def test_a_page_locked_buffer_that_the_loader_uses_again_does_no_harm():
    """Nothing copies from it but the device, later than the loader asks for it again."""
    large = 1 << 26
    buffer = torch.empty(large).pin_memory()

    def again():
        for i in range(6):
            yield buffer.fill_(i)

    found = [batch[[0, -1]].clone() for batch in prefetch(again())]
    assert [f.tolist() for f in found] == [[i, i] for i in range(6)]


def test_two_batches_are_on_the_device_at_a_time():
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in prefetch(loader(10)):
        torch.cuda.synchronize()
        del batch
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4 * COUNT


def test_the_next_batch_is_asked_for_before_this_one_is_worked_on():
    asked = []

    def watched():
        for i in range(3):
            asked.append(i)
            yield torch.zeros(1)

    seen = [(len(asked), int(batch.numel())) for batch in prefetch(watched())]
    assert seen == [(2, 1), (3, 1), (3, 1)]


def test_a_loaders_exception_comes_after_the_batches_before_it():
    def broken():
        yield from loader(2, 4)
        raise ValueError("broken file")

    coming = iter(prefetch(broken()))
    assert [next(coming)[0].item(), next(coming)[0].item()] == [0, 1]
    with pytest.raises(ValueError, match="broken file"):
        next(coming)


@pytest.mark.parametrize("count", [0, 1])
def test_short_loaders_come_to_their_end(count):
    assert len(list(prefetch(loader(count)))) == count


def test_an_early_end_frees_batches_and_loader():
    ended = []

    def watched():
        try:
            yield from loader(10)
        finally:
            ended.append(True)

    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for batch in prefetch(watched()):
        del batch
        break
    gc.collect()
    torch.cuda.synchronize()
    assert ended == [True]
    assert torch.cuda.memory_allocated() == before


def test_workers_of_a_data_loader_are_read_ahead_of():
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(32.0).view(32, 1), torch.arange(32))
    found = prefetch(DataLoader(data, batch_size=8, pin_memory=True))
    assert len(found) == 4
    assert [label.tolist() for _, label in found] == torch.arange(32).view(4, 8).tolist()
