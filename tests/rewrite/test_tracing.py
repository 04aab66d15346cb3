from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from steadytorch.rewrite.tracing import traced
from steadytorch.workload.workload import Workload


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        found = OrderedDict(out=self.head(x))
        found["nested"] = {"twice": [OrderedDict(x=x * 2)]}
        return found


def test_an_ordered_dictionary_stays_one():
    model, x = Segments().eval(), torch.randn(3, 4)
    copied, graph = traced(Workload(model, x))
    found, expected = torch.fx.GraphModule(copied, graph)(x), model(x)
    assert type(found) is type(expected) is OrderedDict
    assert list(found) == ["out", "nested"]
    assert torch.equal(found["out"], expected["out"])
    inner = found["nested"]["twice"][0]
    assert type(inner) is OrderedDict
    assert torch.equal(inner["x"], 2 * x)
