"""Results that show themselves in a notebook.

This package must not import the renderer, so `steadytorch/__init__.py` passes it to `show_with`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_renderer: Callable[[Any], str] | None = None


def show_with(renderer: Callable[[Any], str]) -> None:
    """Set the function that makes HTML of a result.

    Args:
        renderer: from a result to a fragment of HTML.
    """
    global _renderer
    _renderer = renderer


class Shown:
    """A result with rich display in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """The result as a fragment of HTML; None, for plain text, without a renderer."""
        return None if _renderer is None else _renderer(self)
