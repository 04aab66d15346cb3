"""The worker's side: connect, name the handler, answer requests until the parent is gone.

Started as `python -P -m steadytorch.process.child FD MODULE:CLASS DIRECTORY [MODULE ...]`. It never
imports the parent's main module, so a script without a main guard, a notebook and `python -c` work
alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from steadytorch.errors import SteadyError
from steadytorch.process.messages import Raised, Reply, Request, decode_request, encode

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serves requests on the inherited file descriptor until `close` or the end of the stream."""
    _die_with_parent()
    faulthandler.enable(all_threads=False)  # what crashes says where, see `Worker`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, handler_path, directory, *imports = arguments
    connection = Connection(int(descriptor))
    os.set_inheritable(int(descriptor), False)
    module, _, name = handler_path.partition(":")
    handler = failure = None
    try:
        importlib.import_module(module)  # before it is asked for anything: that takes seconds
    except BaseException as error:
        failure = error  # the answer to the first request
    for each in imports:
        with contextlib.suppress(BaseException):  # what needs it will say what is wrong with it
            importlib.import_module(each)
    while True:
        try:
            request = decode_request(connection.recv_bytes())
        except (EOFError, ConnectionError):
            break
        if request.method == "close":
            break
        try:
            if failure is not None:
                raise failure
            if handler is None:
                handler = getattr(sys.modules[module], name)(Path(directory))
            reply = _answer(handler, request)
        except BaseException as error:  # the whole point: no fault leaves the worker unreported
            reply = Reply(raised=describe(error))
        try:
            connection.send_bytes(encode(reply))
        except ConnectionError:
            break
    _leave(handler)


def _answer(handler: object, request: Request) -> Reply:
    return Reply(result=getattr(handler, request.method)(**request.arguments))


def _leave(handler: object) -> None:
    """Ends at once: interpreters that hold compilers and CUDA contexts are slow to tear down."""
    with contextlib.suppress(BaseException):
        close = getattr(handler, "close", None)
        if close is not None:
            close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # be the one taken when memory runs out


def describe(error: BaseException) -> Raised:
    """An exception as a message; compilers wrap the cause, so the innermost cause decides."""
    text = str(error).strip()
    lowered = text.lower()
    out_of_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in lowered
        or "can't allocate memory" in lowered
        or "cannot allocate memory" in lowered
    )
    return Raised(
        "" if isinstance(error, SteadyError) else type(error).__name__,
        text[:4000],
        "".join(traceback.format_exception(error))[-8000:],
        out_of_memory,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
