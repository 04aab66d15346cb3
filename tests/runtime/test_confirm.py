"""A built executor serves only once its resolution confirms it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.ranks.agreement import UncertainError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.module import TunedModule

X = torch.ones(2, 3)


def served(confirm, name="inference_mode"):
    model = nn.Linear(3, 3).eval()
    resolution = Resolution((TransformSpec(name),), confirm=confirm)
    return TunedModule(model, lambda context: resolution)


def test_a_confirmed_executor_serves_and_is_confirmed_once():
    asked = []
    fast = served(asked.append)
    fast(X), fast(X)
    assert fast.report().calls == {"tuned": 2}
    assert asked == [None]


def test_a_refused_executor_never_serves_and_the_reason_is_reported():
    fast = served(lambda problem: "all ranks run untouched: rank 1: no memory")
    fast(X), fast(X)
    assert fast.report().calls == {"untouched: all ranks run untouched: rank 1: no memory": 2}


def test_an_executor_that_cannot_be_built_is_told_to_the_others():
    asked = []
    fast = served(asked.append, "no_such_transform")
    torch.testing.assert_close(fast(X), fast.__wrapped__(X))
    assert asked == ["the plan could not be applied"]
    assert "tuned" not in fast.report().calls


def test_an_uncertain_outcome_is_raised():
    def confirm(problem):
        raise UncertainError("the store was lost")

    with pytest.raises(UncertainError, match="the store was lost"):
        served(confirm)(X)
