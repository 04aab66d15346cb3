"""Arithmetic operations and bytes of elementwise operators, copies, reductions and pooling.

As in `products`, bytes are the minimum memory traffic: each input is read once and each output
written once. Operations are the arithmetic steps per element in the operator's definition; a
function such as `exp` counts as one. Operation counts never make these operators compute-bound in
the roofline.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

from steadytorch.rates.products import Formula, broadcast
from steadytorch.traces.operands import DTYPES, NotRecordedError, Operands


class Elementwise(NamedTuple):
    """An elementwise operator: one result for each element of the broadcast inputs.

    Attributes:
        flops: arithmetic steps per element.
        in_place: whether the first input is overwritten, instead of a new tensor written.
        reads_first: whether the first input is read.
        item_bytes: element size of the result; None for that of the inputs.
    """

    flops: int = 1
    in_place: bool = False
    reads_first: bool = True
    item_bytes: int | None = None

    def __call__(self, given: Operands) -> tuple[int, int]:
        """Operations and bytes of one call; the first input is read if `reads_first` is set."""
        tensors = given.tensors()
        if not tensors or (self.in_place and tensors[0] != 0):
            raise NotRecordedError("no input is a tensor")
        read = sum(given.bytes(place) for place in tensors[0 if self.reads_first else 1 :])
        if self.in_place:
            elements = given.elements(0)
            return self.flops * elements, read + elements * given.item_bytes(0)
        elements = math.prod(broadcast(*(given.shape(place) for place in tensors)))
        size = self.item_bytes or _promoted_bytes(given, tensors)
        return self.flops * elements, read + elements * size


def _promoted_bytes(given: Operands, tensors: list[int]) -> int:
    """Element size of the result in bytes, by PyTorch's type promotion."""
    if len({given.kind(place) for place in tensors}) == 1:
        return given.item_bytes(tensors[0])
    import torch

    # Tensors without dimensions count less, and promote only into a higher category of types.
    found: list[torch.Tensor] = []
    try:
        for has_dimensions in (True, False):
            dtypes = [
                getattr(torch, DTYPES[given.kind(place)])
                for place in tensors
                if bool(given.shape(place)) == has_dimensions
            ]
            if dtypes:
                dtype = reduce(torch.promote_types, dtypes)
                found.append(torch.empty((1,) * has_dimensions, dtype=dtype, device="meta"))
        return torch.result_type(found[0], found[-1]).itemsize
    except RuntimeError as error:  # as for 8-bit floating-point types
        raise NotRecordedError("the type of the result") from error


class Sweep(NamedTuple):
    """An operator that reads some inputs and writes a result as large as one of the inputs.

    Attributes:
        reads: positions; those without a tensor are skipped.
        like: position of the input with the result's size; None if the result is small.
        flops: operations per element of the first input.
    """

    reads: tuple[int, ...] = (0,)
    like: int | None = 0
    flops: int = 1

    def __call__(self, given: Operands) -> tuple[int, int]:
        """Operations (`flops` per element of the first input) and bytes moved by one call."""
        moved = given.bytes_if_tensor(*self.reads)
        if self.like is not None:
            moved += given.elements(self.like) * given.item_bytes(self.like)
        return self.flops * given.elements(self.reads[0]), moved


class Pooling(NamedTuple):
    """Pooling over windows of the last dimensions, given by argument positions in the schema.

    Attributes:
        dimensions: number of pooled dimensions.
        ceil: position of `ceil_mode`.
        dilation: position of the dilation; None if there is none.
        index_bytes: bytes of the index written with each result.
    """

    dimensions: int
    ceil: int
    dilation: int | None = None
    index_bytes: int = 0

    def __call__(self, given: Operands) -> tuple[int, int]:
        """Counts one operation per element of each pooling window.

        Output sizes follow `torch.nn.MaxPool2d`.
        """
        count = self.dimensions
        image = given.shape(0)
        kernel = given.integers(1, count)
        stride = given.integers(2, count) or kernel
        padding = given.integers(3, count)
        dilation = [1] * count if self.dilation is None else given.integers(self.dilation, count)
        if not len(kernel) == len(padding) == len(dilation) == count < len(image) or 0 in stride:
            raise NotRecordedError("invalid pooling settings")
        parts = zip(image[-count:], kernel, stride, padding, dilation, strict=True)
        sizes = []
        for size, window, by, pad, wide in parts:
            room = size + 2 * pad - wide * (window - 1) - 1
            steps = -(-room // by) if given.flag(self.ceil) else room // by
            # A window that would begin beyond the input and its padding is omitted.
            sizes.append(steps if steps * by >= size + pad else steps + 1)
        outputs = math.prod(image[:-count]) * math.prod(sizes)
        size = given.item_bytes(0) + self.index_bytes
        return outputs * math.prod(kernel), given.bytes(0) + outputs * size


def adaptive_pooling(given: Operands) -> tuple[int, int]:
    """Work of adaptive average pooling over the last two dimensions."""
    image, sizes = given.shape(0), given.integers(1, 2)
    if len(image) < 3 or len(sizes) != 2:
        raise NotRecordedError("invalid pooling settings")
    outputs = math.prod(image[:-2]) * math.prod(sizes)
    return given.elements(0), given.bytes(0) + outputs * given.item_bytes(0)


def rows_by_index(given: Operands) -> tuple[int, int]:
    """Work of `index_select`: reads and writes the selected rows, and reads the indices."""
    shape, dimension = given.shape(0), given.integer(1)
    if not -len(shape) <= dimension < len(shape) or not shape:
        raise NotRecordedError("invalid dimension of the input")
    row = math.prod(shape) // max(1, shape[dimension]) * given.item_bytes(0)
    return 0, 2 * row * given.elements(2) + given.bytes(2)


def generated(given: Operands) -> tuple[int, int]:
    """Work of an Inductor pointwise or reduction kernel: each tensor is read or written once."""
    tensors = given.tensors()
    if not tensors:
        raise NotRecordedError("no input is a tensor")
    return 0, sum(given.bytes(place) for place in tensors)


_FLAG = Elementwise(item_bytes=1)
_STEPS = {
    "add sub rsub mul div neg abs exp log sqrt rsqrt reciprocal sin cos pow maximum minimum": 1,
    "relu clamp clamp_min clamp_max hardtanh leaky_relu threshold where masked_fill": 1,
    "sigmoid tanh elu softplus hardsigmoid bernoulli": 3,
    "gelu silu mish hardswish erf": 4,
    "addcmul addcdiv lerp": 3,
    "threshold_backward hardtanh_backward leaky_relu_backward": 1,
    "sigmoid_backward tanh_backward elu_backward softplus_backward hardsigmoid_backward": 3,
    "gelu_backward silu_backward mish_backward hardswish_backward": 8,
}
_FLAGS = (
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite "
    "bitwise_not"
)
_REDUCTIONS = (
    "sum mean prod amax amin max min argmax argmin any all var var_mean std norm linalg_vector_norm"
)
_NORMALISE = 8
"""Mean 1, centred squares 3, scaling to unit variance 2, weight and bias 2."""
_SOFTMAX = 5
"""Maximum, difference, exponential, sum, quotient."""

PASSES: dict[str, Formula] = {
    f"aten::{name}{end}": Elementwise(steps, in_place=bool(end))
    for names, steps in _STEPS.items()
    for name in names.split()
    for end in ("", "_")
}
PASSES |= {f"aten::{name}": _FLAG for name in _FLAGS.split()}
PASSES |= {
    "aten::copy_": Elementwise(0, in_place=True, reads_first=False),
    "aten::fill_": Elementwise(0, in_place=True, reads_first=False),
    "aten::zero_": Elementwise(0, in_place=True, reads_first=False),
    "aten::index_select": rows_by_index,
    "aten::native_dropout_backward": Elementwise(2),
    "aten::_softmax": Sweep(flops=_SOFTMAX),
    "aten::_log_softmax": Sweep(flops=_SOFTMAX),
    "aten::_softmax_backward_data": Sweep((0, 1), flops=4),
    "aten::_log_softmax_backward_data": Sweep((0, 1), flops=4),
    "aten::cudnn_batch_norm": Sweep((0, 1, 2, 3, 4), flops=_NORMALISE),
    "aten::native_batch_norm": Sweep((0, 1, 2, 3, 4), flops=_NORMALISE),
    "aten::_native_batch_norm_legit": Sweep((0, 1, 2, 3, 4), flops=_NORMALISE),
    "aten::_native_batch_norm_legit_no_training": Sweep((0, 1, 2, 3, 4), flops=2),
    "aten::cudnn_batch_norm_backward": Sweep((0, 1, 2), flops=_NORMALISE),
    "aten::native_batch_norm_backward": Sweep((0, 1, 2), like=1, flops=_NORMALISE),
    "aten::native_layer_norm": Sweep((0, 2, 3), flops=_NORMALISE),
    "aten::native_layer_norm_backward": Sweep((0, 1, 5), like=1, flops=_NORMALISE),
    "aten::native_group_norm": Sweep((0, 1, 2), flops=_NORMALISE),
    "aten::native_group_norm_backward": Sweep((0, 1, 4), like=1, flops=_NORMALISE),
    "aten::_fused_rms_norm": Sweep((0, 2), flops=4),
    "aten::max_pool2d_with_indices": Pooling(2, ceil=5, dilation=4, index_bytes=8),
    "aten::mkldnn_max_pool2d": Pooling(2, ceil=5, dilation=4),
    "aten::avg_pool2d": Pooling(2, ceil=4),
    "aten::max_pool2d_with_indices_backward": Sweep((0, 7), like=1),
    "aten::avg_pool2d_backward": Sweep((0,), like=1),
    "aten::_adaptive_avg_pool2d": adaptive_pooling,
    "aten::_adaptive_avg_pool2d_backward": Sweep((0,), like=1),
}
PASSES |= {f"aten::{name}": Sweep(like=None) for name in _REDUCTIONS.split()}
"""Operators that do their work themselves."""

WRAPPED_PASSES: dict[str, Formula] = {
    "aten::batch_norm": Sweep((0, 1, 2, 3, 4), flops=_NORMALISE),
    "aten::_batch_norm_impl_index": Sweep((0, 1, 2, 3, 4), flops=_NORMALISE),
    "aten::layer_norm": Sweep((0, 2, 3), flops=_NORMALISE),
    "aten::group_norm": Sweep((0, 2, 3), flops=_NORMALISE),
    "aten::max_pool2d": Pooling(2, ceil=5, dilation=4),
    "aten::adaptive_avg_pool2d": adaptive_pooling,
}
"""Operators that call one of the above, or do the work themselves in some versions of PyTorch."""

GENERATED = ("triton_poi_", "triton_red_", "triton_per_")
"""Name prefixes of Inductor's pointwise and reduction kernels."""
