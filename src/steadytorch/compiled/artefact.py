"""Artefacts: converted models stored beside a plan, so that later processes skip conversion.

Unlike a bundle, an artefact is data only: a model in a format that an engine reads (OpenVINO's IR,
ONNX). Reading an artefact runs no code from the file, so plans use artefacts by default. An
artefact contains the model's weights. An artefact is used only if weights, attributes, sources,
inputs and library versions all match.

An artefact is one file: a JSON header line, then the parts of the converted model.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from steadytorch.compiled import model_digest
from steadytorch.errors import UnsupportedError
from steadytorch.plan.files import (
    COMPANIONS,
    BrokenError,
    check_private,
    clean,
    open_folder,
    opened,
    why,
    write_whole,
)
from steadytorch.plan.fingerprint import canonical_json
from steadytorch.results.signature import Signature
from steadytorch.workload.workload import Workload

SCHEMA = 1
"""Version of the file format."""
SUFFIX = COMPANIONS[2]
"""Suffix of an artefact; the stem is the plan's."""
MOST_BYTES = 2 << 30
"""Limit on the size of artefacts."""

_HEADER_BYTES = 1 << 20
_log = logging.getLogger("steadytorch")

Parts = Mapping[str, Any]
"""Parts of a converted model by name, each as bytes or another buffer."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of an artefact.

    Attributes:
        contents: digest of the untouched model; see `model_digest.digest`.
        engine: name of the transform that made the artefact, or of a conversion that several
            transforms share.
        libraries: versions of PyTorch and of the engine's libraries.
        parts: size of each part in bytes, in order.
        schema: `SCHEMA`.
        sha256: digest of everything after the header line.
        sources: digests of the model's source code; see `model_digest.sources_of`.
        taken: signature of the inputs.
    """

    contents: str
    engine: str
    libraries: dict[str, str]
    parts: dict[str, int]
    schema: int
    sha256: str
    sources: dict[str, str]
    taken: Signature


class Shelf(NamedTuple):
    """Location where artefacts are looked up, and stored if it is writable.

    Attributes:
        path_of: the file for an engine's artefact; None if it has none.
        is_writable: whether new artefacts are stored there.
    """

    path_of: Callable[[str], Path | None]
    is_writable: bool


EMPTY = Shelf(lambda engine: None, is_writable=False)
"""The shelf of a plan without an artefact."""


_SHELF: ContextVar[Shelf | None] = ContextVar("steadytorch_shelf", default=None)


@contextmanager
def supplied(shelf: Shelf | None) -> Iterator[None]:
    """Make transforms applied on this thread look for artefacts in `shelf`."""
    before = _SHELF.set(shelf)
    try:
        yield
    finally:
        _SHELF.reset(before)


def beside(plan_path: str | None) -> Shelf | None:
    """Location of the artefact of a stored plan; None for a plan in memory only."""
    if plan_path is None:
        return None
    path = Path(plan_path).with_suffix(SUFFIX)
    return Shelf(lambda engine: path, is_writable=False)


def within(folder: Path) -> Shelf:
    """Location of one search's artefacts, so that candidates share converted models."""
    return Shelf(lambda engine: folder / f"{engine}{SUFFIX}", is_writable=True)


class Held:
    """An opened artefact, which stays readable after the folder of the search is deleted.

    Args:
        path: the artefact.

    Raises:
        OSError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def keep_beside(self, plan_path: str | None) -> None:
        """Writes the artefact beside a stored plan; failures are logged."""
        with self._file as file:
            if plan_path is None:
                return
            try:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    write_whole(Path(plan_path).with_suffix(SUFFIX), memoryview(content))
            except (OSError, ValueError) as error:
                _log.warning("an artefact is not kept: %s", clean(error))


def held(folder: Path, names: Sequence[str]) -> Held | None:
    """Opens the artefact of a search's winning candidate; None without an artefact.

    Args:
        folder: the folder given to `within`.
        names: the names of the artefacts of the winner's transforms.
    """
    for name in names:
        with suppress(OSError):
            return Held(folder / f"{name}{SUFFIX}")
    return None


def lend(plan_path: str | None, folder: Path, names: Sequence[str]) -> None:
    """Copies a stored plan's artefact, if it has one, into the folder of a search.

    Args:
        plan_path: the plan's file; None for a plan in memory only.
        folder: the folder given to `within`.
        names: the names of the artefacts of the plan's transforms.
    """
    if plan_path is None:
        return
    for name in names:
        with suppress(OSError):
            shutil.copyfile(Path(plan_path).with_suffix(SUFFIX), folder / f"{name}{SUFFIX}")


def obtain(
    engine: str,
    libraries: Mapping[str, str],
    workload: Workload,
    make: Callable[[], Parts],
    *,
    calibrated: bool = False,
) -> Parts:
    """Returns the converted model from an artefact that matches, or else converts the model.

    Args:
        engine: name of the artefact, usually that of the transform.
        libraries: versions of the libraries that read and write the artefact.
        workload: the untouched workload.
        make: converts the model.
        calibrated: whether the converted model depends on the values of the inputs. A plan is then
            served from its artefact only, because only a search calibrates and verifies the
            converted model.

    Raises:
        UnsupportedError: `calibrated`, and the plan that is served has no matching artefact.
        Exception: exceptions of `make`.
    """
    shelf = _SHELF.get()
    if calibrated and shelf is not None and not shelf.is_writable:
        make, instead = _uncalibrated, "is not served"
    else:
        instead = "converts again"
    path = None if shelf is None else shelf.path_of(engine)
    if shelf is None or path is None:
        return make()
    try:
        header = _expected(engine, libraries, workload)
    except UnsupportedError as error:  # the model cannot be compared
        _log.debug("no artefact for %s: %s", engine, error)
        return make()
    if path.exists():
        try:
            return read(path, header)
        except Exception as error:  # a damaged file may raise anything; the caller goes on
            _log.warning("%s %s: %s", engine, instead, _why_not(error))
    parts = make()
    if shelf.is_writable:
        try:
            sources = model_digest.sources_of(partial(_called, workload))
            write(path, msgspec.structs.replace(header, sources=sources), parts)
        except (UnsupportedError, BrokenError, OSError) as error:
            _log.warning("the artefact of %s is not kept: %s", engine, _why_not(error))
    return parts


def _uncalibrated() -> Parts:
    raise UnsupportedError(
        "the plan's artefact is missing or does not fit, and only a search calibrates int8: tune "
        "again"
    )


def _called(workload: Workload) -> Any:
    with torch.no_grad():
        return workload.model(*workload.inputs, **workload.kwargs)


def _expected(engine: str, libraries: Mapping[str, str], workload: Workload) -> Header:
    assert workload.module is not None
    contents = model_digest.digest(workload.module)
    versions = {"torch": str(torch.__version__), **libraries}
    return Header(contents, engine, versions, {}, SCHEMA, "", {}, workload.signature())


def write(path: Path, header: Header, parts: Parts) -> None:
    """Writes an artefact atomically.

    Raises:
        BrokenError: the artefact would exceed `MOST_BYTES`.
        OSError: the artefact cannot be written.
    """
    parts = dict(sorted(parts.items()))  # the order of the header, whose keys are sorted
    sizes = {name: memoryview(part).nbytes for name, part in parts.items()}
    if sum(sizes.values()) > MOST_BYTES:
        raise BrokenError(f"would take {sum(sizes.values())} bytes; the limit is {MOST_BYTES}")
    digest = hashlib.sha256()
    for part in parts.values():
        digest.update(part)
    line = canonical_json(msgspec.structs.replace(header, parts=sizes, sha256=digest.hexdigest()))
    write_whole(path, b"".join([line, b"\n", *parts.values()]))


def read(path: Path, expected: Header) -> Parts:
    """Reads an artefact after checking that it is private, intact and made for the same model.

    Args:
        path: the file.
        expected: a header with the wanted contents, engine, libraries and signature.

    Raises:
        OSError: the artefact cannot be read, or its file or folder is not private.
        BrokenError: the artefact was truncated or altered, or is for another model or library
            version.
    """
    with open_folder(path.parent) as folder, opened(path.name, folder) as (descriptor, seen):
        check_private(os.fstat(folder), "its folder")
        check_private(seen, "it")
        with open(descriptor, "rb", closefd=False) as file:
            head = _header(file.readline(_HEADER_BYTES))
            _check(head, expected)
            size = sum(head.parts.values())
            if size > MOST_BYTES or seen.st_size - file.tell() != size:
                raise BrokenError("was cut or altered: its size does not match")
            body = bytearray(size)
            file.readinto(body)
    if hashlib.sha256(body).hexdigest() != head.sha256:
        raise BrokenError("was cut or altered: its digest does not match")
    view, parts, start = memoryview(body), {}, 0
    for name, length in head.parts.items():
        parts[name] = view[start : start + length]
        start += length
    return parts


def _header(line: bytes) -> Header:
    try:
        return msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise BrokenError(f"does not fit the schema: {clean(error)}") from None


def _check(found: Header, expected: Header) -> None:
    for name in ("schema", "engine", "taken", "contents"):
        if getattr(found, name) != getattr(expected, name):
            what = {"taken": "inputs", "contents": "weights or attributes"}.get(name, name)
            raise BrokenError(f"was made for other {what}")
    for name, version in expected.libraries.items():
        if (there := found.libraries.get(name)) != version:
            raise BrokenError(f"was made by {name} {clean(there)}, here is {version}")
    if (changed := model_digest.changed_source(found.sources)) is not None:
        raise BrokenError(f"was made from another version of {clean(changed)}")


def _why_not(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"its artefact was refused: {why(error)}"
    if isinstance(error, BrokenError):
        return f"its artefact {clean(error)}"
    return clean(error)
