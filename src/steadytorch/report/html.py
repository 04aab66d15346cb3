"""A saved result as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytorch.errors import UsageError, one_line
from steadytorch.report.text import plain

if TYPE_CHECKING:
    import jinja2

    from steadytorch.results.saved import Saved

_ABSENT = "-"
_LONGEST = 100_000
"""Most characters of one text; longer than any network's list of layers."""


def report(result: str | Path, output: str | Path | None = None) -> Path:
    """Writes a saved result as an HTML page to read, print and share.

    The page is complete, fetches nothing and works without JavaScript.

    Args:
        result: a file that `--json` of measure, run, explain, tune, compare, conv, gate,
            track or doctor wrote; at most 256 MiB.
        output: the page, which is overwritten; None for the result's name with the ending `.html`.

    Returns:
        The path of the page.

    Raises:
        UsageError: the result is unreadable or not a saved result, or the page is not writable.
    """
    from steadytorch.results.saved import content_of

    source = Path(result)
    content = content_of(source)
    target = source.with_suffix(".html") if output is None else Path(output)
    _check(source, target)
    _write(target, page(source, content))
    return target


def page(source: Path, content: bytes) -> str:
    """The page of a result, as HTML.

    Args:
        source: the source file, for messages.
        content: content of that file.

    Raises:
        UsageError: the content is not a result, or its figures contradict each other.
    """
    import numpy as np

    from steadytorch.report import pages
    from steadytorch.report.plots import shortened
    from steadytorch.results.saved import decode, kind_of

    kind = kind_of(source, content)
    contents = pages.KINDS.get(kind)
    if contents is None:
        known = ", ".join(pages.KINDS)
        raise UsageError(
            f"{plain(source)} holds a {shortened(kind, 40)!r} result; pages exist for {known}"
        )
    saved = decode(source, content, kind)
    try:
        with np.errstate(all="raise"):
            return _rendered(saved, contents(saved))
    # Well-formed fields may still contradict each other: a median of zero, indices beyond the end.
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        raise UsageError(
            f"{plain(source)} holds figures that cannot be shown: {one_line(error)}"
        ) from error


def _rendered(saved: Saved, contents: dict[str, Any]) -> str:
    from plotly.offline import get_plotlyjs

    from steadytorch.report.doctor import machine, software
    from steadytorch.report.plots import Plot

    pictured = any(isinstance(each, Plot) for each in _each_value(contents))
    scripts = (get_plotlyjs(), _source("draw.js")) if pictured else ()
    template = _templates().get_template(f"{saved.kind}.html")
    return template.render(
        kind=saved.kind,
        document=saved.result,
        created=saved.head.created,
        machine=machine(saved.head.environment),
        software=software(saved.head.environment),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        style=_source("page.css"),
        **contents,
    )


def _each_value(contents: dict[str, Any]) -> Iterator[Any]:
    for value in contents.values():
        yield from value if type(value) is list else (value,)


@cache
def _templates() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    from steadytorch.report.plots import embedded

    def shown(value: Any) -> Any:
        """The text of a template expression, before escaping."""
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
    """Refuses an unwritable target before the work starts."""
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
        # Replace the target of a link, and keep its permissions.
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
        write_whole(target.resolve(), text.encode(), mode=mode)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{plain(target)} cannot be written: {why}") from error
