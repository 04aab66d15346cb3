"""Hand-written options, each run for real where a CPU can run it."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import rival_options
import torch

from .rivalry import Nested, Pair, inputs

ON_CPU = {
    **rival_options.OPTIONS["cpu"],
    **{k: v for k, v in rival_options.OPTIONS["cuda"].items() if "CUDA graph" not in k},
}
TOLERANCE = {"bf16": 0.03, "fp16": 0.005}


@pytest.fixture(autouse=True)
def _flags():
    """Options set switches of the whole process, because they have one to themselves."""
    import torch._inductor.config as inductor

    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision, torch.backends.cudnn.benchmark
    freezing = inductor.freezing
    yield
    matmul.fp32_precision, conv.fp32_precision, torch.backends.cudnn.benchmark = before
    inductor.freezing = freezing
    torch._dynamo.reset()


def marked(name):
    marks = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
    marks = marks if rival_options.compiles(name) else []
    return pytest.param(name, marks=marks, id=name)


# One element type of what compiles is enough: each takes seconds.
@pytest.mark.parametrize("name", [marked(n) for n in ON_CPU if "fp16 compile" not in n])
def test_an_option_returns_what_the_model_does(name):
    model, given = Nested().eval(), inputs()
    with torch.no_grad():
        expected = Nested().eval()(*given)
        call = ON_CPU[name](model, (given, {}))
        found = call(*given)
        kept = found["pair"].scores.clone()
        call(*inputs(2))
    assert isinstance(found["pair"], Pair)
    assert found["pair"].scores.dtype == torch.float32
    tolerance = TOLERANCE.get(name[:4], 1e-5)
    torch.testing.assert_close(found["twice"], expected["twice"], rtol=tolerance, atol=tolerance)
    assert torch.equal(found["pair"].ids, expected["pair"].ids)
    assert torch.equal(found["pair"].scores, kept)


def test_tf32_and_benchmark_mode_set_their_switches():
    ON_CPU["eager TF32, cudnn.benchmark"](Nested(), (inputs(), {}))
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_lowered_model_computes_in_its_element_type():
    lowered = rival_options.Lowered(Nested(), torch.bfloat16)
    seen = []
    lowered.model.pixels.register_forward_hook(lambda m, args, out: seen.append(out))
    lowered(*inputs())
    assert seen[0].dtype == torch.bfloat16
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@dataclasses.dataclass
class Output(OrderedDict):
    """As some libraries return: a dataclass that is a mapping as well."""

    first: torch.Tensor
    second: tuple[torch.Tensor, ...] | None = None


def test_dataclasses_containers_and_constants_are_mapped():
    one = torch.ones(2)
    found = rival_options.mapped(lambda t: t + 1, Output(one, (one, one)))
    assert type(found) is Output
    assert [float(t.sum()) for t in (found.first, *found.second)] == [4.0, 4.0, 4.0]
    assert rival_options.mapped(torch.neg, {"a": [one], "b": "text"})["b"] == "text"


def test_own_copies_what_is_float32_already():
    x = torch.ones(2)
    assert rival_options.own(x).data_ptr() != x.data_ptr()
    assert rival_options.own(torch.ones(2, dtype=torch.int64)).dtype == torch.int64


def test_no_code_of_steadytorch_takes_part():
    source = Path(rival_options.__file__).read_text()
    assert not re.search(r"^\s*(import|from) steadytorch", source, re.MULTILINE)
