"""Logits over an odd number of tokens keep their strides, though Inductor pads the product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch import Workload
from steadytorch.transforms.compile import Compile

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own
TOKENS = 50_257


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(768, 768), nn.Linear(768, TOKENS, bias=False)

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return self.head(self.body(x).relu())


def test_logits_keep_their_strides_in_training():
    torch.manual_seed(0)
    model, x = Head().cuda(), torch.randn(4, 256, 768, device="cuda")
    with Compile().applied(Workload(model, x)) as compiled:
        own, found = model(x), compiled.model(x)
        assert torch.compile(model)(x).stride() != own.stride(), "Inductor does not pad any more"
        assert found.stride() == own.stride()
        torch.testing.assert_close(found, own, rtol=0.02, atol=0.02)
        found.view(-1).square().mean().backward()
        assert model.head.weight.grad.isfinite().all()
