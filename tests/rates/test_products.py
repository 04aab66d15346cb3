from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from steadytorch.rates.operator_work import work_of
from steadytorch.rates.products import PRODUCTS, WRAPPED_PRODUCTS
from steadytorch.traces.operands import Operands

from ..traces.profiled import inputs_of

FLOAT = "float"


def _made(dims, concrete=(), types=FLOAT):
    """Inputs of these shapes; None stands for an input that is not a tensor."""
    kinds = [types if shape is not None else "Scalar" for shape in dims]
    texts = [*concrete, *[""] * (len(dims) - len(concrete))]
    return {"dims": [shape or [] for shape in dims], "types": kinds, "concrete": texts}


def _convolution(stride="[1, 1]", padding="[0, 0]", dilation="[1, 1]", **more):
    settings = ["", "", "", stride, padding, dilation]
    rest = [more.get("transposed", "False"), more.get("output_padding", "[0, 0]")]
    return [*settings, *rest, more.get("groups", "1")]


def test_a_convolution_by_hand():
    inputs = _made([[2, 3, 8, 8], [4, 3, 3, 3], None] + [None] * 6, _convolution(padding="[1, 1]"))
    work = work_of("aten::convolution", inputs)
    assert work.flops == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert work.bytes == 4 * (2 * 3 * 8 * 8 + 4 * 3 * 3 * 3 + 2 * 4 * 8 * 8)
    assert work.dtype == "float32"


def test_a_convolution_without_its_settings_is_unknown():
    """Traces recorded it this way before 2022."""
    dims = [[2, 3, 8, 8], [4, 3, 3, 3], []]
    assert work_of("aten::cudnn_convolution", {"dims": dims, "types": [FLOAT] * 3}) is None


def test_a_linear_layer_by_hand():
    work = work_of("aten::linear", _made([[5, 7, 16], [32, 16], [32]], types="c10::BFloat16"))
    assert work.flops == 2 * 5 * 7 * 16 * 32
    assert work.bytes == 2 * (5 * 7 * 16 + 32 * 16 + 32 + 5 * 7 * 32)
    assert work.dtype == "bfloat16"


def test_attention_by_hand():
    """Two products of 2 x 4 heads, 8 queries by 8 keys, 16 wide."""
    inputs = _made([[2, 4, 8, 16]] * 3 + [None] * 5, ["", "", "", "", "0.", "False", "", "False"])
    work = work_of("aten::scaled_dot_product_attention", inputs)
    assert work.flops == 2 * (2 * 2 * 4 * 8 * 8 * 16)
    assert work.bytes == 4 * 4 * (2 * 4 * 8 * 16)


def test_hidden_pairs_of_causal_attention_are_not_counted():
    inputs = _made([[2, 4, 8, 16]] * 3 + [None] * 5, ["", "", "", "", "0.", "True", "", "False"])
    work = work_of("aten::scaled_dot_product_attention", inputs)
    assert work.flops == 2 * (2 * 2 * 4 * 16) * (8 * 9 // 2)


def test_more_queries_than_keys_see_all_keys():
    inputs = _made(
        [[1, 1, 5, 2], [1, 1, 3, 2], [1, 1, 3, 2]] + [None] * 5, ["", "", "", "", "0.", "True"]
    )
    work = work_of("aten::scaled_dot_product_attention", inputs)
    assert work.flops == 2 * 2 * 2 * (1 + 2 + 3 + 3 + 3)


def test_sequences_packed_into_one_are_unknown():
    dims = [[64, 4, 16]] * 3 + [[5], [5]] + [None] * 4
    inputs = _made(dims, ["", "", "", "", "", "16", "16", "0.", "False"])
    assert work_of("aten::_flash_attention_forward", inputs) is None


@pytest.mark.parametrize("name", sorted(PRODUCTS | WRAPPED_PRODUCTS))
def test_shapes_that_do_not_fit_are_unknown(name):
    assert work_of(name, _made([[3], [5, 4], [2]] + [None] * 15, ["[1]"] * 18)) is None


X = torch.randn(2, 6, 9, 10, requires_grad=True)
W = torch.randn(8, 6, 3, 3, requires_grad=True)
LEFT, RIGHT = torch.randn(3, 5, 7), torch.randn(3, 7, 11)
HEADS = torch.randn(2, 4, 8, 16)
CALLS = [
    ("aten::convolution", lambda: F.conv2d(X, W)),
    ("aten::convolution", lambda: F.conv2d(X, W, stride=2, padding=1, dilation=2)),
    ("aten::conv2d", lambda: F.conv2d(X, W[:, :3], torch.randn(8), groups=2)),
    ("aten::conv1d", lambda: F.conv1d(X[..., 0], W[..., 0], stride=3)),
    ("aten::conv3d", lambda: F.conv3d(X[None], torch.randn(4, 2, 1, 3, 3), padding=1)),
    ("aten::convolution", lambda: F.conv_transpose2d(X, W.transpose(0, 1), stride=2, padding=1)),
    (
        "aten::_convolution",
        lambda: F.conv_transpose2d(
            X, torch.randn(6, 4, 3, 3), groups=2, stride=2, output_padding=1
        ),
    ),
    ("aten::mm", lambda: LEFT[0] @ RIGHT[0]),
    ("aten::addmm", lambda: torch.addmm(torch.randn(11), LEFT[0], RIGHT[0])),
    ("aten::bmm", lambda: torch.bmm(LEFT, RIGHT)),
    ("aten::baddbmm", lambda: torch.baddbmm(torch.randn(3, 5, 11), LEFT, RIGHT)),
    ("aten::matmul", lambda: LEFT @ RIGHT[0]),
    ("aten::linear", lambda: F.linear(LEFT, RIGHT[0].T)),
]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_operations_are_those_that_pytorch_counts(name, call):
    with FlopCounterMode(display=False) as counter:
        call()
    with torch.no_grad():
        assert work_of(name, inputs_of(call, name)).flops == counter.get_total_flops()


def test_operations_of_attention_are_those_that_pytorch_counts():
    run = lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS)  # noqa: E731
    name = "aten::scaled_dot_product_attention"
    assert work_of(name, inputs_of(run, name)).flops == sdpa_flop_count(*[HEADS.shape] * 3)


@pytest.mark.parametrize("channels", [6, 3])
def test_the_innermost_convolution_counts_as_its_wrapper(channels):
    groups = 6 // channels
    run = lambda: F.conv2d(X.detach(), W.detach()[:, :channels], stride=2, groups=groups)  # noqa: E731
    outer = work_of("aten::conv2d", inputs_of(run, "aten::conv2d"))
    assert outer == work_of("aten::mkldnn_convolution", inputs_of(run, "aten::mkldnn_convolution"))


@pytest.mark.parametrize("of_input", [True, False])
def test_backward_counts_the_gradients_asked_for(of_input):
    image = X.detach().requires_grad_(of_input)
    out = F.conv2d(image, W, torch.zeros(8, requires_grad=True), stride=2).square()
    name = "aten::convolution_backward"
    inputs = inputs_of(lambda: out.sum().backward(retain_graph=True), name)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    W.grad = None
    work = work_of(name, inputs)
    assert work.flops == counter.get_total_flops()
    operands = X.numel() + W.numel()
    assert work.bytes == 4 * (out.numel() + (1 + of_input) * operands + 8)


def test_attention_backward_is_five_products():
    query = HEADS.clone().requires_grad_()
    out = F.scaled_dot_product_attention(query, query, query)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    work = work_of(name, inputs_of(lambda: out.sum().backward(), name))
    assert work.flops == sdpa_backward_flop_count(*[HEADS.shape] * 4)
    assert work.bytes == 4 * 8 * HEADS.numel()


def _positions(name):
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    return {argument.name: place for place, argument in enumerate(schema.arguments)}


NAMES = {"stride": "stride", "padding": "padding", "dilation": "dilation", "bias": "bias"}
OPTIONS = {"transposed", "output_padding", "groups"}


@pytest.mark.parametrize(
    "name", [n for n in PRODUCTS | WRAPPED_PRODUCTS if "conv" in n and n.startswith("aten::")]
)
def test_settings_of_convolutions_are_where_the_schema_has_them(name):
    formula = (PRODUCTS | WRAPPED_PRODUCTS)[name]
    places = _positions(name)
    if name == "aten::convolution_backward":
        assert (places["transposed"], places["output_mask"]) == (7, 10)
        return
    for field in ("stride", "padding", "dilation", "bias"):
        assert getattr(formula, field) == places.get(field), field
    for field in ("output_padding", "groups"):
        assert getattr(formula, field) in (None, places.get(field)), field


@pytest.mark.parametrize("name", [n for n in PRODUCTS | WRAPPED_PRODUCTS if "attention" in n])
def test_settings_of_attention_are_where_the_schema_has_them(name):
    formula, places = (PRODUCTS | WRAPPED_PRODUCTS)[name], _positions(name)
    assert formula.query == places["query"]
    assert formula.causal == places.get("is_causal", places.get("custom_mask_type"))
    bias = [places[n] for n in ("attn_mask", "attn_bias", "bias") if n in places]
    assert formula.bias in (None, *bias)
    packed = [places[n] for n in ("cum_seq_q", "cu_seqlens_q") if n in places]
    assert formula.packed in (None, *packed)


def test_a_formula_reads_only_what_was_recorded():
    assert PRODUCTS["aten::mm"](Operands(_made([[2, 3], [3, 4]]))) == (48, 4 * (6 + 12 + 8))
