"""The one exception tree of the project.

Expected outcomes (a transform that does not apply, a candidate that fails verification) are values
with a reason, not exceptions. Exceptions are for misuse and for faults; each message says what
happened, the value seen, and what to do.
"""


class SteadyError(Exception):
    """Base of every error raised on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(SteadyError):
    """The request or its input is wrong: bad option, unknown model, inputs that do not fit."""

    exit_code = 2


class UnsupportedError(SteadyError):
    """The request is sound, but this machine or build cannot do it; the message says why."""

    exit_code = 3


class PlanError(SteadyError):
    """A plan file could not be used: unreadable, of another schema, or for another environment."""

    exit_code = 2


class TraceError(UsageError):
    """A trace could not be read: missing, cut short, malformed, or no trace of PyTorch's profiler.

    `offset` is the byte at which it breaks, counted in the JSON text (after decompression); None
    where no single byte is to blame.
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what an exception says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception as one printable line, with its type unless it is one of this project."""
    lines = str(error).strip().splitlines()
    # Compilers announce the cause in one line and name it in the next.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    first = "".join(c if c.isprintable() else "?" for c in text)[:most]
    return first if isinstance(error, SteadyError) else f"{type(error).__name__}: {first}"
