"""A saved result as one HTML page that needs nothing else: no network, no file beside it."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytorch.errors import UsageError, one_line
from steadytorch.report.text import plain

if TYPE_CHECKING:
    import jinja2

_ABSENT = "-"
_LONGEST = 100_000
"""Characters of one text: the longest list of layers that a network has is shorter."""


def report(result: str | Path, output: str | Path | None = None) -> Path:
    """Writes a saved result as an HTML page to read, to print and to pass on.

    The page holds all that it needs, fetches nothing and makes sense without JavaScript. Its
    figures are those of the file.

    Args:
        result: what `--json` of measure, explain, tune, compare, conv or doctor wrote; at most
            256 MiB.
        output: the page; None for the result's name with the ending `.html`, beside it. What is
            there already is replaced.

    Returns:
        Where the page is.

    Raises:
        UsageError: the result cannot be read or is none, or the page cannot be written.
    """
    from steadytorch.results.saved import content_of

    source = Path(result)
    content = content_of(source)
    target = source.with_suffix(".html") if output is None else Path(output)
    _check(source, target)
    _write(target, page(source, content))
    return target


def page(source: Path, content: bytes) -> str:
    """The page of a result.

    Args:
        source: the file that it came from, for messages.
        content: of that file.

    Raises:
        UsageError: it is no result, or holds what no result can.
    """
    import numpy as np

    from steadytorch.report import pages
    from steadytorch.report.plots import shortened
    from steadytorch.results.saved import FORMS, _decoded, decode, kind_of

    kind = kind_of(source, content)
    found = pages.KINDS.get(kind)
    if found is None:
        known = ", ".join(pages.KINDS)
        raise UsageError(
            f"{plain(source)} holds a {shortened(kind, 40)!r} result, and pages are made of {known}"
        )
    if kind in FORMS:
        saved = decode(source, content, kind)
        head, document, given = saved.head, saved.result, saved
    else:
        head = document = given = _decoded(source, content, found.document)
    try:
        with np.errstate(all="raise"):
            return _rendered(kind, head, document, found.contents(given))
    # Well-formed fields may still contradict each other: a median of zero, indices beyond the end.
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        raise UsageError(
            f"{plain(source)} holds figures that cannot be shown: {one_line(error)}"
        ) from error


def _rendered(kind: str, head: Any, document: Any, contents: dict[str, Any]) -> str:
    from plotly.offline import get_plotlyjs

    from steadytorch.report.doctor import machine, software
    from steadytorch.report.plots import Plot

    pictured = any(isinstance(each, Plot) for each in contents.values())
    scripts = (get_plotlyjs(), _source("draw.js")) if pictured else ()
    template = _templates().get_template(f"{kind}.html")
    return template.render(
        kind=kind,
        document=document,
        created=head.created,
        machine=machine(head.environment),
        software=software(head.environment),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        style=_source("page.css"),
        **contents,
    )


@cache
def _templates() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    from steadytorch.report.plots import embedded

    def shown(value: Any) -> Any:
        """What any expression of a template becomes, before it is escaped."""
        if isinstance(value, Markup):
            return value
        text = _ABSENT if value is None else str(value)
        if len(text) <= _LONGEST:
            return plain(text)
        return f"{plain(text[:_LONGEST])}… ({len(text):,} characters)"

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("steadytorch.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["embedded"] = lambda figure: Markup(embedded(figure))
    # Only this project's own scripts and style may pass unescaped.
    made.filters["ours"] = Markup
    return made


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")


@cache
def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _check(source: Path, target: Path) -> None:
    """Refuses a target that cannot be written before the work is done."""
    name = plain(target)
    try:
        if target.exists() and target.samefile(source):
            raise UsageError(f"{name} is the result itself: name another file for the page")
        # Renaming onto a device would replace it.
        if target.exists() and not target.is_file():
            raise UsageError(f"{name} is no regular file: name another one for the page")
        if not target.parent.is_dir():
            raise UsageError(f"{name} cannot be written: there is no folder {plain(target.parent)}")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise UsageError(f"{name} cannot be written: no permission")
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{name} cannot be written: {error}") from error


def _write(target: Path, text: str) -> None:
    from steadytorch.plan.files import write_whole

    try:
        # A link stays one: the file that it leads to is replaced, for the same readers.
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
        write_whole(target.resolve(), text.encode(), mode=mode)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{plain(target)} cannot be written: {why}") from error
