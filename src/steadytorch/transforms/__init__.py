"""The registry of transforms, in the order in which they are applied."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import torch

from steadytorch.ambient import ambient, set_ambient
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.transforms import plugins
from steadytorch.transforms.attention_backend import AttentionBackend
from steadytorch.transforms.autocast import Autocast
from steadytorch.transforms.base import Risk, Transform
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.compile import Compile
from steadytorch.transforms.compile_loss import CompileLoss
from steadytorch.transforms.cuda_graph import CudaGraph
from steadytorch.transforms.cudnn_benchmark import CudnnBenchmark
from steadytorch.transforms.cudnn_deterministic import CudnnDeterministic
from steadytorch.transforms.cudnn_engines import CudnnEngines
from steadytorch.transforms.dense_mask import DenseMask
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.transforms.inference_mode import InferenceMode
from steadytorch.transforms.linear_patches import LinearPatches
from steadytorch.transforms.onnxruntime import OnnxRuntime
from steadytorch.transforms.openvino import OpenVino
from steadytorch.transforms.optimizer import OptimizerStep
from steadytorch.transforms.prefetch import Prefetch
from steadytorch.transforms.step_graph import StepGraph
from steadytorch.transforms.tf32 import Tf32
from steadytorch.transforms.threads import Threads
from steadytorch.workload.workload import Workload

__all__ = [
    "REGISTRY",
    "all_variants",
    "ambient",
    "artefacts",
    "compiles",
    "conflict",
    "create",
    "engines",
    "idle",
    "libraries",
    "names",
    "order",
    "parse",
    "set_ambient",
]

_HALF_TYPES = (torch.float16, torch.bfloat16)

REGISTRY: tuple[type[Transform], ...] = (
    OpenVino,
    OnnxRuntime,
    FoldBatchNorm,
    FusedKernels,
    CastWeights,
    ChannelsLast,
    # Before cudnn_engines, which looks for convolutions; after channels_last sets their layout.
    LinearPatches,
    CudnnEngines,
    DenseMask,
    # Before compile: a compiled loss takes outputs in any layout.
    CompileLoss,
    # The transforms above become part of the compiled code; those below wrap it.
    Compile,
    Autocast,
    AttentionBackend,
    InferenceMode,
    Tf32,
    CudnnBenchmark,
    CudnnDeterministic,
    Threads,
    CudaGraph,
    OptimizerStep,
    StepGraph,
    Prefetch,
)

POSITIONS = {kind.name: position for position, kind in enumerate(REGISTRY)}


def names() -> tuple[str, ...]:
    """Return the names of all built-in transforms, in the order in which they are applied."""
    return tuple(POSITIONS)


def create(spec: TransformSpec) -> Transform:
    """Create the transform that a spec describes.

    Plan data can select code only through `create`.

    Raises:
        UsageError: the registry does not know the name, a parameter or its value.
    """
    kind = _kind(spec.name)
    try:
        parameters = msgspec.convert(dict(spec.parameters), kind.Parameters)
    except msgspec.ValidationError as error:
        raise UsageError(f"this version of steadytorch does not support {spec}: {error}") from None
    return kind(parameters)


def order(specs: Iterable[TransformSpec]) -> Candidate:
    """Sort transforms into the order they are applied, innermost first.

    Raises:
        UsageError: a name is unknown.
    """
    return tuple(sorted(specs, key=_place))


def _place(spec: TransformSpec) -> tuple[float, str]:
    """Return the sort key of a transform; a plug-in comes right before `Transform.before`."""
    position = POSITIONS.get(spec.name)
    if position is not None:
        return float(position), spec.name
    return POSITIONS.get(_kind(spec.name).before, 0) - 0.5, spec.name


def parse(text: str, facts: DeviceFacts) -> Candidate:
    """Parse a candidate such as `channels_last+compile(freezing)`.

    A name without settings selects the first variant for the device. Settings in parentheses select
    the variant with exactly these settings, otherwise the first variant that includes them all.

    Raises:
        UsageError: a transform or setting is unknown, or the transforms cannot be combined.
    """
    candidate = order([_parse_one(part.strip(), facts) for part in text.split("+")])
    if (reason := conflict(candidate)) is not None:
        raise UsageError(f"cannot combine {text!r}: {reason}")
    return candidate


def _parse_one(text: str, facts: DeviceFacts) -> TransformSpec:
    found = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", text)
    if found is None:
        raise UsageError(
            f"{text!r} is not a transform: write a name and settings, such as channels_last or "
            "compile(freezing)"
        )
    kind = _kind(found[1])
    asked = {word.strip() for word in (found[2] or "").split(",")} - {""}
    variants = [kind(parameters).spec for parameters in kind.variants(facts)]
    # An exact match first: `compile(default)` is also a subset of `compile(default, freezing)`.
    ranked = sorted(variants, key=lambda spec: _words(spec) != asked)
    for spec in ranked if asked else variants:
        if asked <= _words(spec):
            return spec
    known = ", ".join(map(str, variants)) or "none on this device"
    raise UsageError(f"{text!r} is not a variant of {found[1]}; available: {known}")


def _words(spec: TransformSpec) -> set[str]:
    shown = [(key if value is True else str(value)) for key, value in spec.parameters]
    return set(shown) - {"False", ""}


def conflict(candidate: Candidate, workload: Workload | None = None) -> str | None:
    """Return why these transforms cannot be combined, or None.

    Args:
        candidate: the transforms, in any order.
        workload: the untouched workload. If given, transforms that need 16-bit values must get
            them from it or from another transform.

    Raises:
        UsageError: the registry does not know a spec.
    """
    owners: dict[str, str] = {}
    given = [spec.name for spec in candidate]
    for spec in candidate:
        transform = create(spec)
        for claim in transform.claims:
            if owners.setdefault(claim, spec.name) != spec.name:
                return f"{owners[claim]} and {spec.name} both control {claim}"
        others = [name for name in given if not (name == spec.name or _kind(name).of_loader)]
        if transform.engine and others:
            return f"{spec.name} runs the whole model, without {others[0]}"
    for name in given:
        if given.count(name) > 1:
            return f"{name} is listed twice"
    return None if workload is None else _wrong_element_type(candidate, workload)


def _wrong_element_type(candidate: Candidate, workload: Workload) -> str | None:
    transforms = [create(spec) for spec in candidate]
    if workload.dtype in _HALF_TYPES or any(t.risk is Risk.HALF for t in transforms):
        return None
    for transform in transforms:
        if transform.takes_half_only:
            return f"{transform.spec} needs 16-bit values, the workload uses {workload.dtype}"
    return None


def idle(candidate: Candidate) -> str | None:
    """Return the first transform that has no effect in combination with the others, or None."""
    names = {spec.name for spec in candidate}
    found = (kind.name for kind in _known(candidate) if names.intersection(kind.idle_beside))
    return next(found, None)


def compiles(candidate: Candidate) -> bool:
    """Return whether any of the transforms uses a compiler; unknown transforms are ignored."""
    return any(kind.compiles for kind in _known(candidate))


def engines(candidate: Candidate) -> tuple[str, ...]:
    """Return the names of transforms that run the model in an engine outside PyTorch."""
    return tuple(kind.name for kind in _known(candidate) if kind.engine)


def artefacts(candidate: Candidate) -> tuple[str, ...]:
    """Return the names of the converted models that engine transforms in this candidate run."""
    engines = {kind.name for kind in _known(candidate) if kind.engine}
    return tuple(create(spec).artefact for spec in candidate if spec.name in engines)


def libraries(candidate: Candidate) -> dict[str, str]:
    """Return the versions of libraries other than PyTorch that a candidate uses, plug-ins included.

    Raises:
        PackageNotFoundError: one is not installed.
        UsageError: the registry does not know one of the transforms.
    """
    found: dict[str, str] = {}
    for spec in candidate:
        if _kind(spec.name).libraries is not Transform.libraries:
            found |= create(spec).libraries()
        if spec.name not in POSITIONS:
            found |= plugins.version(spec.name)
    return found


def all_variants(facts: DeviceFacts) -> list[Transform]:
    """Return every transform with each setting worth trying on this device, in registry order.

    Plug-ins come after the built-in transforms, except refused plug-ins; see `plugins.refused`.
    """
    own = [kind(parameters) for kind in REGISTRY for parameters in kind.variants(facts)]
    others = [name for name in plugins.found() if name not in POSITIONS]
    return [*own, *(each for name in others for each in plugins.variants(name, facts))]


def _known(candidate: Candidate) -> list[type[Transform]]:
    return [_kind(s.name) for s in candidate if s.name in POSITIONS or s.name in plugins.found()]


def _kind(name: str) -> type[Transform]:
    position = POSITIONS.get(name)
    if position is not None:
        return REGISTRY[position]
    if name in plugins.found():
        return plugins.load(name)
    known = ", ".join((*POSITIONS, *plugins.found()))
    raise UsageError(f"unknown transform {name!r}: use one of {known}")
