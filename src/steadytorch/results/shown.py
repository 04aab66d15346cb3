"""Display of results: as text by `print`, as HTML in notebooks.

This package must not import the renderers, so `steadytorch/__init__.py` registers them with
`show_with`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class _Renderers(NamedTuple):
    as_text: Callable[[Any], str] = repr
    as_html: Callable[[Any], str | None] = lambda _: None


_renderers = _Renderers()


def show_with(as_text: Callable[[Any], str], as_html: Callable[[Any], str]) -> None:
    """Set the functions that render a result.

    Args:
        as_text: from a result to lines of text.
        as_html: from a result to a fragment of HTML.
    """
    global _renderers
    _renderers = _Renderers(as_text, as_html)


class Shown:
    """Base class of results that are shown as on the terminal, by `print` and in notebooks."""

    __slots__ = ()

    def __str__(self) -> str:
        """The result as the command line shows it; `repr` without renderers."""
        return _renderers.as_text(self)

    def _repr_html_(self) -> str | None:
        """The result as an HTML fragment; None without renderers, for display as plain text."""
        return _renderers.as_html(self)
