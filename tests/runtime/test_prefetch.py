from __future__ import annotations

import pytest
import torch

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.runtime.prefetch import prefetch


def batches(count=3):
    return [(torch.full((2,), float(i)), {"index": i}) for i in range(count)]


def test_on_the_cpu_batches_are_passed_on_as_they_are():
    given = batches()
    found = list(prefetch(given, "cpu"))
    assert len(found) == 3
    assert all(one is other for one, other in zip(found, given, strict=True))


def test_without_a_device_named_it_is_the_one_that_is_there():
    given = batches(1)
    (found,) = prefetch(given)
    assert found[0].device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_each_iteration_starts_again():
    loader = prefetch(batches(2), "cpu")
    assert [b["index"] for _, b in loader] == [b["index"] for _, b in loader] == [0, 1]


def test_its_length_is_the_loaders():
    assert len(prefetch(batches(4), "cpu")) == 4


def test_a_loader_without_a_length_gives_none():
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(iter(batches()), "cpu"))


def test_a_device_that_is_not_there_is_refused_at_once():
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    with pytest.raises(UnsupportedError, match="'cuda:1' is not available"):
        prefetch(batches(), "cuda:1")


def test_an_unknown_kind_of_device_is_refused_at_once():
    with pytest.raises(UsageError, match="'meta'"):
        prefetch(batches(), torch.device("meta"))


def test_a_loaders_exception_comes_after_the_batches_before_it():
    def loader():
        yield 1
        yield 2
        raise ValueError("broken file")

    coming = iter(prefetch(loader(), "cpu"))
    assert [next(coming), next(coming)] == [1, 2]
    with pytest.raises(ValueError, match="broken file"):
        next(coming)
