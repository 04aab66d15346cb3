"""Floating-point operations and bytes of convolutions, matrix products and attention.

Every function maps an operator's recorded inputs to (floating-point operations, bytes). A
multiplication plus an addition counts as two operations. Biases are not counted, as in PyTorch's
`torch.utils.flop_counter`. Bytes are the minimum traffic with the device's memory: each input is
read once, each output written once. Source: Williams, Waterman and Patterson, "Roofline",
Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from steadytorch.traces.operands import NotRecordedError, Operands

Formula = Callable[[Operands], tuple[int, int]]


class Convolution(NamedTuple):
    """A convolution, given by argument positions in its schema; None for an absent argument."""

    bias: int | None = 2
    stride: int = 3
    padding: int = 4
    dilation: int | None = 5
    transposed: int | bool = False
    output_padding: int | None = None
    groups: int | None = None
    added: int | None = None

    def __call__(self, given: Operands) -> tuple[int, int]:
        """Counts two operations per output element for each weight that contributes to the element.

        A transposed convolution takes two operations per input element for each weight that
        multiplies the element.
        """
        image, weight = given.shape(0), given.shape(1)
        spatial = len(weight) - 2
        if len(image) not in (spatial + 1, spatial + 2) or spatial < 1:
            raise NotRecordedError("invalid shapes of a convolution")
        transposed = self.transposed
        if not isinstance(transposed, bool):
            transposed = given.flag(transposed)
        channels = weight[0]
        if transposed:
            channels = weight[1] * (1 if self.groups is None else given.integer(self.groups))
        batch = math.prod(image[: -spatial - 1])
        sizes = self._sizes(given, image[-spatial:], weight[2:], transposed)
        outputs = batch * channels * math.prod(sizes)
        flops = 2 * (math.prod(image) if transposed else outputs) * math.prod(weight[1:])
        read = given.bytes(0) + given.bytes(1) + given.bytes_if_tensor(self.bias, self.added)
        return flops, read + outputs * given.item_bytes(0)

    def _sizes(
        self, given: Operands, image: tuple[int, ...], kernel: tuple[int, ...], transposed: bool
    ) -> list[int]:
        """Spatial output sizes, as in `torch.nn.Conv2d` and `torch.nn.ConvTranspose2d`."""
        count = len(image)
        stride = given.integers(self.stride, count)
        padding = given.integers(self.padding, count)
        dilation = [1] * count if self.dilation is None else given.integers(self.dilation, count)
        extra = [0] * count
        if transposed and self.output_padding is not None:
            extra = given.integers(self.output_padding, count)
        if not len(stride) == len(padding) == len(dilation) == len(extra) or 0 in stride:
            raise NotRecordedError("invalid settings of a convolution")
        parts = zip(image, kernel, stride, padding, dilation, extra, strict=True)
        if transposed:
            return [(i - 1) * s - 2 * p + d * (k - 1) + e + 1 for i, k, s, p, d, e in parts]
        return [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d, e in parts]


def convolution_backward(given: Operands) -> tuple[int, int]:
    """Work of the requested gradients; input and weight gradients each cost one forward pass."""
    outputs, inputs, per_output = given.elements(0), given.elements(1), given.shape(2)[1:]
    forward = 2 * (inputs if given.flag(7) else outputs) * math.prod(per_output)
    mask = given.flags(10)
    if len(mask) != 3:
        raise NotRecordedError("no mask of gradients")
    of_input, of_weight, of_bias = mask
    moved = given.bytes(0)
    # Each gradient reads the other operand and has the size of its own.
    moved += (of_input + of_weight) * (given.bytes(1) + given.bytes(2))
    return forward * (of_input + of_weight), moved + of_bias * given.shape(2)[0] * given.item_bytes(
        0
    )


class Product(NamedTuple):
    """A matrix product `left @ right`, optionally plus `added`; fields are argument positions."""

    left: int = 0
    right: int = 1
    added: int | None = None
    transposed: bool = False

    def __call__(self, given: Operands) -> tuple[int, int]:
        """Counts 2 x batch x m x n x k operations for a (batch, m, k) by (batch, k, n) product."""
        left, right = given.shape(self.left), given.shape(self.right)
        if self.transposed and len(right) == 2:
            right = right[::-1]
        outputs, depth = _product_sizes(left, right)
        flops = 2 * outputs * depth
        moved = given.bytes(self.left) + given.bytes(self.right)
        moved += given.bytes_if_tensor(self.added) + outputs * given.item_bytes(self.left)
        return flops, moved


def _product_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, int]:
    """Number of result elements and length of each dot product, broadcast as in `torch.matmul`."""
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    depth = right[-2] if len(right) > 1 else right[-1] if right else -1
    if not left or left[-1] != depth:
        raise NotRecordedError("invalid shapes of a matrix product")
    return math.prod(broadcast(left[:-2], right[:-2])) * rows * columns, depth


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of several shapes under PyTorch's broadcasting rules.

    Raises:
        NotRecordedError: there is no common shape.
    """
    length = max(map(len, shapes), default=0)
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    found = []
    for sizes in zip(*padded, strict=True):
        wanted = {size for size in sizes if size != 1}
        if len(wanted) > 1:
            raise NotRecordedError("shapes that cannot be broadcast")
        found.append(wanted.pop() if wanted else 1)
    return tuple(found)


class Attention(NamedTuple):
    """Scaled dot product attention, given by argument positions in the operator's schema.

    Attributes:
        query: position of the query; key and value follow it.
        causal: position of the flag or mask type that is not 0 for causal attention.
        sequence: dimension of the sequence, counted from the end.
        packed: position of the lengths of packed sequences, which leave shapes unknown.
        bias: position of the bias added to the scores.
        backward: whether it computes gradients; the output is then four after the query.
    """

    causal: int
    bias: int | None = None
    query: int = 0
    sequence: int = -2
    packed: int | None = None
    backward: bool = False

    def __call__(self, given: Operands) -> tuple[int, int]:
        """Counts two matrix products forward and five backward, one of which recomputes the scores.

        Query-key pairs hidden by a causal mask are not counted, as in FlashAttention
        (arXiv:2205.14135), while `torch.utils.flop_counter` counts the hidden pairs.
        """
        if self.packed is not None and given.is_tensor(self.packed):
            raise NotRecordedError("sequences of unknown length")
        places = range(self.query, self.query + 3)
        query, key, value = (given.shape(place) for place in places)
        if not len(query) == len(key) == len(value) >= 3:
            raise NotRecordedError("invalid shapes of attention")
        queries, keys = query[self.sequence], key[self.sequence]
        heads = math.prod(query[:-1]) // max(1, queries)
        hidden = self._is_causal(given) and queries > 0
        seen = _causal_pairs(queries, keys) if hidden else queries * keys
        pairs = heads * seen
        width, out_width = query[-1], value[-1]
        flops = 2 * pairs * (3 * width + 2 * out_width if self.backward else width + out_width)
        operands = sum(given.bytes(place) for place in places)
        result = math.prod(query[:-1]) * out_width * given.item_bytes(self.query)
        moved = operands + result + given.bytes_if_tensor(self.bias)
        return flops, moved + operands + result if self.backward else moved

    def _is_causal(self, given: Operands) -> bool:
        return given.text(self.causal) not in ("False", "0", "")


def _causal_pairs(queries: int, keys: int) -> int:
    """Number of query-key pairs that a causal mask keeps, aligned at the first query and key."""
    full = max(0, queries - keys)
    square = queries - full
    return square * (square + 1) // 2 + full * keys


_CUDNN = Convolution(bias=None, stride=3, padding=2, dilation=4)
_KERNEL_SIZE = Convolution(bias=3, stride=4, padding=5, dilation=6)
_GENERAL = Convolution(transposed=6, output_padding=7, groups=8)

PRODUCTS: dict[str, Formula] = {
    "aten::cudnn_convolution": _CUDNN,
    "aten::cudnn_convolution_transpose": Convolution(
        bias=None, padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True
    ),
    "aten::cudnn_convolution_relu": Convolution(),
    "aten::cudnn_convolution_add_relu": Convolution(
        added=2, bias=4, stride=5, padding=6, dilation=7
    ),
    "aten::mkldnn_convolution": Convolution(bias=2, padding=3, stride=4),
    "mkldnn::_convolution_pointwise": Convolution(bias=2, padding=3, stride=4),
    "aten::miopen_convolution": Convolution(bias=2, padding=3, stride=4),
    "aten::convolution_overrideable": _GENERAL,
    "aten::_slow_conv2d_forward": _KERNEL_SIZE._replace(dilation=None),
    "aten::slow_conv3d_forward": _KERNEL_SIZE._replace(dilation=None),
    "aten::slow_conv_dilated2d": _KERNEL_SIZE,
    "aten::_conv_depthwise2d": _KERNEL_SIZE,
    "aten::conv_depthwise3d": _KERNEL_SIZE,
    "aten::convolution_backward": convolution_backward,
    "aten::mm": Product(),
    "aten::bmm": Product(),
    "aten::mv": Product(),
    "aten::dot": Product(),
    "aten::addmm": Product(1, 2, added=0),
    "aten::addmv": Product(1, 2, added=0),
    "aten::_addmm_activation": Product(1, 2, added=0),
    "aten::baddbmm": Product(1, 2, added=0),
    "mkldnn::_linear_pointwise": Product(0, 1, added=2, transposed=True),
    "aten::_flash_attention_forward": Attention(8, sequence=-3, packed=3),
    "aten::_flash_attention_backward": Attention(11, query=1, sequence=-3, packed=6, backward=True),
    "aten::_efficient_attention_forward": Attention(9, bias=3, sequence=-3, packed=4),
    "aten::_efficient_attention_backward": Attention(
        14, query=1, bias=4, sequence=-3, packed=6, backward=True
    ),
    "aten::_cudnn_attention_forward": Attention(10, bias=3, packed=4),
    "aten::_cudnn_attention_backward": Attention(14, query=1, bias=8, packed=9, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Attention(4, bias=5),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Attention(
        7, query=1, bias=8, backward=True
    ),
}
"""Operators that do their work themselves."""
UNCOUNTED = frozenset(
    {
        "aten::_cudnn_rnn",
        "aten::_cudnn_rnn_backward",
        "aten::_int_mm",
        "aten::_scaled_mm",
        "aten::cudnn_convolution_backward",
        "aten::cudnn_convolution_backward_input",
        "aten::cudnn_convolution_backward_weight",
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
    }
)
"""Products without a formula here."""

WRAPPED_PRODUCTS: dict[str, Formula] = {
    "aten::conv1d": Convolution(),
    "aten::conv2d": Convolution(),
    "aten::conv3d": Convolution(),
    "aten::convolution": _GENERAL,
    "aten::_convolution": _GENERAL,
    "aten::thnn_conv2d": _KERNEL_SIZE._replace(dilation=None),
    "aten::linear": Product(0, 1, added=2, transposed=True),
    "aten::matmul": Product(),
    "aten::scaled_dot_product_attention": Attention(5, bias=3),
    "aten::_scaled_dot_product_flash_attention": Attention(4),
    "aten::_scaled_dot_product_efficient_attention": Attention(6, bias=3),
    "aten::_scaled_dot_product_cudnn_attention": Attention(6, bias=3),
    "aten::_scaled_dot_product_flash_attention_backward": Attention(
        11, query=1, packed=6, backward=True
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": Attention(
        11, query=1, bias=4, backward=True
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": Attention(
        14, query=1, bias=8, packed=9, backward=True
    ),
}
"""Operators that call one of the above, or do the work themselves in some versions of PyTorch."""
