"""Plan files: `{key, payload, schema, sha256}` in canonical JSON, at most `MAX_BYTES`.

Plan files are validated on read and written atomically.
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
"""Version of the file format; the payload has its own type."""
COMPANIONS = (".bundle", ".pt2", ".artefact")
"""Suffixes of files beside a plan with its name, removed with it: see `compiled.bundle` and
`compiled.artefact`."""
MAX_BYTES = 1 << 20

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEAL = b',"sha256":"%s"}'
_SEAL_BYTES = len(_SEAL % (b"0" * 64))

logger = logging.getLogger("steadytorch")

P = TypeVar("P")

# Stores that others may write to, by device and inode; each is warned of once.
_OPEN: set[tuple[int, int]] = set()


class FileContents(msgspec.Struct, Generic[P], forbid_unknown_fields=True):
    """Contents of a plan file, without the digest.

    A payload with a `key` field must hold the same key as the file.
    """

    key: Key
    payload: P
    schema: int

    def __post_init__(self) -> None:
        if getattr(self.payload, "key", self.key) != self.key:
            raise ValueError("the payload names another key than the file does")


class _Head(msgspec.Struct):
    schema: int


class RefusedError(OSError):
    """A file or folder that must not be read or changed, such as one that another user owns."""


class BrokenError(Exception):
    """A plan file with unusable content; `seen` is its `stat` result from the time of reading."""

    seen: os.stat_result | None = None


def clean(text: object) -> str:
    """Makes text safe to show: one line, printable, at most 300 characters."""
    # File contents and names may hold terminal escapes, and may be long.
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown if len(shown) <= 300 else f"{shown[:300]}..."


def why(error: Exception) -> str:
    """The reason for an error, as a clause for messages."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a symbolic link"
    strerror = error.strerror if isinstance(error, OSError) else None
    return clean(strerror or error)


def encoded(key: Key, payload: Any) -> bytes:
    """Encodes a plan file, and decodes it once to check that it reads back unchanged.

    Raises:
        BrokenError: decoding gives another value, as for a number that is not finite.
        TypeError: the payload has no JSON form.
    """
    body = canonical_json({"key": key, "payload": payload, "schema": SCHEMA})
    entry = decoded(_sealed(body), type(payload))
    if entry.key != key or canonical_json(entry.payload) != canonical_json(payload):
        raise BrokenError("it reads back as something else")
    return _sealed(body)


def _sealed(body: bytes) -> bytes:
    # Fields are sorted by name, so the digest is last and covers everything before it.
    return body[:-1] + _SEAL % hashlib.sha256(body).hexdigest().encode()


def decoded(data: bytes, payload_type: type[P]) -> FileContents[P]:
    """Decodes the content of a plan file.

    Raises:
        BrokenError: it was truncated or altered, or does not fit the schema.
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
    raise BrokenError(f"has schema {schema}; this version reads schema {SCHEMA}")


@functools.lru_cache(maxsize=16)
def _decoder(payload_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(FileContents[payload_type])


def read(
    name: str | os.PathLike[str], payload_type: type[P], folder: int | None = None
) -> tuple[FileContents[P], os.stat_result]:
    """Reads a plan file and its `stat` result.

    Users who can write to the store's folders can remove plans or restore old ones. Other users
    cannot add plans, because their files are refused. A store that other users can write to is
    still read, with one warning.

    Args:
        name: the file, relative to `folder` if given.
        payload_type: a msgspec struct.
        folder: descriptor of a folder of the store.

    Raises:
        OSError: it cannot be read, or is a link, not a regular file, or another user's.
        BrokenError: its content is unusable.
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
    """Reads the raw bytes of a file, with the same ownership checks as `opened`.

    Raises:
        OSError: it cannot be read, or is a link, not a regular file, or another user's.
        BrokenError: it is larger than `most_bytes`.
    """
    with opened(name, folder) as (descriptor, _):
        return bounded(functools.partial(os.read, descriptor), most_bytes)


@contextmanager
def opened(
    name: str | os.PathLike[str], folder: int | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """Opens a regular file owned by this user or root; yields its descriptor and `stat` result.

    Args:
        name: the file, relative to `folder` if given.
        folder: descriptor of a folder.

    Raises:
        OSError: it cannot be read, or is a link, not a regular file, or another user's.
    """
    # O_NONBLOCK: opening a FIFO without it would wait for a writer forever.
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
    """Reads a source of bytes to its end, up to a size limit.

    Args:
        read_piece: returns at most the given number of bytes; empty at the end.
        most_bytes: the limit.

    Raises:
        BrokenError: the content exceeds the limit.
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
    """Opens a directory that is not a symbolic link; yields a descriptor for relative operations.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    descriptor = os.open(path, _FOLDER_FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_private(seen: os.stat_result, what: str) -> None:
    """Raises an error if users other than this one and root can write to a file or folder.

    Raises:
        RefusedError: it belongs to another user, or others may write to it.
    """
    if (reason := why_not_private(seen, what)) is not None:
        raise RefusedError(reason)


def absolute(path: Path) -> Path:
    """Makes a path absolute, so that it survives a change of the working directory."""
    try:
        return Path(os.path.abspath(path))
    except OSError:
        return path


def _warn_of_others(folder: int) -> None:
    store = os.stat("..", dir_fd=folder)
    known = store.st_dev, store.st_ino
    if known in _OPEN:
        return
    # Only Linux names descriptors.
    place = Path(os.path.realpath(f"/proc/self/fd/{folder}"))
    try:
        check_private(store, f"the plan store {clean(place.parent)}")
        check_private(os.fstat(folder), f"a folder of the plan store, {clean(place)}")
    except RefusedError as fault:
        _OPEN.add(known)
        logger.warning("%s: they may remove plans; make it private (chmod 700)", fault)


def read_file(path: str | os.PathLike[str], payload_type: type[P]) -> tuple[Key, P]:
    """Reads one plan file from any path, with the store's checks but without quarantine.

    Returns:
        The key and the payload.

    Raises:
        PlanError: it cannot be read, is a link, belongs to another user or is not a plan.
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
        raise PlanError(f"plan file {clean(path)} {fault}: tune again, or copy it again") from None
    return entry.key, entry.payload


def write_whole(
    path: Path, data: bytes | memoryview, replace: bool = True, mode: int = 0o600
) -> None:
    """Writes a file atomically: readers see the old file or the new one, also after a crash.

    Args:
        path: the file; missing folders are created.
        data: its content.
        replace: whether to replace an existing file.
        mode: permissions, before the process's umask.

    Raises:
        FileExistsError: the file exists and `replace` is False.
        OSError: it cannot be written; an existing file is unchanged.
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
        # The file is in place; some file systems do not support fsync on a directory.
        with suppress(OSError):
            os.fsync(folder)


def create(path: Path, data: bytes) -> None:
    """Creates a new file, and fails if the file exists.

    Readers may see the new file before its content is complete.

    Raises:
        FileExistsError: the file exists.
        OSError: it cannot be created, or not written; then it does not exist.
    """
    with open_folder(path.parent) as folder:
        try:
            _write_new(path.name, data, folder, 0o600)
        except FileExistsError:
            raise
        except OSError:
            with suppress(OSError):
                os.unlink(path.name, dir_fd=folder)
            raise


def check_writable(path: Path) -> None:
    """Tests whether `write_whole` could write a file, using an unnamed temporary file.

    Raises:
        OSError: the folder is not writable.
    """
    if os.path.lexists(path.parent):
        with open_folder(path.parent):  # raises if it is a link
            pass
    there = next(each for each in path.parents if each.exists())
    with tempfile.TemporaryFile(dir=there) as file:
        file.write(bytes(4096))  # a full disk may still accept empty files
        file.flush()


def _put_in_place(temporary: str, name: str, folder: int, replace: bool) -> None:
    if not replace:
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this file system: the last writer wins
            pass
        else:
            os.unlink(temporary, dir_fd=folder)
            return
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _write_new(name: str, data: bytes | memoryview, folder: int, mode: int) -> None:
    descriptor = os.open(name, _WRITE_FLAGS, mode, dir_fd=folder)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
