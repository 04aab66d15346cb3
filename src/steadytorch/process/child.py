"""The worker process: loads the handler, then answers requests until the parent exits.

Started as `python -P -m steadytorch.process.child FD MODULE:CLASS DIRECTORY [MODULE ...]`. The
worker never imports the parent's main module, so scripts without a main guard, notebooks and
`python -c` work.
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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from steadytorch.errors import SteadyError
from steadytorch.process.messages import RemoteException, Reply, Request, decode_request, encode

_PR_SET_PDEATHSIG = 1


def serve(arguments: Sequence[str]) -> None:
    """Serve the parent's requests until a `close` request or the end of the stream.

    Args:
        arguments: the inherited file descriptor, the handler class, its directory, and modules to
            import before the first request.
    """
    _be_killed_first()
    faulthandler.enable(all_threads=False)  # `Worker` reads the crash location from the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, handler_path, directory, *imports = arguments
    connection = Connection(int(descriptor))
    os.set_inheritable(int(descriptor), False)
    module, _, name = handler_path.partition(":")
    handler = failure = None
    try:
        importlib.import_module(module)  # before the first request, because it takes seconds
    except BaseException as error:
        failure = error  # reported by the first request
    for each in imports:
        with contextlib.suppress(BaseException):  # the code that needs it reports the error
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
        except BaseException as error:  # report every error to the parent
            reply = Reply(raised=describe(error))
        try:
            connection.send_bytes(encode(reply))
        except ConnectionError:
            break
    _leave(handler)


def _answer(handler: object, request: Request) -> Reply:
    return Reply(result=getattr(handler, request.method)(**request.arguments))


def _leave(handler: object) -> None:
    """Close the handler and exit at once: tearing down compilers and CUDA contexts is slow."""
    with contextlib.suppress(BaseException):
        close = getattr(handler, "close", None)
        if close is not None:
            close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends for any reason."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_killed_first() -> None:
    """Make this worker the OOM killer's first choice."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def describe(error: BaseException) -> RemoteException:
    """Convert an exception to a `RemoteException`.

    Out-of-memory errors are also recognised by their text, because compilers wrap them.
    """
    text = str(error).strip()
    lowered = text.lower()
    out_of_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in lowered
        or "can't allocate memory" in lowered
        or "cannot allocate memory" in lowered
    )
    return RemoteException(
        "" if isinstance(error, SteadyError) else type(error).__name__,
        text[:4000],
        "".join(traceback.format_exception(error))[-8000:],
        out_of_memory,
    )


if __name__ == "__main__":
    die_with_parent()
    serve(sys.argv[1:])
