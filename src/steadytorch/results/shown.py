"""Rich display of results in notebooks.

This package must not import the renderer, so `steadytorch/__init__.py` registers the renderer with
`show_with`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_renderer: Callable[[Any], str] | None = None


def show_with(renderer: Callable[[Any], str]) -> None:
    """Set the function that renders a result as HTML.

    Args:
        renderer: from a result to a fragment of HTML.
    """
    global _renderer
    _renderer = renderer


class Shown:
    """Base class of results with rich display in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """The result as an HTML fragment; None if no renderer is set, for display as plain text."""
        return None if _renderer is None else _renderer(self)
