"""Loads a `Workload` from a model name or a factory, with optional input shapes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from steadytorch.errors import MissingWorkloadError, UnsupportedError, UsageError
from steadytorch.workload import bundled, factories, sources
from steadytorch.workload.given import with_values
from steadytorch.workload.supervised import supervised
from steadytorch.workload.workload import Workload

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
_INPUT = re.compile(r"([1-9]\d*(?:x[1-9]\d*)*)(?::(\w+))?")
_UNKNOWN_DEVICE = "unknown device {!r}: use cpu, cuda, or cuda with a number such as cuda:1"


def load_workload(
    spec: str,
    *,
    batch: int | None = None,
    inputs: Sequence[str] = (),
    device: str = "cpu",
    train: bool = False,
    seed: int = 0,
) -> Workload:
    """Loads a workload by name or by factory. Named models get random weights, without downloads.

    Args:
        spec: a bundled name (`resnet50`), `torchvision:NAME`, `timm:NAME`, `transformers:NAME` (a
            model type, or a directory with a config.json), `path/to/file.py:factory` or
            `package.module:factory`. A factory returns a `Workload` or `(model, inputs)`.
        batch: samples per call, one by default. A factory gets it as the keyword `batch`.
        inputs: replacements for all positional inputs, as `64x3x224x224` or
            `64x3x224x224:float32`. The default dtype is that of the replaced input. Floats are
            standard normal; integers are below the size of the model's first embedding. The decoder
            input of a named encoder-decoder gets the shape of a text before it, else its batch.
        device: device of the model and the inputs, such as `cpu` or `cuda:1`.
        train: whether to build a training step: cross-entropy against fixed random targets, SGD
            with momentum. A factory provides its own step with `Workload.training`.
        seed: seed of weights, inputs and targets; the caller's random state is restored.

    Returns:
        The workload, in eval mode unless `train`. A factory's model keeps its mode.

    Raises:
        UsageError: unknown name, broken factory, malformed input, or conflicting options.
        UnsupportedError: a required library is not installed, the device does not exist, or the
            model is larger than memory.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"batch size must be at least 1, got {batch}")
    if batch is not None and inputs:
        raise UsageError(
            "batch and input cannot be combined: write the batch size as the first size of each "
            f"input, such as {batch}x3x224x224"
        )
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"seed {seed} does not fit into 64 bits: choose a smaller one")
    target = _device(device)
    layouts = [_Layout.parse(text) for text in inputs]
    with _seeded(seed, target):
        generator = torch.Generator().manual_seed(seed)
        if _is_factory(spec):
            workload = factories.call_factory(spec, batch, train)
            return with_values(_with_inputs(workload, layouts, generator)).to(target)
        named = _named(spec, batch, generator)
        workload = _with_inputs(named, layouts, generator)
        if layouts and named.kwargs:
            workload = replace(workload, kwargs=_decoded(named, layouts[0], generator))
        if train:
            if spec.startswith("transformers:"):
                raise UsageError(
                    f"{spec} has no training task: write a factory that returns "
                    "Workload.training(model, inputs, loss, optimizer), and pass file.py:factory"
                )
            workload = supervised(workload, generator)
        return workload.to(target)


def _is_factory(spec: str) -> bool:
    """Whether the spec names a factory rather than a model; raises if it names neither."""
    if spec in bundled.names():
        return False
    left, colon, _ = spec.partition(":")
    if colon:
        return left not in sources.PREFIXES
    if spec.endswith(".py") or "/" in spec:
        factories.explain_missing_factory(spec)
    prefixed = [f"{prefix}:{spec}" for prefix in sources.PREFIXES]
    hint = sources.did_you_mean(spec, [*bundled.names(), *sources.PREFIXES])
    raise MissingWorkloadError(
        f"unknown workload {spec!r}{hint}: use a bundled name ({', '.join(bundled.names())}), "
        f"{', '.join(prefixed)}, path/to/file.py:factory or package.module:factory"
    )


def _named(spec: str, batch: int | None, generator: torch.Generator) -> Workload:
    if spec in bundled.names():
        samples = batch or 1
        model = bundled.build(spec)
        try:
            inputs = bundled.example_inputs(spec, samples, generator)
        except (RuntimeError, TypeError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"a batch of {samples} cannot be created: {reason}") from error
        return Workload(model, inputs, name=spec)
    prefix, _, name = spec.partition(":")
    return sources.load(prefix, name, batch or 1, generator)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(_UNKNOWN_DEVICE.format(name)) from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": torch.mps.device_count()}
    if device.type not in counts:
        raise UsageError(_UNKNOWN_DEVICE.format(name))
    if (device.index or 0) >= counts[device.type]:
        raise UnsupportedError(
            f"device {name} not found: PyTorch {torch.__version__} sees {counts[device.type]} "
            f"{device.type} devices; use another one, such as cpu"
        )
    return device


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch within the block and restores the caller's random states afterwards."""
    if device.type == "cuda" or torch.cuda.is_initialized():
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng(devices=()):
        # torch.manual_seed would also set the seed that CUDA takes when it initialises.
        torch.default_generator.manual_seed(seed)
        yield


@dataclass(frozen=True)
class _Layout:
    """Shape and dtype of one input as typed by the user; dtype None means the replaced input's."""

    text: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @classmethod
    def parse(cls, text: str) -> _Layout:
        match = _INPUT.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"input {text!r} is not a shape: write sizes of at least 1 joined by x and an "
                "optional dtype, such as 64x3x224x224 or 8x128:int64"
            )
        shape, dtype = match.groups()
        if dtype is not None and dtype not in _DTYPES:
            hint = sources.did_you_mean(dtype, _DTYPES)
            raise UsageError(
                f"input {text!r} has an unknown dtype {dtype!r}{hint}: "
                f"choose one of {', '.join(_DTYPES)}"
            )
        sizes = tuple(int(size) for size in shape.split("x"))
        return cls(text, sizes, None if dtype is None else _DTYPES[dtype])

    def draw(self, dtype: torch.dtype, bound: int, generator: torch.Generator) -> torch.Tensor:
        """A random tensor with the layout's shape; integers are below `bound` and fit the dtype."""
        try:
            if dtype.is_floating_point or dtype.is_complex:
                drawn_as = dtype if dtype.itemsize > 4 else torch.float32
                return torch.randn(self.shape, generator=generator, dtype=drawn_as).to(dtype)
            largest = 1 if dtype == torch.bool else torch.iinfo(dtype).max
            drawn = torch.randint(min(bound, largest + 1), self.shape, generator=generator)
            return drawn.to(dtype)
        except (RuntimeError, TypeError, OverflowError) as error:  # includes sizes over 64 bits
            reason = str(error).partition("\n")[0]
            raise UsageError(f"input {self.text!r} cannot be created: {reason}") from error


def _with_inputs(
    workload: Workload, layouts: Sequence[_Layout], generator: torch.Generator
) -> Workload:
    """The workload with random positional inputs of the given layouts, if there are any layouts."""
    if not layouts:
        return workload
    if workload.feed is not None:
        raise UsageError(
            f"input {layouts[0].text!r} cannot be used: {workload.name} takes its inputs from a "
            "loader; change the loader, or omit the input"
        )
    bound = _vocabulary(workload.module)
    replaced = []
    for index, layout in enumerate(layouts):
        dtype = layout.dtype
        if dtype is None:
            old = workload.inputs[index] if index < len(workload.inputs) else None
            dtype = old.dtype if isinstance(old, torch.Tensor) else torch.float32
        limit = 2 if dtype == torch.bool else bound
        replaced.append(layout.draw(dtype, limit, generator))
    return replace(workload, inputs=tuple(replaced))


def _decoded(
    named: Workload, encoded: _Layout, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Texts for a decoder whose encoder gets another input: of that shape if it is a text too."""
    batch, *rest = encoded.shape
    model: Any = named.module  # of transformers, as no other source has a decoder
    is_text = not named.inputs[0].is_floating_point()
    texts: dict[str, torch.Tensor] = {}
    for key, old in named.kwargs.items():
        layout = _Layout(encoded.text, (batch, *(rest if is_text else old.shape[1:])), None)
        texts[key] = layout.draw(torch.int64, model.config.vocab_size, generator)
    return texts


def _vocabulary(module: nn.Module | None) -> int:
    """Upper bound of random integer inputs: the size of the model's first embedding, else 2."""
    for part in module.modules() if module is not None else ():
        if isinstance(part, nn.Embedding):
            return part.num_embeddings
    return 2
