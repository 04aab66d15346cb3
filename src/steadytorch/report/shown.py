"""Renders results outside of the command line: as text, and for notebooks as HTML."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from steadytorch.report.compare import render_compare
from steadytorch.report.conv import render_conv
from steadytorch.report.doctor import render_doctor
from steadytorch.report.explain import render_explain
from steadytorch.report.gate import render_gate
from steadytorch.report.measure import render_measure, render_series
from steadytorch.report.plans import render_reverified, render_show
from steadytorch.report.ranks import render_ranks
from steadytorch.report.run import render_run
from steadytorch.report.sweep import render_sweep
from steadytorch.report.track import render_track
from steadytorch.report.tune import render_left_out, render_plan, render_trials
from steadytorch.results.tune import TuneReport

WIDTH = 100
"""Columns in a notebook; text of watched scripts has 80."""
_PAGE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;'
    "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"
)
_COLOURS = TerminalTheme(
    (255, 255, 255),
    (0, 0, 0),
    [(68, 68, 68), (192, 48, 48), (32, 128, 64), (168, 112, 0), (48, 96, 192), (144, 64, 160),
     (0, 128, 144), (128, 128, 128)],
    [(104, 104, 104), (208, 64, 64), (48, 144, 80), (184, 128, 16), (80, 128, 216),
     (160, 88, 176), (16, 144, 160), (144, 144, 144)],
)  # fmt: skip
"""Colours that can be read on white and on black."""


def _tune(console: Console, report: TuneReport) -> None:
    render_plan(console, report, "Plan")
    render_trials(console, report)
    render_left_out(console, report)


RENDERERS: dict[str, Callable[[Console, Any], None]] = {
    "CheckUp": render_doctor,
    "CompareResult": render_compare,
    "ConvReport": lambda console, result: render_conv(console, "convolutions", result),
    "GateResult": render_gate,
    "Explanation": lambda console, result: render_explain(console, result.source, result),
    "MeasureResult": lambda console, result: render_measure(console, result.metric, result),
    "Measurement": lambda console, result: render_series(console, result.metric, result),
    "PlanRecord": lambda console, plan: render_show(console, plan, Path(plan.path or "not stored")),
    "RankComparison": render_ranks,
    "Reverified": render_reverified,
    "Sweep": render_sweep,
    "TrackResult": render_track,
    "TuneReport": _tune,
    "Watched": lambda console, result: render_run(console, "", result),
}
"""Renderer of each kind of result, by the name of its class; some classes import PyTorch."""


def as_text(result: Any) -> str:
    """Renders a result as the command line prints it, without colours, for this terminal's width.

    Args:
        result: an instance of one of `RENDERERS`.
    """
    console = Console(file=StringIO(), highlight=False, markup=False)
    _renderer_of(result)(console, result)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def as_html(result: Any) -> str:
    """Renders a result as a self-contained fragment of HTML.

    Args:
        result: an instance of one of `RENDERERS`.
    """
    console = Console(
        file=StringIO(),
        record=True,
        width=WIDTH,
        highlight=False,
        markup=False,  # foreign text must not make links
        force_terminal=True,
        color_system="standard",
        force_jupyter=False,
    )
    _renderer_of(result)(console, result)
    return console.export_html(theme=_COLOURS, code_format=_PAGE, inline_styles=True)


def _renderer_of(result: Any) -> Callable[[Console, Any], None]:
    names = [kind.__name__ for kind in type(result).__mro__]
    return next(RENDERERS[name] for name in names if name in RENDERERS)
