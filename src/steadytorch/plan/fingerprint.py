"""Plan keys: the workload, its inputs, the search options and the environment.

PyTorch is imported only to describe a workload, so that stored keys can be read without PyTorch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from steadytorch.errors import UsageError

if TYPE_CHECKING:
    from steadytorch.device.facts import DeviceFacts
    from steadytorch.results.signature import Leaf, Signature
    from steadytorch.workload.workload import Workload

RULES_VERSION = 6
"""Version of transforms, verification and selection; raise it to invalidate older plans.

Version and objective fix how a plan was measured: blocks, looks, error rate and tie band are
constants of a version, and a test checks this."""

ENVIRONMENT = (
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
"""Fields of a key that describe the machine and its software."""

_TENSOR = re.compile(
    r"\[(?P<shape>[\d, ]*)\] (?P<dtype>\w+) strides (?P<strides>.*) on (?P<device>\w+)"
)
"""An input as text in a key; see `_described_leaf`."""
_IN_SIGNATURE = {"shape", "dtype"}
"""Aspects of an input that the text of a signature has."""

_THREADS = "num_threads"
"""Name of the ambient setting for the number of threads per CPU operator."""


def canonical_json(value: Any) -> bytes:
    """Encodes JSON in UTF-8 with sorted keys and no whitespace: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Difference(NamedTuple):
    """A field in which two plan keys differ; `old` or `new` is None where the field is absent."""

    field: str
    old: Any
    new: Any


class Key(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Everything a plan depends on, as a flat, readable record; made by `make_key`.

    The key excludes rank, device index, host name, time and Python version.

    Attributes:
        workload: `workload_fingerprint`.
        signature: the inputs as text, without strides.
        inputs: full description of each input by path; `structure` holds the nesting.
        objective: the objective of the search.
        precision: the precision class allowed.
        tolerance: the requested tolerance; None for the default of the precision.
        max_memory_bytes: the memory limit; None for no limit.
        ambient: process-wide settings by name.
        device: "cpu" or "cuda".
        device_name: name of the GPU or the processor.
        compute_capability: as "9.0".
        sm_count: multiprocessors.
        mig_profile: as "1g.10gb"; None for a whole GPU.
        cores_logical: usable logical processor cores; None for a GPU.
        isa: vector instructions of the processor.
        torch: PyTorch version.
        cuda: CUDA version.
        cudnn: cuDNN version.
        triton: Triton version.
        driver: NVIDIA driver version.
        rules: `RULES_VERSION`.
        loader: whether each step loads its own batch, since gains of such steps do not carry over
            to the model alone. Omitted from the JSON if false.
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
        """SHA-256 of the key's canonical JSON in hexadecimal; names the plan file."""
        return _sha256_of(self)

    @property
    def environment_digest(self) -> str:
        """SHA-256 of the key fields that describe the machine and its software."""
        return _sha256_of({name: getattr(self, name) for name in ENVIRONMENT})


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
    """Makes the key for a workload, a signature and a machine.

    For a GPU, the key omits core and thread counts of the host. Ranks started by `torchrun` have
    one thread by default, and may be pinned to cores.

    Args:
        workload: the workload; its untouched model is described.
        signature: the inputs that the plan serves.
        facts: facts of the machine.
        objective: the objective of the search.
        precision: the precision class allowed.
        tolerance: the tolerance; None for the default of the precision.
        max_memory_bytes: the memory limit; None for no limit.
        ambient: process-wide settings; values are stored as text.
        fingerprint: `workload_fingerprint(workload)` if known, which saves milliseconds.

    Raises:
        UsageError: the tolerance is infinite or NaN.
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
    """Replaces a key's environment fields by those of a machine and the current `RULES_VERSION`."""
    return msgspec.structs.replace(key, **_environment_of(facts))


def _environment_of(facts: DeviceFacts) -> dict[str, Any]:
    own: dict[str, Any] = {"device_name": facts.name, "rules": RULES_VERSION}
    own |= {"cores_logical": None} if facts.device == "cuda" else {}
    return own | {name: getattr(facts, name) for name in ENVIRONMENT if name not in own}


def differing_fields(old: Key, new: Key) -> list[Difference]:
    """Lists the fields in which two keys differ; mapping entries are named like `ambient.name`."""
    before, after = flat(old), flat(new)
    names = dict.fromkeys((*before, *after))
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return [Difference(name, was, now) for name, was, now in pairs if was != now]


def nearest(stored: Iterable[Key], asked: Key) -> tuple[Difference, ...]:
    """Lists the fields in which the nearest stored key differs from the requested key.

    The result is empty unless a stored key has the same workload or differs in the workload only.
    """
    # Excludes an equal key, stored after the look-up.
    near = (key for key in stored if key != asked and _is_near(key, asked))
    found = [tuple(differing_fields(key, asked)) for key in near]
    return min(found, key=lambda d: (d[0].field == "workload", len(d)), default=())


def _is_near(stored: Key, asked: Key) -> bool:
    # Also reports a changed model if all other fields are equal.
    return stored.workload == asked.workload or (
        msgspec.structs.replace(stored, workload=asked.workload) == asked
    )


def format_differences(differing: Sequence[Difference], most: int = 4) -> str:
    """The first differences with old and new values, as a clause; empty if there are none."""
    if any(each.field == "signature" for each in differing):  # it has shapes and types
        differing = [d for d in differing if not _aspects(d) or _aspects(d).keys() - _IN_SIGNATURE]
    shown = "; ".join(map(_in_words, differing[:most]))
    return shown + (f"; and {len(differing) - most} more" if len(differing) > most else "")


def _in_words(difference: Difference) -> str:
    field, old, new = difference
    if field == "workload":  # hashes: shows only that they differ
        why = "(its layers, their modes or their code differ)"
        return f"workload was {old!s:.12}, is {new!s:.12} {why}"
    if field == "inputs.structure":
        return "the nesting of the inputs differs"
    aspects = _aspects(difference)
    if aspects and len(aspects) == 1:
        ((aspect, (was, now)),) = aspects.items()
        return f"{field} {aspect} was {was:.120}, is {now:.120}"
    return f"{field} was {old!s:.120}, is {new!s:.120}"


def format_nearest(differing: Sequence[Difference], most: int = 4) -> str:
    """The nearest stored plan and its differing fields, as a clause; empty without differences.

    The clause omits the shapes of the call, which the message shows elsewhere.
    """
    if not differing:
        return ""
    signature = next((d.old for d in differing if d.field == "signature"), None)
    others = (d for d in differing if d.field != "signature" and not _is_input(d))
    clauses = list(map(_in_words, others))
    by_aspect: dict[str, list[str]] = {}
    for each in filter(_is_input, differing):
        by_aspect.setdefault(_kinds(each), []).append(each.field)
    for aspect, fields in reversed(by_aspect.items()):
        more = f" and {len(fields) - most} more" if len(fields) > most else ""
        verb = "differs" if len(fields) == 1 else "differ"
        clauses.insert(0, f"{', '.join(fields[:most])}{more} {verb} in {aspect}")
    told = "; ".join(clauses[:most])
    told += f"; and {len(clauses) - most} more" if len(clauses) > most else ""
    if signature is None:
        return f"nearest plan: {told}"
    return f"nearest plan: {signature!s:.120}" + (f" ({told})" if told else "")


def _is_input(difference: Difference) -> bool:
    return difference.field.startswith("inputs[")


def _kinds(difference: Difference) -> str:
    """The aspects in which two values of an input differ, such as `shape and dtype`."""
    constant = all(str(value).startswith("= ") for value in difference[1:])
    return " and ".join(_aspects(difference)) or ("value" if constant else "kind")


def _aspects(difference: Difference) -> dict[str, tuple[str, str]]:
    """Old and new value of each differing aspect of an input tensor; empty for other fields.

    If the shapes differ, strides are left out, because they follow from the shape.
    """
    if not _is_input(difference):
        return {}
    old, new = (_TENSOR.fullmatch(str(value)) for value in (difference.old, difference.new))
    if old is None or new is None:
        return {}
    pairs = {name: (old[name], new[name]) for name in ("shape", "dtype", "strides", "device")}
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if "shape" in found:
        found.pop("strides", None)
        was, now = (each.replace(", ", "x") or "scalar" for each in found["shape"])
        found["shape"] = was, now
    return found


def flat(key: Key) -> dict[str, Any]:
    """The fields of a key by name; mapping entries are named like `ambient.name`."""
    found: dict[str, Any] = {}
    for field, value in msgspec.structs.asdict(key).items():
        if isinstance(value, dict):
            for name, entry in value.items():
                found[f"{field}{'' if name.startswith('[') else '.'}{name}"] = entry
        else:
            found[field] = value
    return found


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
    # Undecodable bytes of the environment become lone surrogates, which JSON cannot hold.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def workload_fingerprint(workload: Workload) -> str:
    """Hashes what a workload computes, without the values of weights and inputs.

    The fingerprint is the same in every process and on every device if the model's source code is
    available. `description.describe` lists what the fingerprint covers.

    Returns:
        64 hexadecimal digits.
    """
    from steadytorch.plan.description import describe

    return _sha256_of([_text(line) for line in describe(workload)])


def trained_fingerprint(model: Any) -> str:
    """Hashes what the model of a training step computes, without loss and optimizer.

    Returns:
        64 hexadecimal digits, as `workload_fingerprint`.
    """
    from steadytorch.plan.description import describe_trained

    return _sha256_of([_text(line) for line in describe_trained(model)])
