"""Transformers' caches among results: converted and copied like containers, refused as inputs."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from steadytorch.errors import UsageError
from steadytorch.graphs.static_buffers import results
from steadytorch.runtime.agreement import disagreement
from steadytorch.runtime.keys import quick_key
from steadytorch.verification.verify import nesting, nesting_fault
from steadytorch.workload.opened import tensors_in_caches
from steadytorch.workload.signature import map_tensors, signature, tensors_of


class CacheLayerMixin:
    """Passes for that of transformers, which need not be installed."""

    __module__ = "transformers.cache_utils"

    def __init__(self, keys):
        self.keys, self.values = keys, keys + 1
        self.dtype, self.stream = keys.dtype, object()


class Cache:
    """As above."""

    __module__ = "transformers.cache_utils"

    def __init__(self, count=2):
        filled = [torch.full((2, 3), float(index)) for index in range(count)]
        self.layers = [CacheLayerMixin(keys) for keys in filled]
        self.kind, self.names = CacheLayerMixin, {0: True}


def result():
    return SimpleNamespace(logits=torch.zeros(2, 5), past=Cache())


def test_tensors_are_converted_in_a_new_cache():
    given = result()
    made = map_tensors(torch.Tensor.double, given)
    assert {t.dtype for t in tensors_of(made)} == {torch.float64}
    assert made.past is not given.past
    assert made.past.layers[0] is not given.past.layers[0]
    assert given.past.layers[1].keys.dtype == torch.float32
    assert made.past.layers[1].stream is given.past.layers[1].stream
    assert (made.past.kind, made.past.names) == (CacheLayerMixin, {0: True})


def test_each_call_of_a_recorded_computation_has_a_cache_of_its_own():
    given = result()
    take = results(given)
    first, second = take.collect(take.place()), take.collect(take.place())
    given.past.layers[0].keys.fill_(9.0)
    assert not first.past.layers[0].keys.any()
    assert first.past.layers[0].keys is not second.past.layers[0].keys


def test_strides_in_a_cache_do_not_matter_but_values_do():
    given, other = result(), result()
    layer = other.past.layers[0]
    layer.keys = layer.keys.t().contiguous().t()
    assert nesting_fault(nesting(other), nesting(given)) is None
    assert disagreement(other, given, 1e-6) is None
    layer.keys = layer.keys + 1
    assert disagreement(other, given, 1e-6) is not None
    other.logits = other.logits.t().contiguous().t()
    assert "strides" in nesting_fault(nesting(other), nesting(given))


def test_other_layers_are_another_nesting():
    given, other = result(), result()
    other.past = Cache(1)
    assert nesting_fault(nesting(other), nesting(given)) is not None
    assert disagreement(other, given, 1e-6) is not None


def test_a_cache_is_refused_as_an_input():
    with pytest.raises(UsageError, match="Cache"):
        signature((Cache(),))
    with pytest.raises(TypeError):
        quick_key((Cache(),), {})


def test_tensors_elsewhere_are_not_in_a_cache():
    given = result()
    assert id(given.logits) not in tensors_in_caches(given)
    assert tensors_in_caches(given) >= {id(given.past.layers[0].keys)}
    assert not tensors_in_caches(copy.copy(given.logits))
