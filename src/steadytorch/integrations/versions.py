"""Supported versions of the packages that integrations connect to."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from steadytorch.errors import UnsupportedError

SUPPORTED = {"lightning": ((2, 2), 3), "transformers": ((5, 0), 6)}
"""Package to its first supported version, and the first major version that is not."""


def check(package: str) -> None:
    """Check the installed version of a package, before anything is imported from it.

    Args:
        package: a name of `SUPPORTED`.

    Raises:
        UnsupportedError: the package is missing, or its version is not supported.
    """
    least, below = SUPPORTED[package]
    supported = f"{least[0]}.{least[1]} or later, below {below}"
    command = f"pip install '{package}>={least[0]}.{least[1]},<{below}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UnsupportedError(f"{package} is not installed: {command}") from None
    numbers = re.match(r"(\d+)(?:\.(\d+))?", found or "")
    here = (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)
    if not least <= here < (below, 0):
        raise UnsupportedError(f"{package} {found} is not supported, needs {supported}: {command}")
