"""A second plan store behind the local one: only read, anywhere that fsspec can open.

Ownership cannot guard it: whoever can write there chooses for all who read it, though only among
plans that fit their key, with transforms from the closed list. Size cap, digest, strict schema and
key are checked as for a file of our own. Nothing is written, moved or removed there.
"""

from __future__ import annotations

import re
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from steadytorch.plan.files import MAX_BYTES, BrokenError, bounded, clean, decoded, why
from steadytorch.plan.fingerprint import Key, differing_fields, told

TIMEOUT_S = 10.0
"""How long one look may take; a store that exceeds it is not asked again by this object."""
# What a URL may hold besides a place: a user with a password, or a signature.
_SECRET = re.compile(r"(?<=//)[^/@\s]*@|\?\S*")

P = TypeVar("P")


class RemoteStore:
    """Plans that others keep, in the folders and files that a local store has.

    Args:
        url: the folder, as fsspec names it: `s3://bucket/plans`, `https://...`, or a plain path.
            What its protocol needs beside fsspec must be installed.
        timeout_s: seconds that one look may take.

    Attributes:
        name: the URL without what may be secret in it.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.name = _without_secrets(url)
        self._url, self._timeout_s = url, timeout_s
        self._given_up: str | None = None

    def get(self, key: Key, payload_type: type[P]) -> P:
        """The payload that is kept there under a key.

        Raises:
            BrokenError: there is none, or none that can be used; the text says why.
        """
        content = self._fetched(f"{key.environment_digest}/{key.digest}.json")
        entry = decoded(content, payload_type)
        if differing := differing_fields(entry.key, key):
            raise BrokenError(f"holds another key: {clean(told(differing))}")
        return entry.payload

    def _fetched(self, name: str) -> bytes:
        """The content of a file, or the reason why not, within the time allowed."""
        if self._given_up is not None:
            raise BrokenError(self._given_up)
        answers: SimpleQueue[bytes | BaseException] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(_content(self._url, name))
            except BaseException as error:  # a plug-in of fsspec may raise anything
                answers.put(error)

        try:
            # A daemon: one that hangs in a system call must not keep the process from ending.
            Thread(target=ask, name="steadytorch-second-store", daemon=True).start()
            answer = answers.get(timeout=self._timeout_s)
        except RuntimeError as error:  # the system has no more threads
            raise BrokenError(_reason(error)) from None
        except Empty:
            self._given_up = f"did not answer within {self._timeout_s:g} s, and is left alone"
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
