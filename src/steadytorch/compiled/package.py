"""Packages: files with a plan's model, compiled ahead of time together with its weights.

A package is stored beside the plan's bundle, which holds the description of the package. The safety
rules for bundles (see `compiled.bundle`) also apply to packages. A package is used only for equal
weights, attributes and sources, and for the signature that `compile` gets under the plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from steadytorch.compiled import model_digest
from steadytorch.compiled.aot_inductor import Package
from steadytorch.compiled.prebuilt import Task
from steadytorch.plan.files import BrokenError, check_private, clean, open_folder, opened
from steadytorch.results.signature import Signature
from steadytorch.workload.workload import Workload

# The descriptor names the checked file even if its path is replaced.
_DESCRIPTOR_PATH = "/proc/self/fd/{}"


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signature and source digests of a package, from the process that compiled it.

    Attributes:
        taken: signature of the arguments that `compile` got; the package takes the same.
        sources: digests of the model's source code; see `model_digest.sources_of`.
    """

    taken: Signature
    sources: dict[str, str]


class Packaged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a package file: the model it is for, and the digest of the file.

    Attributes:
        contents: digest of the untouched model; see `model_digest.digest`.
        made: the description by the process that made it.
        sha256: digest of the file.
        size: size of the file in bytes.
    """

    contents: str
    made: Made
    sha256: str
    size: int


def packaged(path: Path, model_contents: str, made: Made) -> Packaged:
    """Describes a new package.

    Raises:
        OSError: the package cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Packaged(model_contents, made, digest, path.stat().st_size)


def decoded(data: bytes) -> Packaged:
    """Decodes a bundle's description of its package.

    Raises:
        BrokenError: the description does not fit the schema.
    """
    try:
        return msgspec.msgpack.decode(data, type=Packaged)
    except msgspec.MsgspecError as error:
        raise BrokenError(f"does not fit the schema: {clean(error)}") from None


def check(path: Path, expected: Packaged, model_contents: str | None) -> None:
    """Checks, without running a package, that the package fits the model and is intact.

    Args:
        path: the package.
        expected: its description from the bundle.
        model_contents: digest of the model; None if it cannot be compared.

    Raises:
        OSError: it cannot be read, or its file or folder is not private.
        BrokenError: it was truncated or altered, or is for another model.
    """
    with _checked(path, expected, model_contents):
        pass


def load(path: Path, expected: Packaged, task: Task) -> Package:
    """Loads a package instead of compiling a model. Loading may run the package's code.

    Args:
        path: the package.
        expected: its description from the bundle.
        task: the task to compile; still compiled for arguments that the package does not take.

    Raises:
        OSError: it cannot be read, or its file or folder is not private.
        BrokenError: it was truncated or altered, or is for another model.
        Exception: PyTorch cannot load it.
    """
    model = task.workload.untouched
    device = Workload(model, task.workload.inputs, task.workload.kwargs).device
    with _checked(path, expected, model_digest.digest(model)) as file:
        return Package(file, expected.made.taken, device, task.compiled)


@contextmanager
def _checked(path: Path, expected: Packaged, model_contents: str | None) -> Iterator[str]:
    """Checks a package and yields a path that opens exactly the checked file."""
    if model_contents != expected.contents:
        raise BrokenError("was made for other weights or attributes")
    if (changed := model_digest.changed_source(expected.made.sources)) is not None:
        raise BrokenError(f"was made from another version of {changed}")
    with open_folder(path.parent) as folder, opened(path.name, folder) as (descriptor, seen):
        check_private(os.fstat(folder), "its folder")
        check_private(seen, "it")
        if seen.st_size != expected.size:
            raise BrokenError(f"has {seen.st_size} bytes, expected {expected.size}")
        with open(descriptor, "rb", closefd=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise BrokenError("was cut or altered: its digest does not match")
        name = _DESCRIPTOR_PATH.format(descriptor)
        yield name if os.path.exists(name) else os.fspath(path)
