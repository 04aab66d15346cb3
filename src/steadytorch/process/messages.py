"""Messages between a process and its worker: one request, one reply, in msgpack."""

from __future__ import annotations

from typing import Any

import msgspec


class Request(msgspec.Struct, frozen=True):
    """A request to run one method of the worker's handler."""

    method: str
    arguments: dict[str, Any] = {}


class RemoteException(msgspec.Struct, frozen=True):
    """An exception of the worker as text, because the parent may be unable to import its type.

    Attributes:
        type: class name; empty for an error of this project, whose message is enough.
        message: `str` of the exception.
        traceback: the formatted traceback.
        out_of_memory: whether an allocation failed, on the device or the host.
    """

    type: str
    message: str
    traceback: str = ""
    out_of_memory: bool = False


class Reply(msgspec.Struct, frozen=True):
    """The worker's reply: the method's result (msgpack types only) or its exception."""

    result: Any = None
    raised: RemoteException | None = None


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
