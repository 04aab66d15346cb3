"""Exception hierarchy of the project.

Exceptions are for misuse and faults; each message says what happened, the value seen, and what to
do. Expected outcomes (a transform that does not apply, a candidate that fails verification) are
returned as values with a reason.
"""


class SteadyError(Exception):
    """Base class of the project's errors; `exit_code` is the exit code of the command line."""

    exit_code = 1


class UsageError(SteadyError):
    """The request or its input is wrong: a bad option, an unknown model, inputs that do not fit."""

    exit_code = 2


class MissingWorkloadError(UsageError):
    """The named workload does not exist: its model, file, module or factory is missing."""


class UnsupportedError(SteadyError):
    """The request is valid, but this machine or build cannot do it; the message says why."""

    exit_code = 3


class PlanError(SteadyError):
    """A plan file could not be used: unreadable, of another schema, or for another environment."""

    exit_code = 2


class TraceError(UsageError):
    """A trace could not be read: missing, truncated, malformed, or not from PyTorch's profiler."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def one_line(error: BaseException, most: int = 300) -> str:
    """Formats an exception as one printable line, with its type unless it is a `SteadyError`."""
    lines = str(error).strip().splitlines()
    # Compilers introduce the cause with a colon and name it on the next line.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    first = "".join(c if c.isprintable() else "?" for c in text)[:most]
    return first if isinstance(error, SteadyError) else f"{type(error).__name__}: {first}"
