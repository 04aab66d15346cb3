"""A second, read-only plan store behind the local one, at any location that fsspec opens.

Ownership cannot protect it: anyone who can write there chooses plans for all readers. Those plans
must still fit their key and use transforms from the closed list. Size limit, digest, schema and key
are checked as for local files. Nothing is written, moved or removed there.
"""

from __future__ import annotations

import re
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from steadytorch.plan.files import MAX_BYTES, BrokenError, bounded, clean, decoded, why
from steadytorch.plan.fingerprint import Key, differing_fields, format_differences

TIMEOUT_S = 10.0
"""Timeout of a look-up. After a timeout, this object does not ask the store again."""
# Secrets in a URL: user and password, or a signature.
_SECRET = re.compile(r"(?<=//)[^/@\s]*@|\?\S*")

P = TypeVar("P")


class RemoteStore:
    """A read-only plan store, with the layout of a local one.

    Args:
        url: an fsspec URL, such as `s3://bucket/plans`, `https://...`, or a plain path. Packages
            that fsspec needs for the protocol must be installed.
        timeout_s: timeout of a look-up in seconds.

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

    def _fetched(self, name: str) -> bytes:
        """Reads a file within the timeout; raises `BrokenError` with the reason otherwise."""
        if self._given_up is not None:
            raise BrokenError(self._given_up)
        answers: SimpleQueue[bytes | BaseException] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(_content(self._url, name))
            except BaseException as error:  # a plug-in of fsspec may raise anything
                answers.put(error)

        try:
            # A daemon, since a thread hanging in a system call must not block the exit.
            Thread(target=ask, name="steadytorch-second-store", daemon=True).start()
            answer = answers.get(timeout=self._timeout_s)
        except RuntimeError as error:  # the system has no more threads
            raise BrokenError(_reason(error)) from None
        except Empty:
            self._given_up = f"did not answer within {self._timeout_s:g} s and is not asked again"
            raise BrokenError(self._given_up) from None
        if isinstance(answer, bytes):
            return answer
        raise answer if isinstance(answer, BrokenError) else BrokenError(_reason(answer))


def _content(url: str, name: str) -> bytes:
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    with files.open(f"{root.rstrip('/')}/{name}", "rb") as file:
        return bounded(file.read, MAX_BYTES)


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "has no plan for this key"
    said: Any = why(error) if isinstance(error, Exception) else error
    return f"cannot be read: {_without_secrets(f'{type(error).__name__}: {said}')}"


def _without_secrets(text: object) -> str:
    return clean(_SECRET.sub("", str(text)))
