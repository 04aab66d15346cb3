"""One plan file: `{key, payload, schema, sha256}` in canonical JSON.

It is read with doubt and written whole. A file holds at most `MAX_BYTES`.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from steadytorch.caches import make_private, why_not_private
from steadytorch.errors import PlanError
from steadytorch.plan.fingerprint import Key, canonical_json

SCHEMA = 1
"""Version of the file's outer form; the payload has its own type."""
COMPANIONS = (".bundle", ".pt2")
"""Suffixes of files of a plan's name beside its own: removed with it, see `compiled.bundle`."""
MAX_BYTES = 1 << 20

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEAL = b',"sha256":"%s"}'
_SEAL_BYTES = len(_SEAL % (b"0" * 64))

logger = logging.getLogger("steadytorch")

P = TypeVar("P")

# Stores that were found open to others, by device and number; each is told of once.
_OPEN: set[tuple[int, int]] = set()


class Entry(msgspec.Struct, Generic[P], forbid_unknown_fields=True):
    """What a file says, without its digest. A payload that has a key of its own names this one."""

    key: Key
    payload: P
    schema: int

    def __post_init__(self) -> None:
        if getattr(self.payload, "key", self.key) != self.key:
            raise ValueError("the payload names another key than the file")


class _Head(msgspec.Struct):
    schema: int


class RefusedError(OSError):
    """Something that is not to be read nor touched."""


class BrokenError(Exception):
    """A regular file of ours whose content is unusable; `seen` is its status when it was read."""

    seen: os.stat_result | None = None


def clean(text: object) -> str:
    """Text that is safe to show: one line, printable, not long."""
    # File contents and names may carry terminal escapes, and be long.
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown if len(shown) <= 300 else f"{shown[:300]}..."


def why(error: Exception) -> str:
    """The reason in an error, as a clause for people."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a symbolic link"
    strerror = error.strerror if isinstance(error, OSError) else None
    return clean(strerror or error)


def encoded(key: Key, payload: Any) -> bytes:
    """The bytes of a file, read back once so that nothing unreadable is ever stored.

    Raises:
        BrokenError: reading it back gives something else, as for a number that is not finite.
        TypeError: the payload has no JSON form.
    """
    body = canonical_json({"key": key, "payload": payload, "schema": SCHEMA})
    entry = decoded(_sealed(body), type(payload))
    if entry.key != key or canonical_json(entry.payload) != canonical_json(payload):
        raise BrokenError("it reads back as something else")
    return _sealed(body)


def _sealed(body: bytes) -> bytes:
    # Sorted by name, the digest is the last field: it covers all that stands before it.
    return body[:-1] + _SEAL % hashlib.sha256(body).hexdigest().encode()


def decoded(data: bytes, payload_type: type[P]) -> Entry[P]:
    """The content of a file.

    Raises:
        BrokenError: it was cut or altered, or does not fit the schema.
    """
    body = data[:-_SEAL_BYTES] + b"}"
    if _sealed(body) != data:
        raise BrokenError("is not a plan, or was cut or altered: its digest does not match")
    try:
        schema = msgspec.json.decode(body, type=_Head).schema
        if schema == SCHEMA:
            return _decoder(payload_type).decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenError(f"does not fit the schema: {clean(error)}") from None
    raise BrokenError(f"has schema {schema}, and this version reads schema {SCHEMA}")


@functools.lru_cache(maxsize=16)
def _decoder(payload_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(Entry[payload_type])


def read(
    name: str | os.PathLike[str], payload_type: type[P], folder: int | None = None
) -> tuple[Entry[P], os.stat_result]:
    """Reads a file, relative to `folder` where given, and its status at that time.

    A folder is taken for one of a store. Where others may write to it, or to the one around it,
    they may remove plans there and bring back old ones, though not write any: whose a file is says
    who wrote it. So it is read all the same, and one warning is logged.

    Raises:
        OSError: it cannot be read, or is not to be: a link, no regular file, or another user's.
        BrokenError: it is a regular file of ours, and its content is unusable.
    """
    with opened(name, folder) as (descriptor, seen):
        if folder is not None:
            _warn_of_others(folder)
        try:
            content = bounded(functools.partial(os.read, descriptor), MAX_BYTES)
            return decoded(content, payload_type), seen
        except BrokenError as fault:
            fault.seen = seen
            raise


def read_bytes(name: str | os.PathLike[str], most_bytes: int, folder: int | None = None) -> bytes:
    """Reads a file of any content under the same rules of ownership, and of what it is relative to.

    Raises:
        OSError: it cannot be read, or is not to be: a link, no regular file, or another user's.
        BrokenError: it is larger than `most_bytes`.
    """
    with opened(name, folder) as (descriptor, _):
        return bounded(functools.partial(os.read, descriptor), most_bytes)


@contextmanager
def opened(
    name: str | os.PathLike[str], folder: int | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """A file that is ours to read, relative to `folder` where given: its descriptor and status.

    Raises:
        OSError: it cannot be read, or is not to be: a link, no regular file, or another user's.
    """
    # O_NONBLOCK: opening a FIFO without it waits for a writer, for ever.
    descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise RefusedError("it is not a regular file")
        if seen.st_uid not in (os.geteuid(), 0):
            raise RefusedError(f"it belongs to user {seen.st_uid}")
        yield descriptor, seen
    finally:
        os.close(descriptor)


def bounded(read_piece: Callable[[int], bytes], most_bytes: int) -> bytes:
    """All that a reader gives, up to a size.

    Args:
        read_piece: gives at most so many bytes; none at the end.
        most_bytes: what is accepted.

    Raises:
        BrokenError: there is more.
    """
    content = bytearray()
    while len(content) <= most_bytes:
        piece = read_piece(most_bytes + 1 - len(content))
        if not piece:
            return bytes(content)
        content += piece
    raise BrokenError(f"is larger than {most_bytes} bytes")


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A descriptor of a directory that is no link; what is done through it stays inside.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    descriptor = os.open(path, _FOLDER_FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_private(seen: os.stat_result, what: str) -> None:
    """Refuses what others than this user and root may have written.

    Raises:
        RefusedError: it belongs to another user, or others may write to it.
    """
    if (reason := why_not_private(seen, what)) is not None:
        raise RefusedError(reason)


def absolute(path: Path) -> Path:
    """The path as it is now, from the root of the file system on."""
    # A later change of the working directory must not move the store.
    try:
        return Path(os.path.abspath(path))
    except OSError:
        return path


def _warn_of_others(folder: int) -> None:
    store = os.stat("..", dir_fd=folder)
    known = store.st_dev, store.st_ino
    if known in _OPEN:
        return
    # A descriptor has a name on Linux alone.
    place = Path(os.path.realpath(f"/proc/self/fd/{folder}"))
    try:
        check_private(store, f"the plan store {clean(place.parent)}")
        check_private(os.fstat(folder), f"a folder of the plan store, {clean(place)}")
    except RefusedError as fault:
        _OPEN.add(known)
        logger.warning("%s: plans there may be taken away; make it private (chmod 700)", fault)


def read_file(path: str | os.PathLike[str], payload_type: type[P]) -> tuple[Key, P]:
    """Reads one plan file from anywhere, under the rules of the store; moves nothing.

    Returns:
        The key it was stored under, and its payload.

    Raises:
        PlanError: it cannot be read, is a link, belongs to another user or is no plan.
    """
    try:
        entry, _ = read(path, payload_type)
    except FileNotFoundError:
        raise PlanError(f"plan file {clean(path)} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        raise PlanError(
            f"plan file {clean(path)} was refused: {why(error)}; pass a regular file of your own"
        ) from None
    except BrokenError as fault:
        raise PlanError(f"plan file {clean(path)} {fault}: tune again, or copy it anew") from None
    return entry.key, entry.payload


def write_whole(path: Path, data: bytes, replace: bool = True, mode: int = 0o600) -> None:
    """Writes a file: who reads meanwhile, or after a crash, sees the old one or the new one.

    Args:
        path: of the file; its folder is made if need be.
        data: what is to be in it.
        replace: whether it takes the place of a file that is there.
        mode: who may read and write it, less what the process's umask takes away.

    Raises:
        FileExistsError: one is there, and is not to be replaced.
        OSError: it cannot be written; the old one is as it was.
    """
    make_private(path.parent)
    temporary = f".{path.stem}.{secrets.token_hex(8)}.tmp"
    with open_folder(path.parent) as folder:
        try:
            _write_new(temporary, data, folder, mode)
            _put_in_place(temporary, path.name, folder, replace)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        # The plan is in place; some file systems refuse this on a directory.
        with suppress(OSError):
            os.fsync(folder)


def check_writable(path: Path) -> None:
    """Writes a small file without a name where `write_whole` would begin; nothing is left of it.

    Raises:
        OSError: `write_whole` could not write there either.
    """
    if os.path.lexists(path.parent):
        with open_folder(path.parent):  # a link is refused
            pass
    there = next(each for each in path.parents if each.exists())
    with tempfile.TemporaryFile(dir=there) as file:
        file.write(bytes(4096))  # a full disk has room for names
        file.flush()


def _put_in_place(temporary: str, name: str, folder: int, replace: bool) -> None:
    if not replace:
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            raise
        except OSError:  # no such links on this file system: the last one wins there
            pass
        else:
            os.unlink(temporary, dir_fd=folder)
            return
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _write_new(name: str, data: bytes, folder: int, mode: int) -> None:
    descriptor = os.open(name, _WRITE_FLAGS, mode, dir_fd=folder)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
