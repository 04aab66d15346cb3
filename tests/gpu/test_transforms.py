"""The promises of the transforms on a GPU, and what CUDA graphs promise beyond them."""

from __future__ import annotations

import gc
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import all_variants, create, order
from steadytorch.transforms.base import NotApplicable, applied_in_order
from steadytorch.transforms.cuda_graph import CudaGraph
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

contract: Any = sys.modules["steadytorch_transforms_contract"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("ieee"),
]


def spec(name: str, **parameters: str | int | bool) -> TransformSpec:
    return TransformSpec(name, tuple(parameters.items()))


FROZEN = spec("compile", mode="default", freezing=True)
COMPILED = (
    FROZEN,
    spec("compile", mode="default", freezing=False),
    spec("compile", mode="coordinate-descent", freezing=True),
    spec("compile", mode="reduce-overhead", freezing=True),
)
STACKS = {
    "eager stack": (
        spec("fold_batch_norm"),
        spec("cast_weights", dtype="bf16"),
        spec("channels_last"),
        spec("inference_mode"),
        spec("cudnn_benchmark", limit=10),
        spec("cuda_graph"),
    ),
    "compiled stack": (
        spec("cast_weights", dtype="fp16"),
        spec("channels_last"),
        FROZEN,
        spec("cuda_graph"),
    ),
    "compiled in TF32": (FROZEN, spec("tf32"), spec("cuda_graph")),
}

# The model of patches has no batch norm.
PATCHES = {
    label: order([spec("linear_patches"), *STACKS[label][start:]])
    for label, start in (("eager stack", 1), ("compiled stack", 0))
}


def _cases() -> list[Any]:
    cases = []
    for name in contract.WORKLOADS:
        for transform in all_variants(contract.LISTED_FOR):
            # `prefetch` changes no model: see test_prefetch_transform.py.
            if transform.name not in ("compile", "attention_backend", "prefetch"):
                cases.append(pytest.param((name, (transform.spec,)), id=f"{name}-{transform.spec}"))
    for one in COMPILED:
        cases.append(pytest.param(("conv", (one,)), id=f"conv-{one}", marks=contract.SLOW))
    cases.append(
        pytest.param(("attention", (COMPILED[2],)), id="attention-graphs", marks=contract.SLOW)
    )
    for label, stack in PATCHES.items():
        cases.append(pytest.param(("patches", stack), id=f"patches-{label}", marks=contract.SLOW))
    for label, stack in STACKS.items():
        cases.append(pytest.param(("conv", order(stack)), id=f"conv-{label}", marks=contract.SLOW))
    return cases


@pytest.fixture(scope="module")
def evidence(request: pytest.FixtureRequest, ieee: None, facts: DeviceFacts) -> Any:
    name, specs = request.param
    workload = contract.WORKLOADS[name]("cuda")
    transforms = [create(one) for one in specs]
    for transform in transforms:
        answer = transform.applies_to(workload, facts)
        if isinstance(answer, NotApplicable):
            pytest.skip(f"{transform.spec}: {answer.reason}")
    return contract.exercise(transforms, workload)


every_case = pytest.mark.parametrize("evidence", _cases(), indirect=True)


@every_case
def test_outputs_agree_with_the_untouched_model(evidence):
    contract.assert_close(evidence.first, evidence.expected, evidence.precision)


@every_case
def test_original_inputs_are_accepted(evidence):
    contract.assert_close(evidence.original_inputs, evidence.expected, evidence.precision)


@every_case
def test_other_values_of_the_same_signature_give_their_own_outputs(evidence):
    contract.assert_close(evidence.other, evidence.expected_other, evidence.precision)


@every_case
def test_outputs_are_intact_after_the_next_calls(evidence):
    assert all(map(torch.equal, evidence.first, evidence.first_at_once))


@every_case
def test_outputs_are_ordinary_tensors(evidence):
    assert not any(tensor.is_inference() for tensor in evidence.first + evidence.other)


@every_case
def test_the_original_model_is_untouched(evidence):
    assert evidence.state_kept
    assert evidence.strides_kept


@every_case
def test_inputs_are_not_written_to(evidence):
    assert evidence.inputs_kept


@every_case
def test_no_process_setting_is_changed_between_calls_or_after(evidence):
    assert evidence.ambient_between == evidence.ambient_before
    assert evidence.ambient_after == evidence.ambient_before


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "math"])
def test_attention_backends_agree_with_pytorchs_own_choice(backend, facts):
    made = contract.attention_workload("cuda")
    half = replace(
        made,
        model=made.model.bfloat16(),
        kwargs=map_tensors(torch.Tensor.bfloat16, dict(made.kwargs)),
    )
    transform = create(spec("attention_backend", backend=backend))
    answer = transform.applies_to(half, facts)
    if isinstance(answer, NotApplicable):
        pytest.skip(answer.reason)
    found = contract.exercise([transform], half)
    contract.assert_close(found.first, found.expected, "bf16")
    assert found.ambient_after == found.ambient_before


class SpreadMask(nn.Module):
    """Attention under a mask that depends on the query alone, and so is spread over the keys."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = query.shape
        mask = torch.arange(length, device=query.device) >= 0
        mask = mask[None, None, :, None].expand(batch, 1, length, length)
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_mask_that_is_written_out_lets_attention_be_fused(facts):
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    made = Workload(SpreadMask().eval(), query)
    specs = (spec("dense_mask"), COMPILED[1], spec("cuda_graph"))
    assert not isinstance(create(specs[0]).applies_to(made, facts), NotApplicable)
    for fused, tried in ((False, specs[1:]), (True, specs)):
        with torch.no_grad(), applied_in_order([create(one) for one in tried], made) as changed:
            changed.model(query)
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                found = changed.model(query)
                torch.cuda.synchronize()
            names = " ".join(event.name for event in seen.events())
            assert bool(re.search(r"flash|fmha", names)) == fused, names
            torch.testing.assert_close(found, made.model(query), rtol=2e-2, atol=2e-2)


def small(width: int = 64) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()
    return Workload(model, torch.randn(8, width)).to("cuda")


def test_a_replay_follows_the_stream_that_it_is_called_on():
    made = small(1024)
    side = torch.cuda.Stream()
    with CudaGraph().applied(made) as graphed:
        x = torch.zeros(8, 1024, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(made.inputs[0])
            output = graphed.model(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(output, made.model(made.inputs[0]))


def test_calls_on_two_streams_do_not_overtake_each_other():
    made = small(1024)
    other = torch.randn(8, 1024, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with CudaGraph().applied(made) as graphed:
        torch.cuda.synchronize()
        outputs = []
        for index in range(20):
            with torch.cuda.stream(streams[index % 2]):
                if index == 0:
                    torch.cuda._sleep(50_000_000)
                outputs.append(graphed.model(other if index % 2 else made.inputs[0]))
        torch.cuda.synchronize()
        expected = [made.model(made.inputs[0]), made.model(other)]
    for index, output in enumerate(outputs):
        torch.testing.assert_close(output, expected[index % 2])


def test_two_graphs_of_one_model_share_memory_and_keep_their_results_apart():
    made = small()
    wider = replace(made, inputs=(torch.randn(32, 64, device="cuda"),))
    with CudaGraph().applied(made) as one, CudaGraph().applied(wider) as two:
        for _ in range(3):
            first, second = one.model(*made.inputs), two.model(*wider.inputs)
            torch.testing.assert_close(first, made.model(*made.inputs))
            torch.testing.assert_close(second, made.model(*wider.inputs))


def test_a_model_can_be_recorded_again_while_its_old_replay_is_still_referred_to():
    made = small()
    with CudaGraph().applied(made) as old:
        old.model(*made.inputs)
    with CudaGraph().applied(made) as new:
        torch.testing.assert_close(new.model(*made.inputs), made.model(*made.inputs))
    assert old.model is not new.model


def test_inputs_in_another_layout_type_or_on_the_host_are_converted():
    made = small()
    with CudaGraph().applied(made) as graphed:
        expected = made.model(*made.inputs)
        strided = made.inputs[0].t().contiguous().t()
        for given in (strided, made.inputs[0].double(), made.inputs[0].cpu()):
            torch.testing.assert_close(graphed.model(given), expected)


def test_inputs_that_need_gradients_are_accepted():
    made = small()
    with CudaGraph().applied(made) as graphed:
        given = made.inputs[0].clone().requires_grad_()
        for _ in range(2):
            assert not graphed.model(given).requires_grad


def test_another_shape_is_refused():
    made = small()
    with (
        CudaGraph().applied(made) as graphed,
        pytest.raises(UsageError, match="the inputs differ from the recorded ones"),
    ):
        graphed.model(made.inputs[0][:1])


class Peeks(nn.Module):
    """Brings a value to the host, which cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * x.sum().item()


def test_a_step_that_cannot_be_recorded_says_so_and_leaves_the_device_usable():
    made = Workload(Peeks().eval(), torch.ones(2, 4)).to("cuda")
    before = torch.cuda.current_stream()
    with (
        pytest.raises(UnsupportedError, match="cannot be recorded as a CUDA graph"),
        CudaGraph().applied(made),
    ):
        pass
    assert torch.cuda.current_stream() == before
    again = small()
    with CudaGraph().applied(again) as graphed:
        torch.testing.assert_close(graphed.model(*again.inputs), again.model(*again.inputs))


def test_leaving_gives_the_memory_back():
    made = replace(small(2048), inputs=(torch.randn(8192, 2048, device="cuda"),))
    with torch.no_grad():
        made.model(*made.inputs)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with CudaGraph().applied(made) as graphed:
        graphed.model(*made.inputs)
    del graphed
    gc.collect()
    torch.cuda.synchronize()
    # cuBLAS keeps a workspace for the recording stream; inputs and outputs are 64 MiB each.
    assert torch.cuda.memory_allocated() - before < 64 << 20
