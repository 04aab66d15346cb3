"""Bundles: compiled code kept beside a plan, for faster cold starts with `bundle=True`.

A plan is only data, but a bundle holds machine code and pickles of PyTorch's compiler, which
execute when the compiler loads them. A bundle is therefore read only at the user's request, only in
the environment that made it, and only from the user's private folder. A bundle's digest detects
corruption, not tampering. Reading and unpacking a bundle run no code.

A bundle is one file: a JSON header line, then the compiler's cache files in MessagePack. The cache
files are unpacked into the cache folder of PyTorch's compiler; existing files stay. A model that
can be compiled ahead of time also gets a package (`compiled.package`), which loads without a
compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steadytorch import __version__
from steadytorch.caches import make_private
from steadytorch.errors import UnsupportedError
from steadytorch.plan.files import (
    COMPANIONS,
    BrokenError,
    RefusedError,
    check_private,
    clean,
    open_folder,
    read_bytes,
    why,
    write_whole,
)
from steadytorch.plan.fingerprint import canonical_json
from steadytorch.results.candidate import describe

if TYPE_CHECKING:
    from steadytorch.compiled.package import Packaged
    from steadytorch.compiled.prebuilt import Source, Task
    from steadytorch.plan.record import PlanRecord

SCHEMA = 2
"""Version of the file format."""
SUFFIX, PACKAGE = COMPANIONS[:2]
"""Suffixes of bundles and of packages; the stem is the plan's."""
MOST_BYTES = 512 << 20
"""Limit on the size of bundles read or written, and of packages written."""

_NAME = re.compile(r"[A-Za-z0-9_.+=-]{1,255}(/[A-Za-z0-9_.+=-]{1,255}){0,7}")
_TEMPORARY = re.compile(r"(^|/)(locks|precompiled_headers|tmp[^/]*)/|\.(lock|tmp)$|(^|/)\.")
# Triton's group files list the files of a kernel by absolute path.
_LISTS_PATHS = "__grp__"
_CACHE_MARK = b"<steadytorch:cache>"
_IN_MEMORY = "is not kept: the plan is in memory only"

logger = logging.getLogger("steadytorch")


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of a bundle.

    Attributes:
        candidate: the plan's candidate.
        environment: dependencies of compiled code that the key does not cover.
        key: digest of the plan's key, which covers device, driver and libraries.
        schema: `SCHEMA`.
        sha256: digest of everything after the header line.
    """

    candidate: str
    environment: dict[str, str]
    key: str
    schema: int
    sha256: str


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a bundle.

    Attributes:
        files: files of the compiler's cache by name.
        package: description of the plan's package in MessagePack; None without a package.
    """

    files: dict[str, bytes]
    package: bytes | None = None


def path_of(plan: PlanRecord) -> Path | None:
    """Path of the plan's bundle, whether or not it exists; None for a plan in memory only."""
    return None if plan.path is None else Path(plan.path).with_suffix(SUFFIX)


def write(plan: PlanRecord, cache: Path, made: tuple[Path, Packaged] | None = None) -> Path:
    """Packs a compiler cache into the plan's bundle.

    Args:
        plan: the stored plan.
        cache: the cache folder of PyTorch's compiler, filled for this plan alone.
        made: path and description of the plan's package; None without a package.

    Raises:
        OSError: the cache cannot be read, or the bundle cannot be written.
        BrokenError: the plan is in memory only, nothing was compiled, or the bundle is too large.
    """
    path = path_of(plan)
    if path is None:
        raise BrokenError(_IN_MEMORY)
    described = None if made is None else msgspec.msgpack.encode(made[1])
    body = msgspec.msgpack.encode(_Body(dict(_packed(cache)), described))
    head = canonical_json(_head(plan, hashlib.sha256(body).hexdigest()))
    size = len(head) + 1 + len(body)
    if size > MOST_BYTES:
        raise BrokenError(f"would take {size} bytes; the limit is {MOST_BYTES}")
    if made is not None:
        write_whole(path.with_suffix(PACKAGE), made[0].read_bytes())
    else:
        path.with_suffix(PACKAGE).unlink(missing_ok=True)
    write_whole(path, b"%s\n%s" % (head, body))
    return path


def fault(plan: PlanRecord, contents: str | None = None) -> str | None:
    """Returns why the plan's bundle cannot be used here, or None if it can; unpacks nothing.

    Args:
        plan: the stored plan.
        contents: digest of the model for the package (`model_digest.digest`); None to ignore the
            package.
    """
    from steadytorch.compiled import package

    try:
        found = read(plan).package
    except Exception as error:  # a damaged bundle may raise anything; the caller goes on
        return why_not(error)
    try:
        if found is not None and contents is not None:
            package.check(_package_path(plan), package.decoded(found), contents)
    except Exception as error:
        return why_not(error, "package")
    return None


def source(plan: PlanRecord) -> Source:
    """Makes a `Source` for `compile` that loads the plan's package or unpacks the plan's bundle.

    If the package cannot be loaded, the bundle's files are unpacked and a warning gives the reason.
    The bundle's files are also unpacked before `compile` compiles for other arguments.
    """
    from steadytorch.compiled import package

    def found(task: Task) -> Callable[..., Any] | None:
        def compiled() -> Callable[..., Any]:
            unpack(plan)
            return task.compiled()

        try:
            described = read(plan).package
        except Exception:  # as above; `unpack` logs the reason
            described = None
        if described is not None:
            try:
                return package.load(
                    _package_path(plan),
                    package.decoded(described),
                    task._replace(compiled=compiled),
                )
            except Exception as error:
                logger.warning("plan %s is compiled again: %s", plan.id, why_not(error, "package"))
        unpack(plan)
        return None

    return found


def unpack(plan: PlanRecord) -> str | None:
    """Unpacks the plan's bundle into the cache of PyTorch's compiler; existing files stay.

    Returns:
        None if the bundle was unpacked, else the reason in one line, which is also logged. The plan
        then compiles as without a bundle.
    """
    try:
        _place(read(plan).files, _cache_folder())
    except Exception as error:  # as above
        reason = why_not(error)
        logger.warning("plan %s is compiled again: %s", plan.id, reason)
        return reason
    return None


def _package_path(plan: PlanRecord) -> Path:
    path = path_of(plan)
    if path is None:
        raise BrokenError(_IN_MEMORY)
    return path.with_suffix(PACKAGE)


def _head(plan: PlanRecord, digest: str) -> _Head:
    return _Head(describe(plan.candidate, ""), environment(), plan.key.digest, SCHEMA, digest)


def environment() -> dict[str, str]:
    """Dependencies of compiled code that a plan's key does not cover, such as the C++ compiler."""
    import torch

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return {
        "compiler": "none" if compiler is None else _identity(os.path.realpath(compiler)),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "libc": " ".join(platform.libc_ver()),
        "python": f"{platform.python_version()} {sys.implementation.cache_tag}",
        "steadytorch": __version__,
        "torch build": f"{torch.__version__} {torch.version.git_version}",
    }


def _identity(program: str) -> str:
    # The size stands in for the version, which would take a process to find.
    seen = os.stat(program)
    return f"{program} of {seen.st_size} bytes"


def _packed(cache: Path) -> Iterator[tuple[str, bytes]]:
    written = json.dumps(os.fspath(cache))[1:-1].encode()
    found = taken = 0
    for path in sorted(cache.rglob("*")):
        name = path.relative_to(cache).as_posix()
        if path.is_symlink() or not path.is_file() or not _is_kept(name):
            continue
        taken += path.stat().st_size
        if taken > MOST_BYTES:
            raise BrokenError(f"would take more than {MOST_BYTES} bytes")
        content = path.read_bytes()
        found += 1
        yield name, content.replace(written, _CACHE_MARK) if _LISTS_PATHS in name else content
    if not found:
        raise BrokenError("is not kept: nothing was compiled")


def _is_kept(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and _TEMPORARY.search(name) is None


def read(plan: PlanRecord) -> _Body:
    """Reads a plan's bundle after checking owner, digest and environment."""
    path = path_of(plan)
    if path is None:
        raise BrokenError(_IN_MEMORY)
    with open_folder(path.parent) as folder:
        check_private(os.fstat(folder), "its folder")
        content = memoryview(read_bytes(path.name, MOST_BYTES, folder))
        check_private(os.stat(path.name, dir_fd=folder, follow_symlinks=False), "it")
    # Headers are short; a longer line is not a header.
    line, _, _ = bytes(content[: 1 << 16]).partition(b"\n")
    head = msgspec.json.decode(line, type=_Head)
    body = content[len(line) + 1 :]
    if hashlib.sha256(body).hexdigest() != head.sha256:
        raise BrokenError("was cut or altered: its digest does not match")
    if differing := _differing(head, _head(plan, head.sha256)):
        raise BrokenError(f"was made for another {', '.join(differing)}")
    return msgspec.msgpack.decode(body, type=_Body)


def _differing(head: _Head, here: _Head) -> list[str]:
    found, expected = (
        {"schema": h.schema, "key": h.key, "candidate": h.candidate, **h.environment}
        for h in (head, here)
    )
    return [n for n in {**expected, **found} if found.get(n) != expected.get(n)]


def _cache_folder() -> Path:
    """The cache folder of PyTorch's compiler, checked to be private to this user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    make_private(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())).absolute())
    folder = Path(cache_dir())
    check_private(os.lstat(folder), f"the compiler's cache folder {folder}")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise RefusedError(f"the compiler's cache folder {folder} is a link")
    return folder


def _place(files: dict[str, bytes], root: Path) -> None:
    """Writes a bundle's files to the compiler's cache atomically; existing files stay."""
    here = json.dumps(os.fspath(root))[1:-1].encode()
    for name, content in files.items():
        if not _is_kept(name):  # also rejects "..", which would lead out of the folder
            raise BrokenError(f"holds a file name that is not allowed: {clean(name)}")
        target = root / name
        if target.exists():
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content.replace(_CACHE_MARK, here) if _LISTS_PATHS in name else content)
            temporary.rename(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def why_not(error: Exception, what: str = "bundle") -> str:
    """Explains in one line why a bundle or a package cannot be used or made."""
    if isinstance(error, UnsupportedError):
        return f"no {what}: {error}"
    if isinstance(error, FileNotFoundError):
        return f"it has no {what}"
    if isinstance(error, OSError):
        return f"its {what} was refused: {why(error)}"
    if isinstance(error, BrokenError):
        return f"its {what} {clean(error)}"
    return f"its {what} cannot be read: {type(error).__name__}: {clean(error)}"
