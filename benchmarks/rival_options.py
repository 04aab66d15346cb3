"""What engineers write by hand, in plain PyTorch: no code of steadytorch takes part in it.

Each option is a function of (model, inputs) that returns a callable of the same inputs. All do the
same job: take a float32 input on the device, return a result that a later call does not overwrite.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config

Call = Callable[[torch.Tensor], Any]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def eager(model: torch.nn.Module) -> Call:
    def call(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            return model(x)

    return call


def tf32(model: torch.nn.Module) -> Call:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    return eager(model)


def benchmark_mode(model: torch.nn.Module) -> Call:
    torch.backends.cudnn.benchmark = True
    return tf32(model)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    return copy.deepcopy(model).to(dtype).to(memory_format=torch.channels_last)


def _convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    layout = torch.channels_last if x.dim() == 4 else torch.preserve_format
    return x.to(dtype, memory_format=layout)


def half(model: torch.nn.Module, dtype: torch.dtype) -> Call:
    lowered = cast(model, dtype)
    return eager(_Converting(lowered, dtype))


def half_benchmark(model: torch.nn.Module, dtype: torch.dtype) -> Call:
    torch.backends.cudnn.benchmark = True
    return half(model, dtype)


class _Converting(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(_convert(x, self.dtype)).float()


def raw_graph(model: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> Call:
    """One CUDA graph over a model that takes `example`'s dtype and layout."""
    static = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(static)

    def call(x: torch.Tensor) -> torch.Tensor:
        static.copy_(x)
        graph.replay()
        return out.clone()

    call.weights = model  # type: ignore[attr-defined] - a graph holds addresses, not tensors
    return call


def half_graph(model: torch.nn.Module, dtype: torch.dtype, x: torch.Tensor) -> Call:
    lowered = cast(model, dtype)
    return raw_graph(lambda y: lowered(y).float(), _convert(x, dtype))


def compiled(model: torch.nn.Module, dtype: torch.dtype) -> Call:
    inner = torch.compile(cast(model, dtype))
    return eager(lambda x: inner(_convert(x, dtype)).float())  # type: ignore[arg-type]


def reduce_overhead_frozen(model: torch.nn.Module, dtype: torch.dtype) -> Call:
    torch._inductor.config.freezing = True
    inner = torch.compile(cast(model, dtype), mode="reduce-overhead")

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            torch.compiler.cudagraph_mark_step_begin()
            return inner(_convert(x, dtype)).float()  # the conversion is also the copy out

    return call


def frozen_graph(model: torch.nn.Module, dtype: torch.dtype, x: torch.Tensor) -> Call:
    lowered = cast(model, dtype)
    torch._inductor.config.freezing = True
    inner = torch.compile(lambda y: lowered(y).float())
    return raw_graph(inner, _convert(x, dtype))


OPTIONS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Call]] = {
    "eager fp32, TF32 on": lambda m, x: tf32(m),
    "eager TF32 + cudnn.benchmark": lambda m, x: benchmark_mode(m),
}
for _name, _dtype in HALF.items():
    OPTIONS |= {
        f"{_name} channels_last": lambda m, x, d=_dtype: half(m, d),
        f"{_name} channels_last + cudnn.benchmark": lambda m, x, d=_dtype: half_benchmark(m, d),
        f"{_name} channels_last + raw CUDA graph": lambda m, x, d=_dtype: half_graph(m, d, x),
        f"{_name} torch.compile": lambda m, x, d=_dtype: compiled(m, d),
        f"{_name} torch.compile reduce-overhead + freezing": (
            lambda m, x, d=_dtype: reduce_overhead_frozen(m, d)
        ),
        f"{_name} torch.compile freezing + raw CUDA graph": (
            lambda m, x, d=_dtype: frozen_graph(m, d, x)
        ),
    }
