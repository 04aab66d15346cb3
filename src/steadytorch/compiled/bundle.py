"""What compiling a plan left behind, kept beside it: with it the first call compiles nothing twice.

Unlike a plan a bundle is not data only: it holds machine code and what PyTorch's compiler pickled,
which run when they are used. So nothing here is called unless the user asks for it, and a bundle
counts for nothing but in the environment that made it, read from a private folder of the user's
own. Its digest detects accidents, not attackers. Reading and unpacking run nothing of it.

A bundle is one file: a line of JSON that says what it is for, then its files in MessagePack. They
are unpacked into the cache folder of PyTorch's compiler, beside what is there. Where the model can
be compiled ahead of time a package stands beside it (`plan.package`): code that is whole, for which
no compiler is asked.
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

if TYPE_CHECKING:
    from steadytorch.compiled.package import Packaged
    from steadytorch.compiled.prebuilt import Source, Task
    from steadytorch.plan.record import PlanRecord

SCHEMA = 2
"""Version of the file's form."""
SUFFIX, PACKAGE = COMPANIONS
"""What the names of a bundle and of a package end in; both are called as their plan."""
MOST_BYTES = 512 << 20
"""Larger ones are neither written nor read; larger packages are not written."""

_NAME = re.compile(r"[A-Za-z0-9_.+=-]{1,255}(/[A-Za-z0-9_.+=-]{1,255}){0,7}")
_PASSING = re.compile(r"(^|/)(locks|precompiled_headers|tmp[^/]*)/|\.(lock|tmp)$|(^|/)\.")
# Triton lists the files of a kernel by their full paths.
_LISTS_PATHS = "__grp__"
_HERE = b"<steadytorch:cache>"
_NO_PLACE = "is not kept: the plan is in memory only"

logger = logging.getLogger("steadytorch")


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle is for, and what it holds.

    Attributes:
        candidate: of the plan.
        environment: what compiled code depends on beyond the key.
        key: digest of the plan's key, which covers device, driver and libraries.
        schema: `SCHEMA`.
        sha256: of all that follows the line.
    """

    candidate: str
    environment: dict[str, str]
    key: str
    schema: int
    sha256: str


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What follows the line.

    Attributes:
        files: of the compiler's cache, by their names in it.
        package: what is known of the one beside the bundle, in MessagePack; None for none.
    """

    files: dict[str, bytes]
    package: bytes | None = None


def path_of(plan: PlanRecord) -> Path | None:
    """Where the plan's bundle is or would be; None for a plan that is in memory only."""
    return None if plan.path is None else Path(plan.path).with_suffix(SUFFIX)


def write(plan: PlanRecord, cache: Path, made: tuple[Path, Packaged] | None = None) -> Path:
    """Packs a compiler cache that holds what the plan needs and little else.

    Args:
        plan: as it is stored.
        cache: the folder, as PyTorch's compiler left it.
        made: the plan's package and what is known of it, where there is one.

    Raises:
        OSError: it cannot be read, or the bundle cannot be written.
        BrokenError: the plan is in memory only, nothing was compiled, or it is too large.
    """
    path = path_of(plan)
    if path is None:
        raise BrokenError(_NO_PLACE)
    described = None if made is None else msgspec.msgpack.encode(made[1])
    body = msgspec.msgpack.encode(_Body(dict(_packed(cache)), described))
    head = canonical_json(_head(plan, hashlib.sha256(body).hexdigest()))
    size = len(head) + 1 + len(body)
    if size > MOST_BYTES:
        raise BrokenError(f"would take {size} bytes, and one holds {MOST_BYTES}")
    if made is not None:
        write_whole(path.with_suffix(PACKAGE), made[0].read_bytes())
    else:
        path.with_suffix(PACKAGE).unlink(missing_ok=True)
    write_whole(path, b"%s\n%s" % (head, body))
    return path


def fault(plan: PlanRecord, contents: str | None = None) -> str | None:
    """Why the plan's bundle cannot be used here, None if it can; unpacks nothing.

    Args:
        plan: as it is stored.
        contents: of the model that its package is to be for, see `contents.digest`; None where the
            package does not matter.
    """
    from steadytorch.compiled import package

    try:
        found = _read(plan).package
    except Exception as error:  # a bundle may hold anything, and must not stop the caller
        return why_not(error)
    try:
        if found is not None and contents is not None:
            package.check(_beside(plan), package.decoded(found), contents)
    except Exception as error:
        return why_not(error, "package")
    return None


def source(plan: PlanRecord) -> Source:
    """What `compile` is to take under the plan: its package, or else the bundle's files.

    Where the package is for another model than the one at hand, the files are unpacked, and the
    log says why in one line; so they are before other arguments are compiled for.
    """
    from steadytorch.compiled import package

    def found(task: Task) -> Callable[..., Any] | None:
        def compiled() -> Callable[..., Any]:
            unpack(plan)
            return task.compiled()

        try:
            described = _read(plan).package
        except Exception:  # as above; `unpack` says what is wrong
            described = None
        if described is not None:
            try:
                return package.load(
                    _beside(plan), package.decoded(described), task._replace(compiled=compiled)
                )
            except Exception as error:
                logger.warning("plan %s is compiled anew: %s", plan.id, why_not(error, "package"))
        unpack(plan)
        return None

    return found


def unpack(plan: PlanRecord) -> str | None:
    """Puts the plan's bundle where PyTorch's compiler looks; what is there already stays.

    Returns:
        None when it is there, else one line on why not, which is logged too: the plan works all
        the same, and compiles.
    """
    try:
        _place(_read(plan).files, _cache_folder())
    except Exception as error:  # as above
        reason = why_not(error)
        logger.warning("plan %s is compiled anew: %s", plan.id, reason)
        return reason
    return None


def _beside(plan: PlanRecord) -> Path:
    path = path_of(plan)
    if path is None:
        raise BrokenError(_NO_PLACE)
    return path.with_suffix(PACKAGE)


def _head(plan: PlanRecord, digest: str) -> _Head:
    candidate = " + ".join(map(str, plan.candidate))
    return _Head(candidate, environment(), plan.key.digest, SCHEMA, digest)


def environment() -> dict[str, str]:
    """What compiled code depends on, beyond the fields of a plan's key."""
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
    # Asking a compiler for its version starts a process.
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
        yield name, content.replace(written, _HERE) if _LISTS_PATHS in name else content
    if not found:
        raise BrokenError("is not kept: nothing was compiled")


def _is_kept(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and _PASSING.search(name) is None


def _read(plan: PlanRecord) -> _Body:
    """What a plan's bundle holds, if it is in order, ours, and for here."""
    path = path_of(plan)
    if path is None:
        raise BrokenError(_NO_PLACE)
    with open_folder(path.parent) as folder:
        check_private(os.fstat(folder), "its folder")
        content = memoryview(read_bytes(path.name, MOST_BYTES, folder))
        check_private(os.stat(path.name, dir_fd=folder, follow_symlinks=False), "it")
    # The line is short; a longer one is none of ours.
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
    """The folder of PyTorch's compiler, for this user alone to write to."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    make_private(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())).absolute())
    folder = Path(cache_dir())
    check_private(os.lstat(folder), f"the compiler's cache folder {folder}")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise RefusedError(f"the compiler's cache folder {folder} is a link")
    return folder


def _place(files: dict[str, bytes], root: Path) -> None:
    """Writes those that are not there; each appears whole."""
    here = json.dumps(os.fspath(root))[1:-1].encode()
    for name, content in files.items():
        if not _is_kept(name):  # among them those that begin with a dot, and so lead elsewhere
            raise BrokenError(f"names a file that it may not: {clean(name)}")
        target = root / name
        if target.exists():
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content.replace(_HERE, here) if _LISTS_PATHS in name else content)
            temporary.rename(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def why_not(error: Exception, what: str = "bundle") -> str:
    """What keeps a bundle, or a package, from being used or made, as one line."""
    if isinstance(error, UnsupportedError):
        return f"no {what}: {error}"
    if isinstance(error, FileNotFoundError):
        return f"it has no {what}"
    if isinstance(error, OSError):
        return f"its {what} was refused: {why(error)}"
    if isinstance(error, BrokenError):
        return f"its {what} {clean(error)}"
    return f"its {what} cannot be read: {type(error).__name__}: {clean(error)}"
