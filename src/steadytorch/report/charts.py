"""Small text charts of a series: a timeline and a histogram."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from steadytorch.report.text import duration

BARS = " ▁▂▃▄▅▆▇█"


def timeline(samples_ns: Sequence[float], width: int = 60) -> str:
    """Bars of the medians of consecutive samples, scaled from the lowest to the highest median.

    Args:
        samples_ns: in the order taken; at least one.
        width: most columns.
    """
    columns = [median(part) for part in _parts(samples_ns, width)]
    low, high = min(columns), max(columns)
    reach = (high - low) or 1.0
    return "".join(BARS[1 + round((value - low) / reach * (len(BARS) - 2))] for value in columns)


def timeline_scale(samples_ns: Sequence[float], width: int = 60) -> tuple[float, float]:
    """The values of the lowest and the highest bar of `timeline`, in ns."""
    columns = [median(part) for part in _parts(samples_ns, width)]
    return min(columns), max(columns)


def histogram(samples_ns: Sequence[float], rows: int = 8, width: int = 40) -> list[str]:
    """Text rows of lower bound, bar and count: equal bins up to p99, then one bin for the rest.

    Args:
        samples_ns: at least one.
        rows: number of equal bins.
        width: columns of the longest bar.
    """
    ordered = sorted(samples_ns)
    low, high = ordered[0], ordered[int(0.99 * (len(ordered) - 1))]
    if high == low:
        rows = 1
    step = (high - low) / rows
    counts = [0] * (rows + 1)
    for value in ordered:
        if value > high:
            counts[rows] += 1
        else:
            counts[min(rows - 1, int((value - low) / step)) if step else 0] += 1
    labels = [_label(low + i * step) for i in range(rows)] + ["above"]
    most = max(counts)
    return [
        f"{label:>10} {_bar(count / most, width)} {count}"
        for label, count in zip(labels, counts, strict=True)
        if count or label != "above"
    ]


def _label(nanoseconds: float) -> str:
    """A time in at most ten characters, in hours if seconds would need more."""
    text = duration(nanoseconds)
    return text if len(text) <= 10 else f"{nanoseconds / 3.6e12:.1f} h"


def _parts(samples: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(width, len(samples))
    edges = [round(i * len(samples) / count) for i in range(count + 1)]
    return [samples[a:b] for a, b in pairwise(edges)]


def _bar(share: float, width: int) -> str:
    eighths = max(1, round(share * width * 8)) if share > 0 else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
