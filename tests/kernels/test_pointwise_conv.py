from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import pointwise_conv as room
from steadytorch.kernels import pointwise_tile
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.pointwise_conv import pointwise_conv2d
from steadytorch.kernels.pointwise_tile import tile_for

from .watching import Watch

LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 8e-3}
"""Half a unit in the last place, and a little for the sum in float32; a whole unit in bfloat16,
which Triton's interpreter cuts off where a GPU rounds."""
SHAPES = [
    *(((2, 24, 5, 7), 40), ((1, 136, 3, 3), 17), ((3, 7, 4, 4), 130), ((2, 200, 1, 1), 16)),
    *(((2, 20, 16, 16), 24), ((3, 72, 11, 11), 200)),
]
CORES = 132
PRODUCTS = [
    *((12544, 64, 16), (784, 240, 40), (196, 112, 480), (49, 160, 960), (1, 240, 960), (1, 2, 2)),
    *((802816, 16, 32), (802816, 96, 16), (200704, 144, 24), (50176, 240, 40), (12544, 112, 672)),
    *((3136, 320, 1152), (3136, 1280, 320), (64, 48, 1152), (100000, 5000, 5000)),
]
"""Rows, outputs and channels."""


def random(shape, dtype=torch.float16, layout="first", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.to(memory_format=LAYOUTS[layout]) if x.dim() == 4 else x


def operands(shape, outputs, dtype=torch.float16, layout="last", parts="bgo"):
    """All five tensors; of bias, gate and residual those whose letters are in `parts`."""
    batch, channels, *sides = shape
    weight = random((outputs, channels, 1, 1), torch.float32, seed=1) * channels**-0.5
    bias = random((outputs,), dtype, seed=2) if "b" in parts else None
    gate = random((batch, channels, 1, 1), dtype, seed=3) if "g" in parts else None
    if gate is not None:
        # Of bfloat16 powers of two: products are exact, and the interpreter has nothing to cut off.
        gate = gate.round().exp2() if dtype is torch.bfloat16 else gate.sigmoid()
    other = random((batch, outputs, *sides), dtype, layout, seed=4) if "o" in parts else None
    return random(shape, dtype, layout), weight.to(dtype), bias, gate, other


def eager(x, weight, bias, activation, gate, other):
    y = ACTIVATIONS[activation](F.conv2d(x if gate is None else x * gate, weight, bias))
    return y if other is None else y + other


def exact(x, weight, bias, activation, gate, other):
    """In float64; the product with the gate is rounded, as PyTorch does."""
    scaled = x if gate is None else x * gate
    wide = [None if t is None else t.double() for t in (scaled, weight, bias, other)]
    return eager(*wide[:3], activation, None, wide[3])


def fused(x, weight, bias, activation, gate, other):
    """The launcher itself, on any device."""
    found = room.program_for(x, weight, bias, activation, gate, other)
    assert found is not None
    return found(x, weight, bias, gate, other)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # as an exponential may
class TestInterpreted:
    @pytest.mark.parametrize("parts", ["", "b", "bg", "bo", "bgo"])
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
    def test_values_are_those_of_float64_rounded_once(self, shape, outputs, dtype, parts):
        x, weight, bias, gate, other = operands(shape, outputs, dtype, parts=parts)
        given = (x, weight, bias, "hardswish", gate, other)
        found = fused(*given)
        assert (found.dtype, found.stride()) == (dtype, eager(*given).stride())
        torch.testing.assert_close(found.double(), exact(*given), rtol=ROUNDING[dtype], atol=1e-5)

    @pytest.mark.parametrize("parts", ["b", "bgo"])
    @pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
    def test_so_are_those_of_large_blocks(self, shape, outputs, parts, monkeypatch):
        monkeypatch.setattr(pointwise_tile, "CORES", 1)
        x, weight, bias, gate, other = operands(shape, outputs, parts=parts)
        given = (x, weight, bias, "silu", gate, other)
        rounding = ROUNDING[x.dtype]
        torch.testing.assert_close(fused(*given).double(), exact(*given), rtol=rounding, atol=1e-5)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    def test_every_activation_is_pytorchs(self, activation, dtype):
        x, weight, bias, gate, other = operands((1, 16, 5, 5), 24, dtype)
        given = (4 * x, weight, bias, activation, gate, other)
        found = fused(*given)
        torch.testing.assert_close(found.double(), exact(*given), rtol=ROUNDING[dtype], atol=1e-5)

    @pytest.mark.parametrize("height", [8, 3])
    def test_each_image_has_its_own_gate(self, height):
        x, weight, _, gate, _ = operands((4, 16, height, 8), 16)
        gate[1] = 0
        found = fused(x, weight, None, "", gate, None)
        assert not found[1].any()
        assert all(found[i].any() for i in (0, 2, 3))

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_special_values_spread_as_in_pytorch(self, activation):
        x, weight, bias, gate, other = operands((2, 40, 3, 3), 24)
        x[0, 0, 0, 0], x[0, 1, 1, 1] = float("nan"), float("inf")
        weight[:] = weight.abs() + 0.1
        gate[0, 2], other[1, 0, 0, 0], other[1, 1, 0, 0] = 0, float("nan"), -float("inf")
        given = (x, weight, bias, activation, gate, other)
        # In float64: PyTorch's GELU of infinity is NaN in other types on CPUs.
        found, expected = fused(*given), exact(*given).to(x.dtype)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=4e-3, equal_nan=True)

    def test_the_same_bits_each_time(self):
        x, weight, bias, gate, other = operands((2, 200, 3, 3), 24)
        given = (x, weight, bias, "silu", gate, other)
        assert torch.equal(fused(*given), fused(*given))


@pytest.mark.parametrize("outputs", [1, 6])
@pytest.mark.parametrize(
    "shape",
    [
        *((2, 3, 4, 5), (2, 3, 1, 1), (1, 3, 1, 1), (1, 3, 4, 5)),
        *((2, 1, 4, 5), (2, 3, 1, 5), (2, 3, 4, 1), (1, 1, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_where_there_is_a_program_strides_are_pytorchs(shape, outputs, activation, request):
    pytest.importorskip("triton", reason="a program is made with Triton: not installed")
    request.getfixturevalue("interpreted")
    count = 0
    for layouts in ("ffl", "flf", "lff", "lll", "fff", "llf"):
        own, kernel, added = ("first" if one == "f" else "last" for one in layouts)
        for parts in ("", "g", "o", "go"):
            x, weight, _, gate, other = operands(shape, outputs, layout=own, parts=parts)
            weight = weight.to(memory_format=LAYOUTS[kernel])
            other = None if other is None else other.to(memory_format=LAYOUTS[added])
            given = (x, weight, None, activation, gate, other)
            if (found := room.program_for(*given)) is not None:
                count += 1
                expected = eager(*given)
                assert found(x, weight, None, gate, other).stride() == expected.stride()
    is_odd = 1 in (outputs, shape[1]) or (activation == "relu6" and shape[2:] == (1, 1))
    assert (count == 0) == is_odd


def spoilt(change, **kinds):
    tensors = dict(zip(("x", "weight", "bias", "gate", "other"), operands(*SHAPES[0]), strict=True))
    given = {**tensors, **kinds, **change(tensors)}
    return tuple(given[name] for name in ("x", "weight", "bias", "gate", "other"))


NOT_COVERED = {
    "in order": lambda t: {"x": t["x"].contiguous()},
    "residual in order": lambda t: {"other": t["other"].contiguous()},
    "residual spread": lambda t: {"other": t["other"][:1]},
    "gate of one image": lambda t: {"gate": t["gate"][:1]},
    "gate of each pixel": lambda t: {"gate": t["x"]},
    "gate strided": lambda t: {"gate": torch.stack([t["gate"]] * 2, 1)[:, 0]},
    "bias strided": lambda t: {"bias": torch.stack([t["bias"]] * 2, 1)[:, 0]},
    "weight strided": lambda t: {"weight": torch.cat([t["weight"]] * 2, 1)[:, :24]},
    "part of a row": lambda t: {"x": t["x"][..., :5], "other": t["other"][..., :5]},
    "float32": lambda t: {name: tensor.float() for name, tensor in t.items()},
    "no images": lambda t: {name: t[name][:0] for name in ("x", "gate", "other")},
    "one channel": lambda t: {name: t[name][:, :1] for name in ("x", "gate", "weight")},
}


@pytest.mark.parametrize("change", NOT_COVERED.values(), ids=NOT_COVERED)
def test_on_the_cpu_it_is_pytorchs_own(change):
    x, weight, bias, gate, other = spoilt(change)
    found = pointwise_conv2d(x, weight, bias, "hardswish", gate, other)
    expected = eager(x, weight, bias, "hardswish", gate, other)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("change", [c for name, c in NOT_COVERED.items() if name != "no images"])
def test_for_what_it_is_not_made_there_is_no_program(change):
    x, weight, bias, gate, other = spoilt(change)
    assert room.program_for(x, weight, bias, "hardswish", gate, other) is None


def test_for_more_elements_than_offsets_reach_there_is_no_program():
    x, weight = ((2**14, 64, 64, 32), (262144, 1, 2048, 64)), ((2, 64, 1, 1), (64, 1, 1, 1))
    shape, kernel = torch.Size(x[0]), torch.Size(weight[0])
    given = (None, "", None, None, torch.float16, torch.device("cpu"))
    assert room.prepared((shape, x[1]), (kernel, weight[1]), *given) is None


def test_sizes_that_do_not_fit_are_refused_in_pytorchs_words():
    with pytest.raises(RuntimeError, match="expected input"):
        pointwise_conv2d(torch.ones(2, 3, 4, 4), torch.ones(2, 4, 1, 1))


def test_an_activation_must_be_known():
    with pytest.raises(KeyError, match="mish"):
        pointwise_conv2d(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 1, 1), activation="mish")


def gradients(function, tensors, activation):
    """Gradients of all tensors, and of the sum of their squares once more."""
    x, weight, bias, gate, other = tensors
    found = function(x, weight, bias, activation, gate, other)
    asked = [t for t in tensors if t is not None]
    loss = (found * random(found.shape, torch.float64, seed=9)).sum()
    first = torch.autograd.grad(loss, asked, create_graph=True)
    if activation == "hardsigmoid":  # PyTorch has no second one
        return first
    squares = torch.stack([grad.pow(2).sum() for grad in first]).sum()
    return *first, *torch.autograd.grad(squares, asked, materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("parts", ["", "b", "bgo"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_pytorch_and_theirs_too(activation, parts):
    tensors = operands((2, 3, 4, 5), 3, torch.float64, parts=parts)
    tensors = [None if t is None else t.requires_grad_() for t in tensors]
    ours, theirs = (gradients(f, tensors, activation) for f in (pointwise_conv2d, eager))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_tensor_given_twice_has_both_gradients():
    x, weight, *_ = operands((2, 3, 4, 5), 3, torch.float64)
    x.requires_grad_()
    (found,) = torch.autograd.grad(pointwise_conv2d(x, weight, other=x).sum(), x)
    (expected,) = torch.autograd.grad(eager(x, weight, None, "", None, x).sum(), x)
    torch.testing.assert_close(found, expected)


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias, gate, other = operands((2, 3, 4, 5), 3, torch.float64)
    gate.requires_grad_()
    pointwise_conv2d(x, weight, bias, "silu", gate, other).sum().backward()
    assert gate.grad is not None
    assert all(t.grad is None for t in (x, weight, bias, other))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", ["", "bgo"])
@pytest.mark.sampled(every=7)
def test_pytorch_finds_the_operator_well_formed(shape, layout, parts):
    x, weight, bias, gate, other = operands(shape, 6, torch.float32, layout, parts)
    x.requires_grad_()
    given = (x, weight, bias, "hardswish", gate, other)
    torch.library.opcheck(torch.ops.steadytorch.pointwise_conv2d.default, given)


def test_it_is_one_node_of_an_exported_program():
    class Model(torch.nn.Module):
        def forward(self, x, weight, gate):
            return pointwise_conv2d(x, weight, None, "silu", gate)

    x, weight, _, gate, _ = operands((2, 3, 4, 5), 6, torch.float32)
    program = torch.export.export(Model(), (x, weight, gate))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.steadytorch.pointwise_conv2d.default]
    expected = eager(x, weight, None, "silu", gate, None)
    assert torch.equal(program.module()(x, weight, gate), expected)


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    x, weight, *_ = operands((1, 2, 4, 4), 3)
    expected = pointwise_conv2d(x, weight)
    with Watch() as watch:
        found = pointwise_conv2d(x, weight)
    assert watch.seen[0] is pointwise_conv2d
    assert torch.equal(found, expected)


def test_transformations_of_functions_get_pytorchs_own():
    x, weight, bias, gate, other = operands((2, 3, 4, 5), 3, torch.float64)
    found = torch.func.grad(lambda x: pointwise_conv2d(x, weight, bias, "silu", gate, other).sum())
    expected = torch.func.grad(lambda x: eager(x, weight, bias, "silu", gate, other).sum())
    torch.testing.assert_close(found(x), expected(x))


def programs_of(tile, rows, outputs):
    return -(-rows // tile.rows) * -(-outputs // tile.columns)


@pytest.mark.parametrize(("rows", "outputs", "channels"), PRODUCTS)
class TestCut:
    def test_blocks_are_powers_of_two_that_tensor_cores_take(self, rows, outputs, channels):
        tile = tile_for(rows, outputs, channels, CORES)
        assert all(size & (size - 1) == 0 and size >= 16 for size in tile[:3])
        assert tile.warps in (2, 4)
        assert tile.rows * tile.columns <= 64 * 32 * tile.warps  # 64 sums a thread

    def test_it_fits_the_memory_on_the_chip(self, rows, outputs, channels):
        tile = tile_for(rows, outputs, channels, CORES)
        # Pixels, weights and at worst a gate for each pixel, of two bytes.
        assert tile.stages * tile.depth * (2 * tile.rows + tile.columns) * 2 <= 227 << 10

    def test_no_core_is_idle_that_smaller_blocks_would_occupy(self, rows, outputs, channels):
        tile = tile_for(rows, outputs, channels, CORES)
        assert programs_of(tile, rows, outputs) >= CORES or (tile.rows, tile.columns) == (16, 16)


@pytest.mark.parametrize(("rows", "outputs", "channels"), [p for p in PRODUCTS if p[0] > 100_000])
def test_large_batches_read_pixels_once_and_feed_tensor_cores_whole(rows, outputs, channels):
    tile = tile_for(rows, outputs, channels, CORES)
    assert tile.rows >= 64
    assert tile.columns >= min(outputs, 64)
