"""The hand-written options of the benchmark that need CUDA graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ..benchmarks.rivalry import Nested, nested_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "rivals"))
OPTIONS = __import__("rival_options").OPTIONS["cuda"]


def _inputs(seed):
    ids, image = nested_inputs(seed)
    return ids.cuda(), image.cuda()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in OPTIONS if "max-autotune" not in name])
def test_an_option_returns_what_the_model_does(name):
    torch._dynamo.reset()
    with torch.no_grad():
        call = OPTIONS[name](Nested().eval().cuda(), (_inputs(1), {}))
        first = call(*_inputs(2))
        kept = first["scores"].clone()
        call(*_inputs(3))
        expected = Nested().eval().cuda()(*_inputs(2))
    assert first["scores"].dtype == torch.float32
    torch.testing.assert_close(first, expected, rtol=0.05, atol=0.05)
    assert torch.equal(first["scores"], kept)


def test_a_graph_of_one_tensor_copies_it_in_and_out():
    raw_graph = __import__("rival_options").raw_graph
    call = raw_graph(lambda x: 2 * x, ((torch.zeros(3, device="cuda"),), {}))
    first = call(torch.ones(3, device="cuda"))
    call(torch.zeros(3, device="cuda"))
    assert first.tolist() == [2.0, 2.0, 2.0]
