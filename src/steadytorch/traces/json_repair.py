"""Repair known faults of trace writers without moving bytes, so that positions stay valid."""

from __future__ import annotations

import re

_CONTROLS = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
_ESCAPE = re.compile(
    rb'\\["\\/bfnrt]|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}'
    rb"|(?P<lone>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\u[\da-fA-F]{4}|(?P<bad>\\)"
)
_BARE = re.compile(rb'(?<!\\)(":\s*)([-+]?(?:nan|inf(?:inity)?)|N/A)(?=\s*[,}])', re.IGNORECASE)


def mend(text: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Repair faults that trace writers are known for; return the text and the repairs.

    Control characters within names become spaces, invalid UTF-8 becomes question marks, single
    backslashes (Windows paths) become slashes, and bare `NaN`, `inf` and `N/A` become empty texts.
    Unescaped quotes within names cannot be repaired: the end of the name is unknown.
    """
    done: list[str] = []
    for what, change in _CHANGES.items():
        changed = change(text)
        if changed != text:
            done.append(what)
            text = changed
    return text, tuple(done)


def _blank_controls(text: bytes) -> bytes:
    # Between values, JSON treats line feeds and spaces alike.
    return text.translate(_CONTROLS)


def _replace_bytes(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("utf-8", "surrogateescape").encode("utf-8", "replace")
    return text


def _replace_escapes(text: bytes) -> bytes:
    mended = bytearray(text)
    for match in _ESCAPE.finditer(text):
        if match["lone"]:
            mended[match.start() : match.end()] = rb"\ufffd"
        elif match["bad"]:
            mended[match.start()] = ord("/")
    return bytes(mended)


def _empty_values(text: bytes) -> bytes:
    return _BARE.sub(lambda match: match[1] + b'""'.ljust(len(match[2])), text)


_CHANGES = {
    "control characters": _blank_controls,
    "invalid UTF-8": _replace_bytes,
    "backslashes": _replace_escapes,
    "NaN, inf or N/A values": _empty_values,
}
