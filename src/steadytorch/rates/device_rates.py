"""Measured bandwidth and matrix rates of this device, improved over several runs and cached."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from steadytorch.caches import cache_folder
from steadytorch.device.facts import DeviceFacts, load_facts, parse_device
from steadytorch.device.roofline import copy_bandwidth, matrix_rate
from steadytorch.errors import UnsupportedError

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the file and of the measurement; each version has its own file."""
COPY = "copy"
"""Name of the copy bandwidth among the types."""
OCCASIONS = 10
"""Number of runs that measure a rate before it counts as known."""
_MOST_BYTES = 1 << 16
_TF32_CAPABILITY = 8


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Best copy bandwidth and matrix rates measured on this device.

    Attributes:
        device: name of the device.
        copy_bandwidth_bytes_per_s: bytes read plus written by a copy within its memory; None if it
            could not be measured.
        matrix_flops_per_s: rate of a large matrix product by type, such as "bfloat16"; "float32" is
            without TF32, which is "tf32".
        unknown: reason for each missing rate: "copy" or a type.
    """

    device: str
    copy_bandwidth_bytes_per_s: float | None = None
    matrix_flops_per_s: dict[str, float] = {}
    unknown: dict[str, str] = {}


class _Kept(msgspec.Struct, frozen=True):
    """Content of the cache file: best rates so far, and the number of runs that measured each."""

    rates: Rates
    occasions: dict[str, int] = {}


def measure_rates(device: str, dtypes: Sequence[str]) -> Rates:
    """Return the best rates over up to ten runs; call `measure_rates` inside a worker process.

    Each call measures the rates of the copy and of every type once, for about 0.3 s each. Rates
    already measured in ten runs are skipped. The best run counts, because other load can only lower
    a rate. A missing or broken cache file is ignored, and so is a failed write. Delete
    `$XDG_CACHE_HOME/steadytorch/rates` to measure again.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        dtypes: floating-point types, such as "bfloat16"; "float32" adds "tf32" if the device has
            it.

    Raises:
        UsageError: `device` or a type is malformed.
    """
    facts = load_facts(device)
    path = _path(device, facts)
    known = _read(path) or _Kept(Rates(device=facts.name or device))
    kept = _improved(known, device, types_to_measure(facts, dtypes))
    if path is not None and kept.occasions != known.occasions:
        _write(path, kept)
    return kept.rates


def types_to_measure(facts: DeviceFacts, dtypes: Sequence[str]) -> list[str]:
    """The types without duplicates, plus tf32 after float32 if the GPU supports TF32."""
    wanted = list(dict.fromkeys(dtypes))
    major = int((facts.compute_capability or "0").partition(".")[0])
    if "float32" in wanted and major >= _TF32_CAPABILITY:
        wanted.append("tf32")
    return wanted


def _improved(known: _Kept, device: str, wanted: list[str]) -> _Kept:
    """Measure each rate with fewer than ten runs once more; failures do not count as runs."""
    best, occasions = dict(known.rates.matrix_flops_per_s), dict(known.occasions)
    if known.rates.copy_bandwidth_bytes_per_s is not None:
        best[COPY] = known.rates.copy_bandwidth_bytes_per_s
    unknown: dict[str, str] = {}
    for name in (COPY, *wanted):
        if occasions.get(name, 0) >= OCCASIONS:
            continue
        try:
            rate = copy_bandwidth(device) if name == COPY else rate_of(device, name)
        except UnsupportedError as error:
            unknown[name] = str(error)
        else:
            best[name] = max(rate, best.get(name, 0.0))
            occasions[name] = occasions.get(name, 0) + 1
    rates = Rates(
        device=known.rates.device,
        copy_bandwidth_bytes_per_s=best.pop(COPY, None),
        matrix_flops_per_s=best,
        unknown=unknown,
    )
    return _Kept(rates, occasions)


def rate_of(device: str, dtype: str) -> float:
    """The matrix product rate of a type in FLOP/s; float32 on a GPU is measured without TF32."""
    if parse_device(device)[0] == "cpu" or dtype not in ("float32", "tf32"):
        return matrix_rate(device, dtype)
    import torch

    from steadytorch.ambient import flags

    precision = "tf32" if dtype == "tf32" else "ieee"
    with flags((torch.backends.cuda.matmul, "fp32_precision", precision)):
        return matrix_rate(device, "float32")


def _path(device: str, facts: DeviceFacts) -> Path | None:
    """Cache file for this device, software and number of threads; None without a cache folder."""
    import torch

    threads = torch.get_num_threads() if facts.device == "cpu" else 0
    said = f"{SCHEMA} {threads} {msgspec.json.encode(facts).decode()}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:32]
    folder = cache_folder("rates")
    return None if folder is None else folder / f"{digest}.json"


def _read(path: Path | None) -> _Kept | None:
    """Content of the cache file; None if the file is missing or unusable."""
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        kept = msgspec.json.decode(content, type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        logger.debug("measuring rates again, cannot use %s: %s", path, error)
        return None
    found = [kept.rates.copy_bandwidth_bytes_per_s, *kept.rates.matrix_flops_per_s.values()]
    return kept if all(rate is None or 0 < rate < 1e20 for rate in found) else None


def _write(path: Path, kept: _Kept) -> None:
    """Replace the cache file atomically: concurrent readers see the old or the new content."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_bytes(msgspec.json.encode(kept))
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        logger.debug("rates not cached, cannot write %s: %s", path, error)
