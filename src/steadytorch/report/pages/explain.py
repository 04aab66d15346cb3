"""The HTML page of an explanation: time slices, variability, findings, rules without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadytorch.quantities import size
from steadytorch.report import explain
from steadytorch.report.ledger import in_words, slice_label
from steadytorch.report.pages.steps import MOST_STEPS, Step, note_of_steps, opened
from steadytorch.report.plots import BLUE, COLOURS, GREY, Plot, Table, figure, table
from steadytorch.report.text import duration, share, unit_of
from steadytorch.results.explain import Abstention, Explanation, GpuTotals, Roofline, StepTime
from steadytorch.results.saved import Saved

_MOST_STEPS = 200
"""Most bars that stay distinguishable; a table has the mean of all steps."""
_MOST_SLICES = 100
_IDLE = ("#dd7a1f", "#c53d3d", "#e0b13c", "#b5651d", "#d98880", "#f0c08a", "#a04000", "#d4ac6e")


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of an explanation."""
    document: Explanation = saved.result
    _check(document.steps)
    lines = document.roofline
    return {
        "title": saved.head.workload,
        "headline": document.regime + explain.pace(document),
        "times": list(explain.times(document)),
        "steps": _steps(document.steps) if document.steps else None,
        "slices": _slices(document),
        "slow": _slow(document),
        "left_out": note_of_steps(len(document.slowest)),
        "gpu": None if document.gpu is None else _gpu(document.gpu),
        "gpu_times": _gpu_times(document.gpu),
        "variance": _variance(document.variance_shares or {}),
        "variation": list(explain.variation(document)),
        "findings": [
            {
                "it": finding,
                "recoverable": explain.recoverable(finding, document),
                "transforms": ", ".join(finding.transforms),
            }
            for finding in document.findings
        ],
        "kernels": None if lines is None else _kernels(lines, document.gpu is not None),
        "least": lines and explain.least(lines),
        "doubts": list(explain.doubts(document)),
        "untold": untold(document.abstained),
    }


def _check(steps: Sequence[StepTime]) -> None:
    """Rejects results with over `_MOST_SLICES` slices per step, to bound the rendering time."""
    if steps and len(steps[0].slices_ns) > _MOST_SLICES:
        raise ValueError(f"{len(steps[0].slices_ns)} slices: a ledger has at most {_MOST_SLICES}")


def _steps(steps: Sequence[StepTime]) -> Plot:
    """Charts the time slices of each step as a stacked bar."""
    shown = steps[:_MOST_STEPS]
    unit, unit_ns = unit_of(max(step.total_ns for step in shown))
    names = [n for n in steps[0].slices_ns if any(step.slices_ns.get(n) for step in shown)]
    colours = colours_of(names)
    data = [
        {
            "type": "bar",
            "name": slice_label(name),
            "marker": {"color": colours[name]},
            "x": [f"{step.index}" for step in shown],
            "y": [step.slices_ns.get(name, 0) / unit_ns for step in shown],
            "hovertemplate": f"step %{{x}}: %{{y:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
        }
        for name in names
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"type": "category"},
        "bargap": max(0.25, 1 - 0.2 * len(shown)),
    }
    note = "The slices of a step add up to it."
    if len(shown) < len(steps):
        note += f" Drawn: the first {len(shown):,} of {len(steps):,} steps; the table covers all."
    shape = figure(
        data, "step, as the trace numbers it", f"time, {unit}", height=420, layout=layout
    )
    return Plot("Where each step goes", shape, note, rows="step")


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Colours by slice name: a palette for work, warm colours for idle time, grey for unknown."""
    work = iter(COLOURS[i] for i in (0, 8, 4, 2, 6, 3, 5, 9) * 4)
    idle = iter(_IDLE * 4)
    return {
        name: GREY if name == "unknown" else next(idle if name.startswith("idle_") else work)
        for name in names
    }


def _slices(document: Explanation) -> Table:
    shares = document.variance_shares or {}
    means = document.mean_slices_ns()
    named = [name for name in {**means, **shares} if means.get(name, 0) > 0 or shares.get(name)]
    rows = [
        (
            slice_label(name),
            duration(means.get(name, 0)),
            share(means.get(name, 0), document.step_ns),
            f"{100 * shares[name]:.1f} %" if name in shares else None,
        )
        for name in sorted(named, key=lambda name: -means.get(name, 0))
    ]
    whole = ("together", duration(document.step_ns), share(1, 1), None)
    headings = ["slice", "mean of a step", "share", "share of the variance"]
    return table(headings, rows, total=whole)


def _slow(document: Explanation) -> list[Step]:
    means = document.mean_slices_ns()
    timed = [(each, document.steps[each.index]) for each in document.slowest[:MOST_STEPS]]
    return [opened(each, step.index, step.slices_ns, means) for each, step in timed]


def _gpu(totals: GpuTotals) -> Plot:
    unit, unit_ns = unit_of(max(1, totals.total_ns))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "marker": {"color": colour},
            "x": [time_ns / unit_ns],
            "y": ["GPU"],
            "hovertemplate": f"%{{x:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
        }
        for name, time_ns, colour in (
            ("busy", totals.busy_ns, BLUE),
            ("idle", totals.idle_ns, _IDLE[0]),
        )
    ]
    shape = figure(data, f"time, {unit}", "", height=170, layout={"barmode": "stack"})
    return Plot("The GPU over the whole trace", shape)


def _gpu_times(totals: GpuTotals | None) -> Table:
    if totals is None:
        return table([], [])
    named = [("busy", totals.busy_ns), ("idle", totals.idle_ns), ("in all", totals.total_ns)]
    *rows, whole = [
        (name, duration(time_ns), share(time_ns, totals.total_ns)) for name, time_ns in named
    ]
    return table(["GPU", "time", "share"], rows, total=whole)


def _variance(shares: dict[str, float]) -> Plot | None:
    ranked = sorted((item for item in shares.items() if item[1]), key=lambda item: abs(item[1]))
    if not ranked:
        return None
    bars = {
        "type": "bar",
        "orientation": "h",
        "marker": {"color": BLUE},
        "showlegend": False,
        "x": [100 * value for _, value in ranked],
        "y": [slice_label(name) for name, _ in ranked],
        "hovertemplate": "%{y}: %{x:.1f} %<extra></extra>",
    }
    layout = {"yaxis": {"type": "category"}}
    height = 90 + 28 * len(ranked)
    shape = figure(
        [bars], "share of the variance of the steps, %", "", height=height, layout=layout
    )
    return Plot("What makes steps differ", shape, "The shares add up to 100 %.")


def _kernels(lines: Roofline, on_gpu: bool) -> Table:
    rows = [
        (
            *(line.name, f"{100 * line.share:.1f} %", duration(line.time_ns / lines.steps)),
            f"{line.count / lines.steps:.0f}x",
            None if line.share_of_limit is None else f"{100 * line.share_of_limit:.0f} %",
            line.bound,
            None if line.bytes is None else size(line.bytes / lines.steps),
            None if line.flops_per_s is None else f"{line.flops_per_s * 1e-12:.3g}",
        )
        for line in lines.lines
    ]
    headings = ["kernel" if on_gpu else "operator", "share", "a step", "calls", "of the limit"]
    return table([*headings, "bound by", "bytes a step", "TFLOP/s"], rows)


def untold(abstained: Sequence[Abstention]) -> Table:
    """A table of the rules that lacked data, grouped by the missing data."""
    rows = [
        (", ".join(rules), in_words(why), recapture)
        for (why, recapture), rules in explain.by_reason(abstained).items()
    ]
    return table(["rules", "missing", "how to capture it"], rows, (0, 1, 2))
