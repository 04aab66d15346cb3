"""The plan store: one self-describing file per plan, written atomically, validated on read.

The digest in a plan file detects corruption, not tampering, because the digest uses no secret.
Ownership protects the store: its directory is private, and files of other users are refused. File
system errors are not raised: a look-up returns a `Miss` with the reason, and a write keeps the plan
in memory only. After a miss, look-ups may try a second, read-only store (`plan.remote`).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from steadytorch.caches import cache_folder, make_private
from steadytorch.errors import PlanError
from steadytorch.plan.files import (
    COMPANIONS,
    MAX_BYTES,
    BrokenError,
    absolute,
    check_writable,
    clean,
    decoded,
    encoded,
    open_folder,
    read,
    why,
    write_whole,
)
from steadytorch.plan.fingerprint import (
    Difference,
    Key,
    differing_fields,
    format_differences,
    format_nearest,
    nearest,
)
from steadytorch.plan.remote import RemoteStore

SECOND_STORE = "STEADYTORCH_SECOND_STORE"
"""Environment variable with the URL of a second, read-only store; unset by default."""
QUARANTINE = "quarantine"
"""Folder of the store for unusable files; never read from."""

# Limit on files scanned for the nearest key, to bound the time of a miss.
_SCAN_LIMIT = 1000
_ENVIRONMENT_FOLDER = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)

P = TypeVar("P")


@dataclass(frozen=True)
class Found(Generic[P]):
    """A stored payload; `path` is None if the payload is in memory only."""

    payload: P
    path: Path | None


@dataclass(frozen=True)
class Miss:
    """The result of a look-up that found no payload.

    Attributes:
        reason: one line for messages.
        differing: fields in which the nearest stored key differs; `old` is the stored value.
    """

    reason: str
    differing: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        near = format_nearest(self.differing)
        return f"{self.reason}; {clean(near)}" if near else self.reason


class Stored(NamedTuple):
    """A plan file of the store: its key and payload, or the reason why it is unusable."""

    path: Path
    key: Key | None
    payload: Any
    problem: str | None = None


class Store:
    """The plan store of this user on this machine, indexed by key.

    Args:
        root: the directory, created private to the user at the first write. The default is
            `$XDG_CACHE_HOME/steadytorch/plans`, else `~/.cache/steadytorch/plans`.
        second: URL of a read-only store for misses; its hits are copied here. The default is the
            environment variable `SECOND_STORE`; "" for no second store.

    Attributes:
        root: the directory; None without a home directory.
        trouble: why plans are kept in memory only; empty if they are written to disk.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, second: str | None = None
    ) -> None:
        self.root = cache_folder("plans") if root is None else absolute(Path(root))
        url = os.environ.get(SECOND_STORE, "") if second is None else second
        self._second = RemoteStore(url) if url else None
        self._in_memory: dict[str, bytes] = {}
        self._scanned: tuple[Any, list[Key]] = (None, [])
        self.trouble = "" if self.root else "there is no home directory"
        self._warned = False

    def get(self, key: Key, payload_type: type[P], explained: bool = True) -> Found[P] | Miss:
        """Looks up a payload. An unusable plan file counts as a miss and is moved to quarantine.

        Args:
            key: the key, which must match in every field.
            payload_type: a msgspec struct; content that does not fit it is unusable.
            explained: whether a miss gives the nearest stored key; see `nearest`. If False, the
                reason is empty.
        """
        found = self._get(key, payload_type, explained or self._second is not None)
        if isinstance(found, Found) or self._second is None:
            return found
        try:
            payload = self._second.get(key, payload_type)
        except BrokenError as fault:
            return Miss(f"{found.reason}; {self._second.name} {fault}", found.differing)
        return Found(payload, self.put(key, payload))

    def _get(self, key: Key, payload_type: type[P], explained: bool) -> Found[P] | Miss:
        held = self._in_memory.get(key.digest) if self._in_memory else None
        if held is not None:
            try:
                return Found(decoded(held, payload_type).payload, None)
            except BrokenError as fault:
                return Miss(f"the plan kept in memory {fault}")
        path = self._path_of(key)
        if path is None:
            return Miss(f"no plan is in memory, and the store is unavailable: {self.trouble}")
        try:
            with open_folder(path.parent) as folder:
                return self._get_from(folder, path, key, payload_type)
        except FileNotFoundError:
            return self.nearest(key) if explained else Miss("")
        except (OSError, ValueError) as error:
            return Miss(f"plan file {clean(path)} was refused: {why(error)}")

    def put(self, key: Key, payload: Any) -> Path | None:
        """Stores a payload (a msgspec struct), replacing any payload under the same key.

        Returns:
            The path, or None if it cannot be written. Then this process keeps it in memory, and one
            warning is logged.
        """
        return self._write(key, payload, replace=True)

    def check(self, key: Key) -> None:
        """Warns once if the store is not writable.

        Call `check` before a long search. After a warning, `put` still tries to write.

        Args:
            key: the key to be stored.
        """
        path, trouble = self._path_of(key), self.trouble
        if path is not None and not trouble:
            try:
                check_writable(path)
            except (OSError, ValueError) as error:
                trouble = self._cannot_be_written(error)
        self._warn(trouble)

    def add(self, key: Key, payload: P) -> Found[P]:
        """Stores a payload unless the key has one, so that concurrent searches share one plan.

        Returns:
            The payload now stored, in memory only if it cannot be written.
        """
        try:
            path = self._write(key, payload, replace=False)
        except FileExistsError:
            there = self._get(key, type(payload), explained=False)
            return there if isinstance(there, Found) else Found(payload, self.put(key, payload))
        return Found(payload, path)

    def _write(self, key: Key, payload: Any, replace: bool) -> Path | None:
        try:
            data = encoded(key, payload)
        except (BrokenError, TypeError, ValueError, RecursionError) as error:
            logger.warning("a plan was not stored: it has no JSON form: %s", clean(error))
            return None
        path = self._path_of(key)
        if len(data) > MAX_BYTES:
            logger.warning("a plan of %d bytes is kept in memory only: too large", len(data))
        elif path is not None and not self.trouble:
            try:
                write_whole(path, data, replace)
                self._in_memory.pop(key.digest, None)
                return path
            except (OSError, ValueError) as error:
                if isinstance(error, FileExistsError) and not replace:
                    raise
                self.trouble = self._cannot_be_written(error)
        self._in_memory[key.digest] = data
        self._warn(self.trouble)
        return None

    def _cannot_be_written(self, error: Exception) -> str:
        return f"{clean(self.root)} cannot be written: {why(error)}"

    def _warn(self, trouble: str) -> None:
        if trouble and not self._warned:
            self._warned = True
            logger.warning("plans are kept in memory only: %s", trouble)

    def entries(self, payload_type: Any = msgspec.Raw) -> Iterator[Stored]:
        """Yields all plan files sorted by name, including unusable ones; moves no files.

        Args:
            payload_type: the type of payloads; by default they stay JSON bytes.
        """
        if self.root is None:
            return
        try:
            folders = sorted(name for name in os.listdir(self.root) if _is_environment(name))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            yield Stored(self.root, None, None, f"cannot be listed: {why(error)}")
            return
        for parent in (self.root / name for name in folders):
            try:
                paths = _files_in(parent)
            except OSError as error:
                yield Stored(parent, None, None, f"cannot be listed: {why(error)}")
                continue
            yield from (_listed(path, payload_type) for path in paths)

    def find(self, plan_id: str, payload_type: Any = msgspec.Raw) -> Stored:
        """Finds the one plan file whose digest starts with `plan_id`, usable or not.

        Raises:
            PlanError: no file or several files match.
        """
        entries = self.entries(payload_type)
        found = [e for e in entries if plan_id and e.path.stem.startswith(plan_id.lower())]
        if len(found) != 1:
            known = f"{len(found)} plans" if found else "no plan"
            raise PlanError(
                f"{known} with id {plan_id!r} in {clean(self.root)}: see steady plans list"
            )
        return found[0]

    def quarantined(self) -> list[Path]:
        """The unusable plan files in quarantine."""
        try:
            return [] if self.root is None else _files_in(self.root / QUARANTINE)
        except (OSError, ValueError):
            return []

    def remove(self, path: str | os.PathLike[str]) -> str | None:
        """Deletes a plan file, usable or not, and its companion files.

        Returns:
            None if it was deleted, else the reason in one line.
        """
        path = absolute(Path(path))
        inside = _is_environment(path.parent.name) or path.parent.name == QUARANTINE
        if not inside or path.suffix != ".json" or path.parent.parent != self.root:
            return f"{clean(path)} is not in the store {clean(self.root)}: see steady plans list"
        try:
            with open_folder(path.parent) as folder:
                _drop_companions(path.stem, folder)
                os.unlink(path.name, dir_fd=folder)
        except (OSError, ValueError) as error:
            return f"{clean(path)} was not removed: {why(error)}"
        return None

    def _path_of(self, key: Key) -> Path | None:
        if self.root is None:
            return None
        return self.root / key.environment_digest / f"{key.digest}.json"

    def _get_from(
        self, folder: int, path: Path, key: Key, payload_type: type[P]
    ) -> Found[P] | Miss:
        try:
            entry, seen = read(path.name, payload_type, folder)
            others = tuple(differing_fields(entry.key, key))
            if not others:
                return Found(entry.payload, path)
            reason = f"holds another key: {clean(format_differences(others))}"
        except BrokenError as fault:
            reason, seen = str(fault), fault.seen
        fate = self._quarantine(folder, path, seen)
        return Miss(f"plan file {clean(path)} {reason}; {fate}")

    def _quarantine(self, folder: int, path: Path, seen: os.stat_result | None) -> str:
        """Moves a file to quarantine; returns a clause on what happened to the file."""
        assert self.root is not None
        target = self.root / QUARANTINE / f"{path.parent.name}.{path.name}"
        try:
            make_private(target.parent)
            now = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if seen is None or _identity(now) != _identity(seen):
                return "it has been replaced since"
            with open_folder(target.parent) as aside:
                os.rename(path.name, target.name, src_dir_fd=folder, dst_dir_fd=aside)
            _drop_companions(path.stem, folder)
        except FileNotFoundError:
            return "it has been removed since"
        except OSError as error:
            return f"it could not be moved: {why(error)}"
        return f"moved to {target}"

    def has_any(self, workload: str) -> bool:
        """Whether the store may hold a plan for a workload, with any inputs and settings.

        Args:
            workload: the `workload_fingerprint`.
        """
        if self._second is not None or self._in_memory:
            return True
        keys = self._keys()
        return len(keys) >= _SCAN_LIMIT or any(key.workload == workload for key in keys)

    def _keys(self) -> list[Key]:
        """Keys of usable plans in the first `_SCAN_LIMIT` files; cached until a folder changes."""
        state = self._state()
        if state is None or self._scanned[0] != state:
            entries = islice(self.entries(), _SCAN_LIMIT)
            self._scanned = state, [entry.key for entry in entries if entry.key]
        return self._scanned[1]

    def _state(self) -> list[tuple[str, int]] | None:
        """The store's folders with their modification times; None if unreadable."""
        try:
            with os.scandir(self.root or os.devnull) as found:
                folders = [f for f in found if _is_environment(f.name)]
                return sorted((f.name, f.stat().st_mtime_ns) for f in folders)
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            return None

    def nearest(self, key: Key) -> Miss:
        """Returns a `Miss` that names the fields in which the nearest stored key differs."""
        differing = nearest(self._keys(), key)
        if not differing:
            return Miss("no plan is stored for this workload")
        return Miss("no plan is stored for this key", differing)


def _is_environment(name: str) -> bool:
    return _ENVIRONMENT_FOLDER.fullmatch(name) is not None


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _drop_companions(stem: str, folder: int) -> None:
    """Removes a plan's companion files (see `COMPANIONS`) from an open folder, if present."""
    for suffix in COMPANIONS:
        with suppress(OSError):
            os.unlink(stem + suffix, dir_fd=folder)


def _files_in(folder: Path) -> list[Path]:
    with open_folder(folder) as descriptor:
        names = sorted(name for name in os.listdir(descriptor) if name.endswith(".json"))
    return [folder / name for name in names]


def _listed(path: Path, payload_type: Any) -> Stored:
    try:
        with open_folder(path.parent) as folder:
            entry, _ = read(path.name, payload_type, folder)
    except BrokenError as fault:
        return Stored(path, None, None, str(fault))
    except (OSError, ValueError) as error:
        return Stored(path, None, None, f"was refused: {why(error)}")
    if (path.parent.name, path.stem) != (entry.key.environment_digest, entry.key.digest):
        return Stored(path, None, None, "holds a key that differs from its file name")
    return Stored(path, entry.key, entry.payload)
