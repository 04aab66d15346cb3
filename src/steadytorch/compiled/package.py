"""A plan's package: what it compiled, ahead of time and with the weights in it, as a file.

It stands beside the plan's bundle, which says what it is for; what holds of bundles holds of it. A
package is used for the very weights, attributes and sources that it was made of, and for the
signature that `compile` gets under the plan.
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

# A descriptor stays that of the file that was looked at, whatever is put in its place.
_BY_DESCRIPTOR = "/proc/self/fd/{}"


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a package where it is made.

    Attributes:
        taken: the arguments that `compile` got, and that it runs with.
        sources: the code that it was compiled from, see `contents.sources_of`.
    """

    taken: Signature
    sources: dict[str, str]


class Packaged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a package is for, and how it is known to be whole.

    Attributes:
        contents: of the untouched model, see `contents.digest`.
        made: where it was made.
        sha256: of the file.
        size: of the file in bytes.
    """

    contents: str
    made: Made
    sha256: str
    size: int


def packaged(path: Path, model_contents: str, made: Made) -> Packaged:
    """Describes a package that was just made.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Packaged(model_contents, made, digest, path.stat().st_size)


def decoded(data: bytes) -> Packaged:
    """What a bundle says of its package.

    Raises:
        BrokenError: it does not fit the schema.
    """
    try:
        return msgspec.msgpack.decode(data, type=Packaged)
    except msgspec.MsgspecError as error:
        raise BrokenError(f"does not fit the schema: {clean(error)}") from None


def check(path: Path, expected: Packaged, model_contents: str | None) -> None:
    """Looks whether a package can be used here, without running any of it.

    Args:
        path: where it is to be.
        expected: what its bundle says of it.
        model_contents: of the model at hand; None if they cannot be compared.

    Raises:
        OSError: it cannot be read, or is not to be.
        BrokenError: it was cut or altered, or is for another model.
    """
    with _whole(path, expected, model_contents):
        pass


def load(path: Path, expected: Packaged, task: Task) -> Package:
    """Loads a package in place of what `compile` would make of a task; its code runs from here on.

    Args:
        path: where it is.
        expected: what its bundle says of it.
        task: what is to be compiled; it still is for other arguments than the package takes.

    Raises:
        OSError: it cannot be read, or is not to be.
        BrokenError: it was cut or altered, or is for another model.
        Exception: PyTorch cannot load it.
    """
    model = task.workload.untouched
    device = Workload(model, task.workload.inputs, task.workload.kwargs).device
    with _whole(path, expected, model_digest.digest(model)) as file:
        return Package(file, expected.made.taken, device, task.compiled)


@contextmanager
def _whole(path: Path, expected: Packaged, model_contents: str | None) -> Iterator[str]:
    """A name under which the file can be opened while it is known to be in order."""
    if model_contents != expected.contents:
        raise BrokenError("was made of other weights or attributes")
    if (changed := model_digest.changed_source(expected.made.sources)) is not None:
        raise BrokenError(f"was made of another {changed}")
    with open_folder(path.parent) as folder, opened(path.name, folder) as (descriptor, seen):
        check_private(os.fstat(folder), "its folder")
        check_private(seen, "it")
        if seen.st_size != expected.size:
            raise BrokenError(f"has {seen.st_size} bytes, expected {expected.size}")
        with open(descriptor, "rb", closefd=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise BrokenError("was cut or altered: its digest does not match")
        name = _BY_DESCRIPTOR.format(descriptor)
        yield name if os.path.exists(name) else os.fspath(path)
