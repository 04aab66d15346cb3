"""Loads torchvision, timm and transformers models, with random weights and matching inputs.

Nothing is downloaded. A library is imported only when one of its models is loaded.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from torch import nn

from steadytorch.errors import UnsupportedError, UsageError, one_line
from steadytorch.workload.workload import Workload

_TOKENS = 128
_IMAGE_SIZE = 224
_SAMPLING_RATE = 16_000
_FACTORY = "write a factory that returns (model, inputs), and pass file.py:factory"


def load(prefix: str, name: str, batch: int, generator: torch.Generator) -> Workload:
    """Loads an inference workload on the CPU, named `prefix:name`, with its model in eval mode.

    Weights are drawn from torch's global generator, and inputs from `generator`.

    Args:
        prefix: one of `PREFIXES`.
        name: the library's name of the model.
        batch: samples per call.
        generator: CPU generator of the inputs.

    Raises:
        UsageError: the model does not exist, or needs inputs that its name does not determine.
        UnsupportedError: the library is not installed, or the model is larger than memory.
    """
    if not name:
        raise UsageError(f"{prefix}: lacks a model name: use {prefix}:NAME")
    return PREFIXES[prefix](name, batch, generator)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Close matches of an unknown word as " (did you mean ...?)"; "" without close matches."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        if error.name == root:
            message = f"{root} is not installed: pip install {root}"
        else:
            message = f"{root} cannot be imported: {one_line(error)}"
        raise UnsupportedError(message) from error
    except Exception as error:  # for example, operators built for another PyTorch
        raise UnsupportedError(f"{name} cannot be imported: {one_line(error)}") from error


@contextlib.contextmanager
def _building(spec: str) -> Iterator[None]:
    """Converts exceptions from building a library's model to a `UsageError` of one line."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{spec} cannot be built: {one_line(error)}; {_FACTORY}") from error


def _normal(shape: tuple[int, ...], generator: torch.Generator, model: nn.Module) -> torch.Tensor:
    """Random inputs: standard normal values in the dtype of the model's weights."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    return torch.randn(shape, generator=generator).to(next(dtypes, torch.float32))


def _torchvision(name: str, batch: int, generator: torch.Generator) -> Workload:
    spec = f"torchvision:{name}"
    models = _library("torchvision").models
    kinds = {known: models.get_model_builder(known).__module__ for known in models.list_models()}
    if name not in kinds:
        raise UsageError(f"torchvision has no model {name!r}{did_you_mean(name, kinds)}")
    kind = kinds[name].removeprefix("torchvision.models.").partition(".")[0]
    if kind in ("detection", "optical_flow"):
        what = kind.replace("_", " ")
        raise UsageError(f"{spec} is for {what} and needs more than images: {_FACTORY}")
    options: dict[str, Any] = {"weights": None}
    shape: tuple[int, ...] = (3, _IMAGE_SIZE, _IMAGE_SIZE)
    if kind == "segmentation":
        options["weights_backbone"] = None  # the default downloads pretrained weights
        shape = (3, 520, 520)
    elif kind == "video":
        size = _IMAGE_SIZE if name.startswith("mvit") else 112  # mvit supports only this size
        shape = (3, 16, size, size)
    elif name.removeprefix("quantized_") == "inception_v3":
        shape = (3, 299, 299)
    if name.endswith(("inception_v3", "googlenet")):
        options["init_weights"] = False  # the default takes a minute and warns
    with _building(spec):
        model = models.get_model(name, **options).eval()
    return Workload(model, _normal((batch, *shape), generator, model), name=spec)


def _timm(name: str, batch: int, generator: torch.Generator) -> Workload:
    spec = f"timm:{name}"
    timm = _library("timm")
    if "/" in name or ":" in name:
        raise UsageError(
            f"{spec} is on a hub, but steady never downloads: use the name of the architecture, "
            f"or {_FACTORY}"
        )
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
    with _building(spec):
        model = timm.create_model(name, pretrained=False).eval()
        shape = tuple(model.pretrained_cfg["input_size"])
    return Workload(model, _normal((batch, *shape), generator, model), name=spec)


def _transformers(name: str, batch: int, generator: torch.Generator) -> Workload:
    transformers = _library("transformers")
    directory = Path(name)
    local = directory.is_dir()
    if local and not (directory / "config.json").is_file():
        raise UsageError(f"the directory {name!r} has no config.json: transformers needs one")
    spec = f"transformers:{directory.resolve().name if local else name}"
    if not local:
        _check_model_type(name)
    with _offline(), _building(spec):
        if local:
            config = transformers.AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=False
            )
        else:
            config = transformers.AutoConfig.for_model(name)
        for part in _parts(config):
            for switch in ("use_cache", "use_pretrained_backbone"):
                if getattr(part, switch, False):
                    setattr(part, switch, False)
        needed = _weight_bytes(lambda: transformers.AutoModel.from_config(config))
    _check_memory(spec, needed)
    with _offline(), _building(spec):
        model = transformers.AutoModel.from_config(config).eval()
    main = next(iter(inspect.signature(model.forward).parameters), "")
    vocabulary = getattr(config, "vocab_size", None)
    if main == "input_ids" and isinstance(vocabulary, int):
        return _text(spec, model, config, batch, generator)
    decodes = getattr(config, "is_encoder_decoder", False)
    if main == "pixel_values" and not decodes:
        return Workload(model, _normal((batch, *_pixels(config)), generator, model), name=spec)
    # Decoders of spectrograms take text, those of samples take sound.
    if (sound := _sound(main, config)) and (main == "input_features" or not decodes):
        inputs = _normal((batch, *sound), generator, model)
        return Workload(model, inputs, _decoder_text(config, batch, generator), name=spec)
    raise UsageError(
        f"{spec} needs more than one input, or neither text nor images nor sound: {_FACTORY}"
    )


def _check_model_type(name: str) -> None:
    auto = _library("transformers.models.auto.configuration_auto")
    known = auto.CONFIG_MAPPING_NAMES
    if name not in known:
        raise UsageError(
            f"transformers has no model type {name!r}{did_you_mean(name, known)}; steady never "
            "downloads from the hub: use a model type such as bert, a directory with a "
            f"config.json, or {_FACTORY}"
        )


def _text(
    spec: str, model: nn.Module, config: Any, batch: int, generator: torch.Generator
) -> Workload:
    inputs = (_ids(config, batch, generator),)
    return Workload(model, inputs, _decoder_text(config, batch, generator), name=spec)


def _decoder_text(config: Any, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The text for a model's decoder as its keyword argument; empty without a decoder."""
    decodes = getattr(config, "is_encoder_decoder", False)
    return {"decoder_input_ids": _ids(config, batch, generator)} if decodes else {}


def _ids(config: Any, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Random token ids of a model's vocabulary, as many as it has positions, at most 128."""
    limits = (
        getattr(config, f"max_{of}", None) for of in ("position_embeddings", "target_positions")
    )
    length = min(filter(None, (_TOKENS, *limits)))
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def _sound(main: str, config: Any) -> tuple[int, ...] | None:
    """Shape of one sound that a model takes as its first argument `main`; None if unknown.

    The longest spectrogram that the model takes, or one second of samples.
    """
    bands = getattr(config, "num_mel_bins", None)
    if main == "input_features" and hasattr(config, "max_source_positions") and bands:
        return bands, 2 * config.max_source_positions  # its convolutions halve the frames
    if main == "input_values" and hasattr(config, "max_length") and bands:
        return config.max_length, bands
    if main == "input_values" and hasattr(config, "conv_stride"):
        return (_SAMPLING_RATE,)
    return None


def _pixels(config: Any) -> tuple[int, int, int]:
    """Channels, height and width from a vision model's configuration."""
    channels = getattr(config, "num_channels", None) or 3
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return channels, height, width


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and all configurations nested in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, _library("transformers").PretrainedConfig):
            yield from _parts(value)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Disables Hugging Face Hub access in the block, as some configurations refer to hub files."""
    constants: Any = _library("huggingface_hub.constants")
    found = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = found


def _weight_bytes(build: Callable[[], nn.Module]) -> int:
    """Size of a model's weights in bytes, from building it on the meta device; 0 if that fails."""
    try:
        with torch.device("meta"):
            return sum(p.numel() * p.element_size() for p in build().parameters())
    except Exception:
        return 0


def _check_memory(spec: str, needed: int) -> None:
    free = psutil.virtual_memory().available
    if needed > free:
        raise UnsupportedError(
            f"{spec} has {needed / 2**30:.0f} GiB of weights, but only {free / 2**30:.0f} GiB of "
            "memory is free: pass a directory with the config.json of a smaller model"
        )


PREFIXES: dict[str, Callable[[str, int, torch.Generator], Workload]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}
