"""Renders saved results as HTML pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from steadytorch.errors import UsageError, one_line
from steadytorch.report.files import (
    check,
    plotly_hash,
    plotly_name,
    plotly_packed,
    script_hash,
    share_plotly,
    write,
)
from steadytorch.report.text import plain

if TYPE_CHECKING:
    import jinja2

    from steadytorch.results.saved import Saved

_ABSENT = "-"
_LONGEST = 100_000
"""Most characters of one text; longer than any network's list of layers."""


class _Source(NamedTuple):
    """A file with a saved result: its content, and its path for messages."""

    path: Path
    content: bytes


def report(
    result: str | Path,
    output: str | Path | None = None,
    *,
    other: str | Path | None = None,
    embed: bool = False,
) -> Path:
    """Writes a saved result, or two side by side, as an HTML page to read, print and share.

    The page opens offline. The page's charts need `plotly-VERSION.min.js`, which is written beside
    the page once for all pages of the folder. The headline and the tables need neither Plotly nor
    JavaScript.

    Args:
        result: a file that `--json` of measure, run, explain, tune, compare, conv, gate,
            track or doctor wrote; at most 256 MiB.
        output: the page, which is overwritten; None for the result's name with the ending `.html`,
            or for `RESULT-OTHER.html` of two results.
        other: a second result of the same kind, for the right-hand side.
        embed: whether to put Plotly into the page, which adds 2 MB, instead of beside it.

    Returns:
        The path of the page.

    Raises:
        UsageError: a result is unreadable or not a saved result, the two are of different kinds,
            or the page is not writable.
    """
    return write_report(result, output, other=other, embed=embed)[0]


def write_report(
    result: str | Path,
    output: str | Path | None = None,
    *,
    other: str | Path | None = None,
    embed: bool = False,
) -> list[Path]:
    """Writes a page as `report` does; returns its path, and that of Plotly's script if needed."""
    from steadytorch.results.saved import content_of

    paths = [Path(each) for each in (result, other) if each is not None]
    sources = [_Source(path, content_of(path)) for path in paths]
    name = "-".join(path.stem for path in paths)
    target = paths[0].with_name(f"{name}.html") if output is None else Path(output)
    for path in paths:
        check(path, target)
    made = _page(sources, embed)
    shared = share_plotly(made, target)
    write(target, made)
    return [target, *shared]


def page(source: Path, content: bytes, *, embed: bool = False) -> str:
    """Renders the page of one result as HTML.

    Args:
        source: the source file, for messages.
        content: content of that file.
        embed: whether Plotly is in the page; else `files.share_plotly` writes it beside the page.

    Raises:
        UsageError: the content is not a result, or its figures contradict each other.
    """
    return _page([_Source(source, content)], embed)


def _page(sources: Sequence[_Source], embed: bool) -> str:
    """Renders the page of one result, or of two results of the same kind."""
    kinds = [_kind(source) for source in sources]
    if len(set(kinds)) > 1:
        (a, b), (left, right) = kinds, (plain(source.path) for source in sources)
        raise UsageError(
            f"{left} holds a {a!r} result and {right} a {b!r} result: name two of one kind"
        )
    sides = ("a-", "b-") if len(sources) > 1 else ("",)
    parts = [_part(*each, kinds[0]) for each in zip(sources, sides, strict=True)]
    draws, script = any(part.draws for part in parts), template_source("page.js")
    allowed = [f"'sha256-{script_hash(script)}'"]
    if draws:
        # What the page's own script loads is allowed; a file: page cannot check a file's hash.
        allowed.append(f"'sha256-{plotly_hash()}'" if embed else "'strict-dynamic'")
    return (
        _templates()
        .get_template("page.html")
        .render(
            kind=kinds[0],
            title=" and ".join(dict.fromkeys(part.title for part in parts)),
            results=[part.html for part in parts],
            allowed=[_ours(each) for each in allowed],
            plotly=plotly_name() if draws else "",
            packed=plotly_packed() if draws and embed else "",
            script=script,
            style=template_source("page.css"),
        )
    )


def _kind(source: _Source) -> str:
    """The kind of a result; raises `UsageError` if there is no page for this kind."""
    from steadytorch.report import pages
    from steadytorch.report.plots import shortened
    from steadytorch.results.saved import kind_of

    kind = kind_of(*source)
    if kind not in pages.KINDS:
        known = ", ".join(pages.KINDS)
        raise UsageError(
            f"{plain(source.path)} holds a {shortened(kind, 40)!r} result; pages exist for {known}"
        )
    return kind


class _Part(NamedTuple):
    """One result on a page: its title, its HTML, and whether it has charts."""

    title: str
    html: Any
    draws: bool


def _part(source: _Source, side: str, kind: str) -> _Part:
    import numpy as np

    from steadytorch.report import pages
    from steadytorch.results.saved import decode

    saved = decode(*source, kind)
    try:
        with np.errstate(all="raise"):
            return _rendered(saved, pages.KINDS[kind](saved), side, source.path)
    # Well-formed fields may still contradict each other: a median of zero, indices beyond the end.
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        raise UsageError(
            f"{plain(source.path)} holds figures that cannot be shown: {one_line(error)}"
        ) from error


def _rendered(saved: Saved, contents: dict[str, Any], side: str, path: Path) -> _Part:
    from steadytorch.report.doctor import machine, software
    from steadytorch.report.plots import Plot

    template = _templates().get_template(f"{saved.kind}.html")
    html = template.render(
        kind=saved.kind,
        document=saved.result,
        created=saved.head.created,
        machine=machine(saved.head.environment),
        software=software(saved.head.environment),
        side=side,
        source=path.name if side else "",
        **contents,
    )
    draws = any(isinstance(each, Plot) for each in _each_value(contents))
    return _Part(contents["title"], _ours(html), draws)


def _ours(text: str) -> Any:
    """Marks text as safe HTML: already escaped, or written by this project."""
    from markupsafe import Markup

    return Markup(text)


def _each_value(contents: dict[str, Any]) -> Iterator[Any]:
    for value in contents.values():
        yield from value if type(value) is list else (value,)


@cache
def _templates() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    from steadytorch.report.plots import Link, embedded

    def shown(value: Any) -> Any:
        """Converts the value of a template expression to text, before escaping."""
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
    made.filters["embedded"] = lambda figure: _ours(embedded(figure))
    made.filters["anchor"] = lambda title: "-".join(re.findall(r"[a-z0-9]+", title.lower()))
    made.tests["link"] = lambda cell: isinstance(cell, Link)
    # Only this project's own scripts and style may pass unescaped.
    made.filters["ours"] = _ours
    return made


@cache
def template_source(name: str) -> str:
    """The text of a file in the templates folder."""
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")
