"""Convolution problem: the operation, shapes and types that determine the cuDNN engines."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from steadytorch.errors import UsageError

Operation = Literal["fprop", "dgrad", "wgrad"]
Epilogue = Literal["none", "bias", "bias_relu", "add_bias", "add_bias_relu"]
Number = Literal["fp16", "bf16", "fp32", "tf32"]
Layout = Literal["last", "first"]

EPILOGUES: dict[tuple[bool, bool, bool], Epilogue] = {
    (False, False, False): "none",
    (True, False, False): "bias",
    (True, False, True): "bias_relu",
    (True, True, False): "add_bias",
    (True, True, True): "add_bias_relu",
}
"""Supported epilogues, by (bias, residual add, ReLU)."""

_NUMBERS = r"[1-9]\d{0,9}(?:x[1-9]\d{0,9})*"
_PADS = r"\d{1,10}(?:x\d{1,10})*"
_GRAMMAR = re.compile(
    r"(?P<operation>fprop|dgrad|wgrad)/(?P<epilogue>none|bias|bias_relu|add_bias|add_bias_relu)"
    r"/(?P<number>fp16|bf16|fp32|tf32)/(?P<layout>last|first)"
    rf"/i(?P<input>{_NUMBERS})/w(?P<weight>{_NUMBERS})"
    rf"/s(?P<stride>{_NUMBERS})/p(?P<padding>{_PADS})/d(?P<dilation>{_NUMBERS})"
    r"/g(?P<groups>[1-9]\d{0,9})",
    re.ASCII,
)
_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}
_MOST_SPATIAL = 3


class ConvProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One convolution problem; problems with equal fields have the same cuDNN engines.

    Attributes:
        operation: forward (fprop), or the gradient of the input (dgrad) or of the weight (wgrad).
        epilogue: fused operations after it, in this order: residual add, bias, ReLU.
        number: element type of input, weight and output, accumulated in float32; `tf32` is float32
            data that may be rounded to TF32.
        layout: channels `last` or `first`, for input, weight and output alike.
        input: N, C and 1 to 3 spatial sizes of the forward input, for every operation.
        weight: K, C / groups and the kernel sizes.
        stride: stride per spatial dimension.
        padding: zero padding per side of each spatial dimension.
        dilation: dilation per spatial dimension.
        groups: number of channel groups.

    Raises:
        UsageError: the sizes do not match.
    """

    operation: Operation
    epilogue: Epilogue
    number: Number
    layout: Layout
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        dimensions = len(self.input) - 2
        if not 1 <= dimensions <= _MOST_SPATIAL or len(self.weight) != len(self.input):
            raise UsageError(
                f"a convolution of input {self.input} with weight {self.weight}: both need N or K, "
                "C and the same 1 to 3 spatial sizes"
            )
        for name in ("stride", "padding", "dilation"):
            if len(values := getattr(self, name)) != dimensions:
                raise UsageError(f"{name} {values} needs {dimensions} numbers, one per dimension")
        if self.weight[1] * self.groups != self.input[1] or self.weight[0] % self.groups:
            raise UsageError(
                f"weight {self.weight} in {self.groups} groups does not fit input {self.input}"
            )
        if min(self.output) < 1:
            raise UsageError(f"kernel {self.weight[2:]} does not fit into input {self.input}")

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the forward output: N, K (output channels) and the spatial sizes."""
        sizes = zip(
            self.input[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True
        )
        spatial = [(size + 2 * pad - gap * (k - 1) - 1) // s + 1 for size, k, s, pad, gap in sizes]
        return (self.input[0], self.weight[0], *spatial)

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the tensor that `operation` computes: the output or a gradient."""
        computed = {"fprop": self.output, "dgrad": self.input, "wgrad": self.weight}
        return computed[self.operation]

    @property
    def operations(self) -> int:
        """Number of floating-point operations; a multiply-add counts as two."""
        return 2 * math.prod(self.output) * math.prod(self.weight[1:])

    @property
    def traffic_bytes(self) -> int:
        """Minimum memory traffic in bytes: each element is read or written once.

        Of the input, only elements that the convolution kernel visits are counted; an input
        gradient (dgrad) counts in full.
        """
        output = math.prod(self.output)
        outer, spatial = math.prod(self.input[:2]), self.input[2:]
        if self.operation != "dgrad":
            geometry = (self.stride, self.padding, self.dilation)
            spatial = map(_seen, spatial, self.weight[2:], *geometry, self.output[2:])
        elements = outer * math.prod(spatial) + math.prod(self.weight) + output
        if self.epilogue in ("add_bias", "add_bias_relu"):
            elements += output
        return elements * _BYTES[self.number]

    @property
    def adds(self) -> bool:
        """Whether a residual is added."""
        return self.epilogue in ("add_bias", "add_bias_relu")

    @property
    def biased(self) -> bool:
        """Whether a bias is added."""
        return self.epilogue != "none"

    @property
    def rectified(self) -> bool:
        """Whether a ReLU is applied."""
        return self.epilogue in ("bias_relu", "add_bias_relu")

    @property
    def key(self) -> str:
        """Text form of the problem, under which its chosen engine is stored; `parse` reads it."""
        parts = (
            *(self.operation, self.epilogue, self.number, self.layout),
            f"i{_joined(self.input)}",
            f"w{_joined(self.weight)}",
            f"s{_joined(self.stride)}",
            f"p{_joined(self.padding)}",
            f"d{_joined(self.dilation)}",
            f"g{self.groups}",
        )
        return "/".join(parts)

    def __str__(self) -> str:
        kernel, stride = _joined(self.weight[2:]), _joined(self.stride)
        group = f" in {self.groups} groups" if self.groups > 1 else ""
        return (
            f"{self.operation} {_joined(self.input)} -> {self.weight[0]}, {kernel} / {stride}"
            f"{group}, {self.epilogue.replace('_', '+')}, {self.number} channels {self.layout}"
        )


def parse(text: str) -> ConvProblem:
    """Parse a problem's key.

    Raises:
        UsageError: the text is malformed, or its sizes do not match.
    """
    found = _GRAMMAR.fullmatch(text)
    if found is None:
        raise UsageError(f"{text[:120]!r} is not the key of a convolution")
    fields = found.groupdict()
    sizes = ("input", "weight", "stride", "padding", "dilation")
    lists = {name: tuple(map(int, fields.pop(name).split("x"))) for name in sizes}
    try:
        return msgspec.convert(
            {**fields, **lists, "groups": int(fields["groups"])}, ConvProblem, strict=True
        )
    except msgspec.ValidationError as error:
        raise UsageError(f"{text[:120]!r} is not the key of a convolution: {error}") from None


def strides(shape: Sequence[int], layout: Layout) -> list[int]:
    """Strides, in elements, of a dense tensor of a shape and layout."""
    order = [*range(len(shape))]
    if layout == "last":
        order = [0, *order[2:], 1]
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return found


def _seen(size: int, taps: int, stride: int, padding: int, dilation: int, outputs: int) -> int:
    """Number of positions along an input axis that at least one output element reads."""
    under = np.zeros(size, bool)
    for tap in range(taps):
        first = tap * dilation - padding
        under[max(first, first % stride) : max(first + outputs * stride, 0) : stride] = True
    return int(under.sum())


def _joined(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))
