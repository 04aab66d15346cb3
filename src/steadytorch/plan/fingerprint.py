"""What a plan is keyed by: the workload, its inputs, what was asked for, and the environment.

PyTorch is imported only where a workload is looked at, so that stored keys can be read without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from steadytorch.errors import UsageError

if TYPE_CHECKING:
    from steadytorch.device.facts import DeviceFacts
    from steadytorch.results.signature import Leaf, Signature
    from steadytorch.workload.workload import Workload

RULES_VERSION = 2
"""Raised when transforms, verification or selection change so that older plans no longer hold.

With a key's objective it is the policy that a plan was measured under: blocks, looks, error rate
and tie band are constants of a version, and a test holds them to it."""

_ENVIRONMENT = (
    "device",
    "device_name",
    "compute_capability",
    "sm_count",
    "mig_profile",
    "cores_logical",
    "isa",
    "torch",
    "cuda",
    "cudnn",
    "triton",
    "driver",
    "rules",
)

_THREADS = "num_threads"
"""Of the ambient settings, how many threads an operator of the CPU is spread over."""


def canonical_json(value: Any) -> bytes:
    """JSON in UTF-8 with sorted keys and no whitespace: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Difference(NamedTuple):
    """A field in which two keys differ; `None` stands for a value that is absent."""

    field: str
    old: Any
    new: Any


class Key(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Everything that a plan depends on, flat and readable. Make it with `make_key`.

    Not in it: rank, device index, host name, time, Python version.

    Attributes:
        workload: `workload_fingerprint`.
        signature: the inputs as people read them, without strides.
        inputs: each input by its path, in full; the nesting is under `structure`.
        objective: what was optimised for.
        precision: how far numerics may move.
        tolerance: accepted error as asked for, None for the default of the precision.
        max_memory_bytes: memory limit, None for none.
        ambient: process-wide settings in force, by name.
        device: "cpu" or "cuda".
        device_name: name of the GPU or the processor.
        compute_capability: as "9.0".
        sm_count: multiprocessors.
        mig_profile: as "1g.10gb", None for a whole GPU.
        cores_logical: logical processor cores usable; None for a GPU.
        isa: vector instructions of the processor.
        torch: PyTorch version.
        cuda: CUDA version.
        cudnn: cuDNN version.
        triton: Triton version.
        driver: NVIDIA driver version.
        rules: `RULES_VERSION`.
        loader: whether each step takes a batch of its own. What such steps gain says little about
            the model alone. Left out of the JSON where it is false.
    """

    workload: str
    signature: str
    inputs: dict[str, str]
    objective: str
    precision: str
    tolerance: float | None
    max_memory_bytes: int | None
    ambient: dict[str, str]
    device: str
    device_name: str | None
    compute_capability: str | None
    sm_count: int | None
    mig_profile: str | None
    cores_logical: int | None
    isa: str | None
    torch: str | None
    cuda: str | None
    cudnn: str | None
    triton: str | None
    driver: str | None
    rules: int
    loader: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the key's canonical JSON, in hexadecimal: the name of its plan."""
        return _sha256_of(self)

    @property
    def environment_digest(self) -> str:
        """SHA-256 of the fields that describe the machine and its software."""
        return _sha256_of({name: getattr(self, name) for name in _ENVIRONMENT})


def make_key(
    workload: Workload,
    signature: Signature,
    facts: DeviceFacts,
    *,
    objective: str,
    precision: str,
    tolerance: float | None,
    max_memory_bytes: int | None,
    ambient: Mapping[str, object],
    fingerprint: str | None = None,
) -> Key:
    """The key of the plan for `workload`, given inputs of `signature`, on the machine of `facts`.

    Of a GPU's host neither cores nor threads count: each rank that `torchrun` starts has one thread
    unless told otherwise, and may be pinned to cores of its own.

    Args:
        workload: what runs; its untouched model counts.
        signature: the inputs the plan is for.
        facts: the machine.
        objective: what is optimised for.
        precision: how far numerics may move.
        tolerance: accepted error, None for the default of the precision.
        max_memory_bytes: memory limit, None for none.
        ambient: process-wide settings; values enter as text.
        fingerprint: `workload_fingerprint` of the workload where it is known, which takes
            milliseconds to find.

    Raises:
        UsageError: the tolerance is infinite or not a number.
    """
    if tolerance is not None and not math.isfinite(tolerance):
        raise UsageError(f"tolerance {tolerance} is not a finite number: pass one, such as 0.01")
    return Key(
        workload=fingerprint or workload_fingerprint(workload),
        signature=_text(signature),
        inputs=_described_inputs(signature),
        objective=_text(objective),
        precision=_text(precision),
        tolerance=None if tolerance is None else float(tolerance),
        max_memory_bytes=max_memory_bytes,
        ambient={
            _text(name): _text(value)
            for name, value in ambient.items()
            if not (name == _THREADS and facts.device == "cuda")
        },
        loader=workload.feed is not None,
        **_environment_of(facts),
    )


def in_environment(key: Key, facts: DeviceFacts) -> Key:
    """The key that the same plan would have on the machine of `facts`, with this version of us."""
    return msgspec.structs.replace(key, **_environment_of(facts))


def _environment_of(facts: DeviceFacts) -> dict[str, Any]:
    own: dict[str, Any] = {"device_name": facts.name, "rules": RULES_VERSION}
    own |= {"cores_logical": None} if facts.device == "cuda" else {}
    return own | {name: getattr(facts, name) for name in _ENVIRONMENT if name not in own}


def differing_fields(old: Key, new: Key) -> list[Difference]:
    """Where two keys differ, in the order of the fields; entries of mappings as `ambient.name`."""
    before, after = _flat(old), _flat(new)
    names = dict.fromkeys((*before, *after))
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return [Difference(name, was, now) for name, was, now in pairs if was != now]


def nearest(stored: Iterable[Key], asked: Key) -> tuple[Difference, ...]:
    """Where the nearest of the stored keys differs; empty where none is of the same workload."""
    # One that differs nowhere was stored since it was looked for.
    near = (key for key in stored if key != asked and _is_near(key, asked))
    found = [tuple(differing_fields(key, asked)) for key in near]
    return min(found, key=lambda d: (d[0].field == "workload", len(d)), default=())


def _is_near(stored: Key, asked: Key) -> bool:
    # A model that changed, with all else alike, is worth naming as well.
    return stored.workload == asked.workload or (
        msgspec.structs.replace(stored, workload=asked.workload) == asked
    )


def told(differing: Sequence[Difference], most: int = 4) -> str:
    """The first differences with both values, as a clause for people; empty without any."""
    shown = "; ".join(map(_in_words, differing[:most]))
    return shown + (f"; and {len(differing) - most} more" if len(differing) > most else "")


def _in_words(difference: Difference) -> str:
    field, old, new = difference
    if field == "workload":  # hashes, which say only that they differ
        return f"workload was {old!s:.12}, is {new!s:.12} (its layers or their code differ)"
    return f"{field} was {old!s:.120}, is {new!s:.120}"


def _flat(key: Key) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, value in msgspec.structs.asdict(key).items():
        if isinstance(value, dict):
            for name, entry in value.items():
                flat[f"{field}{'' if name.startswith('[') else '.'}{name}"] = entry
        else:
            flat[field] = value
    return flat


def _described_inputs(signature: Signature) -> dict[str, str]:
    described = {_text(leaf.path): _text(_described_leaf(leaf)) for leaf in signature.leaves}
    return {**described, "structure": _text(signature.structure)}


def _described_leaf(leaf: Leaf) -> str:
    if leaf.shape is None:
        return f"= {leaf.constant}"
    return f"{list(leaf.shape)} {leaf.dtype} strides {list(leaf.stride or ())} on {leaf.device}"


def _text(value: object) -> str:
    text = str(value)
    if text.isascii():
        return text
    # Undecodable bytes of the environment arrive as lone surrogates, which JSON cannot hold.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def workload_fingerprint(workload: Workload) -> str:
    """Identifies what a workload computes, apart from the values of its weights and its inputs.

    It is the same in every process and on every device, as long as source can be had for what the
    model runs; see `description.describe` for what it covers.

    Returns:
        64 hexadecimal digits.
    """
    from steadytorch.plan.description import describe

    return _sha256_of([_text(line) for line in describe(workload)])


def trained_fingerprint(model: Any) -> str:
    """Identifies what the model of a training step computes, without the loss and the optimizer.

    Returns:
        64 hexadecimal digits, as `workload_fingerprint` gives for whole workloads.
    """
    from steadytorch.plan.description import describe_trained

    return _sha256_of([_text(line) for line in describe_trained(model)])
