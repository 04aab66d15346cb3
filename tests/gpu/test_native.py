"""The look at weights that lie on a GPU, interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import STALE
from steadytorch.runtime.module import TunedModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.mul_(2),
        lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
        lambda model: setattr(model[0].weight, "data", model[0].weight * 2),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones_like(model[0].weight))),
        lambda model: model.append(nn.ReLU()),
    ],
)
@torch.no_grad()
def test_a_graph_is_given_up_as_soon_as_its_weights_change(change, host_way):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval().cuda()
    x = torch.randn(4, 8, device="cuda")
    tuned = TunedModule(model, lambda context: Resolution((TransformSpec("cuda_graph"),)))
    for _ in range(20):
        torch.testing.assert_close(tuned(x), model(x))
    assert (tuned.report().interpreted_for == "") == (host_way == "compiled")
    assert tuned.report().hits > 10
    change(model)
    torch.testing.assert_close(tuned(x), model(x))
    assert STALE in tuned.report().fallbacks
