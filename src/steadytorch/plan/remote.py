"""A remote plan store behind the local one, at any location that fsspec can open.

File ownership cannot protect a remote store: anyone who can write to it chooses plans for all
readers. Remote plans must still match their key and use transforms from the closed list. The size
limit, digest, schema and key of a remote plan are checked as for local files. Look-ups never modify
the remote store. `push` never replaces a stored plan, so the plan under a key never changes for
readers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import msgspec

from steadytorch.plan.files import MAX_BYTES, BrokenError, bounded, clean, decoded, why
from steadytorch.plan.fingerprint import Key, differing_fields, format_differences

TIMEOUT_S = 10.0
"""Timeout of a look-up. After a timeout, this object does not ask the store again."""
WRITING_S = 1.0
"""Seconds for another writer to finish an entry: file systems show it before it has its content."""
# Secrets in a URL: user and password, or a signature.
_SECRET = re.compile(r"(?<=//)[^/@\s]*@|\?\S*")

P = TypeVar("P")
T = TypeVar("T")


class RemoteStore:
    """A remote plan store with the same layout as a local store.

    Args:
        url: an fsspec URL, such as `s3://bucket/plans`, `https://...`, or a plain path. Packages
            that fsspec needs for the protocol must be installed.
        timeout_s: timeout of a look-up or a write in seconds.

    Attributes:
        name: the URL without secrets.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.name = _without_secrets(url)
        self._url, self._timeout_s = url, timeout_s
        self._given_up: str | None = None

    def get(self, key: Key, payload_type: type[P]) -> P:
        """Returns the payload stored under a key.

        Raises:
            BrokenError: there is no usable payload; the text gives the reason.
        """
        content = self._fetched(f"{key.environment_digest}/{key.digest}.json")
        entry = decoded(content, payload_type)
        if differing := differing_fields(entry.key, key):
            raise BrokenError(f"holds another key: {clean(format_differences(differing))}")
        return entry.payload

    def push(self, key: Key, data: bytes) -> bool:
        """Adds a plan to the store, unless the store has a usable plan under the same key.

        Args:
            key: the key of the entry.
            data: its bytes, as `files.encoded` makes them.

        Returns:
            Whether the entry was written.

        Raises:
            BrokenError: it cannot be written; the text gives the reason.
        """
        name = f"{key.environment_digest}/{key.digest}.json"

        def write() -> bool:
            return _write(self._url, name, data)

        if self._within_timeout(write, "written"):
            return True
        end = time.monotonic() + WRITING_S
        while True:
            there = self._fetched(name)
            try:
                decoded(there, msgspec.Raw)
                return False
            except BrokenError as fault:
                if time.monotonic() > end:
                    raise BrokenError(f"has an entry that {fault}: remove {name} there") from None
            time.sleep(WRITING_S / 20)

    def _fetched(self, name: str) -> bytes:
        """Reads a remote file within the timeout, or raises `BrokenError` with the reason."""
        return self._within_timeout(lambda: _content(self._url, name))

    def _within_timeout(self, work: Callable[[], T], verb: str = "read") -> T:
        if self._given_up is not None:
            raise BrokenError(self._given_up)
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put((work(), None))
            except BaseException as error:  # a plug-in of fsspec may raise anything
                answers.put((None, error))

        try:
            # A daemon, since a thread hanging in a system call must not block the exit.
            Thread(target=ask, name="steadytorch-second-store", daemon=True).start()
            answer, failure = answers.get(timeout=self._timeout_s)
        except RuntimeError as error:  # the system has no more threads
            raise BrokenError(_reason(error, verb)) from None
        except Empty:
            self._given_up = f"did not answer within {self._timeout_s:g} s and is not asked again"
            raise BrokenError(self._given_up) from None
        if failure is None:
            return answer
        raise failure if isinstance(failure, BrokenError) else BrokenError(_reason(failure, verb))


def _content(url: str, name: str) -> bytes:
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    with files.open(f"{root.rstrip('/')}/{name}", "rb") as file:
        return bounded(file.read, MAX_BYTES)


def _write(url: str, name: str, data: bytes) -> bool:
    """Creates a remote file; returns False if it already exists."""
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    path = f"{root.rstrip('/')}/{name}"
    if files.exists(path):
        return False
    files.makedirs(path.rpartition("/")[0], exist_ok=True)
    try:
        with files.open(path, "xb") as file:
            file.write(data)
    except FileExistsError:  # another writer was faster
        return False
    return True


def _reason(error: BaseException, verb: str) -> str:
    if isinstance(error, FileNotFoundError) and verb == "read":
        return "has no plan for this key"
    said: Any = why(error) if isinstance(error, Exception) else error
    return f"cannot be {verb}: {_without_secrets(f'{type(error).__name__}: {said}')}"


def _without_secrets(text: object) -> str:
    return clean(_SECRET.sub("", str(text)))
