"""Options that engineers write by hand, without steadytorch.

Each option is a function of (model, example), where `example` is the `(args, kwargs)` of a call. It
may convert the model in place, and returns a callable with the model's signature. All do the same
job: they take the model's own inputs and return float32 results, nested as the model nests them,
which later calls do not overwrite.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

Call = Callable[..., Any]
Example = tuple[tuple[Any, ...], dict[str, Any]]
Option = Callable[[torch.nn.Module, Example], Call]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ENGINES = ("ONNX Runtime", "OpenVINO")
"""Substrings of the names of options beyond PyTorch."""
AUTOTUNED = "max-autotune"
"""Substring of the names of options with a cap on the set-up time."""


def mapped(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply `function` to each tensor in nested containers and dataclasses."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changed = {name: mapped(function, value) for name, value in fields.items()}
        return dataclasses.replace(tree, **changed)
    if isinstance(tree, dict):
        return type(tree)((key, mapped(function, value)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        parts = [mapped(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from leaves(part)


def lowered(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert floating-point inputs, images to channels last; keep indices and masks."""
    if not x.is_floating_point():
        return x
    layout = torch.channels_last if x.dim() == 4 else torch.preserve_format
    return x.to(dtype, memory_format=layout)


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() else x


def own(x: torch.Tensor) -> torch.Tensor:
    """Copy to float32."""
    return x.to(torch.float32 if x.is_floating_point() else x.dtype, copy=True)


class Lowered(torch.nn.Module):
    """A model in another element type, with the original's input and output types."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = cast(model, dtype)
        self._lower = partial(lowered, dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped(self._lower, (args, kwargs))
        return mapped(widened, self.model(*args, **kwargs))


class Flat(torch.nn.Module):
    """A model that returns its tensors in a tuple."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaves(self.model(*args, **kwargs)))


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    model = model.to(dtype)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def inferring(model: Call) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return model(*args, **kwargs)

    return call


def eager(model: torch.nn.Module, example: Example) -> Call:
    return inferring(model)


def tf32(model: torch.nn.Module, example: Example) -> Call:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    return inferring(model)


def benchmark_mode(model: torch.nn.Module, example: Example) -> Call:
    torch.backends.cudnn.benchmark = True
    return tf32(model, example)


def half(model: torch.nn.Module, example: Example, dtype: torch.dtype) -> Call:
    return inferring(Lowered(model, dtype))


def raw_graph(model: Call, example: Example) -> Call:
    """Capture one CUDA graph of a callable for inputs with these dtypes and layouts."""
    static = mapped(torch.clone, example)
    buffers = tuple(leaves(static))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            model(*static[0], **static[1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(*static[0], **static[1])

    def one(x: torch.Tensor) -> torch.Tensor:
        buffers[0].copy_(x)
        graph.replay()
        return out.clone()

    def call(*args: Any, **kwargs: Any) -> Any:
        for buffer, given in zip(buffers, leaves((args, kwargs)), strict=True):
            buffer.copy_(given)
        graph.replay()
        return mapped(torch.clone, out)

    # The short form that users write for a single input and output.
    plain = len(example[0]) == len(buffers) == 1 and isinstance(out, torch.Tensor)
    chosen = one if plain and isinstance(example[0][0], torch.Tensor) else call
    chosen.weights = model  # type: ignore[attr-defined] - a graph holds addresses, not tensors
    return chosen


def half_graph(model: torch.nn.Module, example: Example, dtype: torch.dtype) -> Call:
    inner = cast(model, dtype)

    def whole(*args: Any, **kwargs: Any) -> Any:
        return mapped(widened, inner(*args, **kwargs))

    return raw_graph(whole, mapped(partial(lowered, dtype=dtype), example))


def compiled(model: torch.nn.Module, example: Example, dtype: torch.dtype) -> Call:
    lower, inner = partial(lowered, dtype=dtype), torch.compile(cast(model, dtype))

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped(lower, (args, kwargs))
        return mapped(widened, inner(*args, **kwargs))

    return inferring(call)


def reduce_overhead(
    model: torch.nn.Module, example: Example, dtype: torch.dtype, freezing: bool
) -> Call:
    _inductor().freezing = freezing
    lower = partial(lowered, dtype=dtype)
    inner = torch.compile(cast(model, dtype), mode="reduce-overhead")

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        args, kwargs = mapped(lower, (args, kwargs))
        return mapped(own, inner(*args, **kwargs))  # the conversion also copies the output

    return inferring(call)


def frozen_graph(
    model: torch.nn.Module, example: Example, dtype: torch.dtype, mode: str = "default"
) -> Call:
    inner = cast(model, dtype)
    _inductor().freezing = True

    def whole(*args: Any, **kwargs: Any) -> Any:
        return mapped(widened, inner(*args, **kwargs))

    example = mapped(partial(lowered, dtype=dtype), example)
    return raw_graph(torch.compile(whole, mode=mode), example)


def channels_last(model: torch.nn.Module, example: Example) -> Call:
    return half(model, example, torch.float32)


def compiled_as_is(model: torch.nn.Module, example: Example, freezing: bool) -> Call:
    _inductor().freezing = freezing
    return inferring(torch.compile(model))


def frozen(model: torch.nn.Module, example: Example, dtype: torch.dtype) -> Call:
    return compiled_as_is(Lowered(model, dtype), example, freezing=True)


def openvino(model: torch.nn.Module, example: Example, precision: str) -> Call:
    """OpenVINO's CPU plug-in, tuned for latency; results are copied out of it."""
    import openvino

    returned = inferring(model)(*example[0], **example[1])
    converted = openvino.convert_model(Flat(model), example_input=example[1] or example[0])
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    request = openvino.Core().compile_model(converted, "CPU", hints).create_infer_request()

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x.numpy() for x in leaves((args, kwargs))]
        results = iter(request.infer(given, share_inputs=True).values())
        return mapped(lambda _: torch.from_numpy(next(results)), returned)

    return call


def onnxruntime(model: torch.nn.Module, example: Example) -> Call:
    """ONNX Runtime on as many threads as PyTorch uses."""
    import onnxruntime

    returned = inferring(model)(*example[0], **example[1])
    program = torch.onnx.export(model, example[0], kwargs=example[1], dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program.save(path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x.numpy() for x in leaves((args, kwargs))]
        results = iter(session.run(None, dict(zip(names, given, strict=True))))
        return mapped(lambda _: torch.from_numpy(next(results)), returned)

    return call


def _inductor() -> Any:
    import torch._inductor.config as settings  # a slow import; few options need it

    return settings


def _lower(name: str, dtype: torch.dtype) -> dict[str, Option]:
    def of(option: Callable[..., Call], **settings: Any) -> Option:
        return partial(option, dtype=dtype, **settings)

    return {
        f"{name} channels_last": of(half),
        f"{name} channels_last, CUDA graph": of(half_graph),
        f"{name} compile": of(compiled),
        f"{name} compile reduce-overhead": of(reduce_overhead, freezing=False),
        f"{name} compile reduce-overhead, freezing": of(reduce_overhead, freezing=True),
        f"{name} compile freezing, CUDA graph": of(frozen_graph),
    }


OPTIONS: dict[str, dict[str, Option]] = {
    "cuda": {
        "eager TF32": tf32,
        "eager TF32, cudnn.benchmark": benchmark_mode,
        **_lower("bf16", HALF["bf16"]),
        **_lower("fp16", HALF["fp16"]),
        # In one element type only: it takes minutes and mostly finds the same in the other.
        f"fp16 compile {AUTOTUNED}, freezing, CUDA graph": partial(
            frozen_graph, dtype=HALF["fp16"], mode=f"{AUTOTUNED}-no-cudagraphs"
        ),
    },
    "cpu": {
        "eager": eager,
        "channels_last": channels_last,
        "compile": partial(compiled_as_is, freezing=False),
        "compile freezing": partial(compiled_as_is, freezing=True),
        "ONNX Runtime": onnxruntime,
        "OpenVINO": partial(openvino, precision="f32"),
        "bf16 compile freezing": partial(frozen, dtype=HALF["bf16"]),
        "bf16 OpenVINO": partial(openvino, precision="bf16"),
    },
}
"""Options by device type; the first is "eager" in the summary."""


def options_of(device: str, precision: str) -> list[str]:
    """Names of the options of a device type that keep to a precision class."""
    lower = () if precision != "same" else tuple(HALF)
    return [name for name in OPTIONS[device] if not name.startswith(lower)]


def compiles(name: str) -> bool:
    """Whether an option needs the compiler."""
    return "compile" in name
