"""Renders the time slices of a step in the terminal: a bar and its legend."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from steadytorch.report.text import duration, plain, print_indented, share
from steadytorch.results.explain import Explanation

_MOST_SLICES = 8
_LEAST_SHARE = 0.005
"""The bar adds up smaller slices."""
FILLS = "█▓▒░#=+:-"
_COLOURS = ("blue", "cyan", "magenta", "green", "red", "yellow", "bright_blue", "white", "dim")
_NAMES = {
    "gpu_kernel": "kernels",
    "gpu_communication": "communication",
    "gpu_memcpy": "copies",
    "gpu_memset": "fills",
    "idle_data_wait": "idle: waiting for data",
    "idle_synchronisation": "idle: synchronisation",
    "idle_compile": "idle: compiling, loading",
    "idle_allocation": "idle: allocation",
    "idle_gc": "idle: garbage collection",
    "idle_launch": "idle: launching",
    "idle_cross_stream": "idle: another stream",
    "idle_profiler": "idle: the profiler",
    "cpu_compute": "products, convolutions",
    "cpu_elementwise": "elementwise operators",
    "cpu_copy": "copies",
    "cpu_operator": "other operators",
    "cpu_communication": "communication",
    "cpu_data_wait": "waiting for data",
    "cpu_waiting": "waiting for threads",
    "cpu_compile": "compiling, loading",
    "cpu_allocation": "allocation",
    "cpu_gc": "garbage collection",
    "cpu_python": "Python, or waiting",
    "cpu_profiler": "the profiler",
    "cpu_forward": "forward",
    "cpu_backward": "backward",
    "cpu_optimizer": "optimizer",
    "cpu_evaluation": "evaluation",
    "cpu_synchronisation": "synchronisation",
    "cpu_script": "the script's own code",
    "unknown": "unknown",
    "input_wait": "waiting for data",
    "copies": "copies",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "collection": "garbage collection",
    "synchronisation": "synchronisation",
    "evaluation": "evaluation",
    "rest": "the script's own code",
}
_SLICE = re.compile(r"\b(?:(?:gpu|idle|cpu)_[a-z_]+|input_wait)\b")


def render_ledger(console: Console, result: Explanation, most: int = _MOST_SLICES) -> None:
    """Prints the time slices of a step: a bar across the console, and a line for each slice.

    Args:
        console: where to print.
        result: the explanation.
        most: slices with a line of their own; the others are added up.
    """
    slices, total = shown_slices(result, most), result.step_ns
    console.print()
    console.print(Text("Where a step goes", "bold"))
    bar = Text()
    for place, columns in enumerate(_columns([t for _, t in slices], console.width - 2)):
        bar.append(FILLS[place] * columns, _COLOURS[place])
    print_indented(console, bar)
    for place, (label, time_ns) in enumerate(slices):
        line = Text.assemble(
            (FILLS[place], _COLOURS[place]),
            f" {label:<26}{share(time_ns, total):>7}  {duration(time_ns):>10}",
        )
        print_indented(console, line)


def shown_slices(result: Explanation, most: int = _MOST_SLICES) -> list[tuple[str, float]]:
    """Labels and mean times in ns of the largest slices, with the sum of the others at the end."""
    means = {name: value for name, value in result.mean_slices_ns().items() if value > 0}
    ranked = sorted(means, key=lambda name: -means[name])[:most]
    large = {name for name in ranked if means[name] >= _LEAST_SHARE * result.step_ns}
    small = [name for name in means if name not in large]
    if len(small) == 1:
        large, small = large | set(small), []
    slices = [(slice_label(name), means[name]) for name in means if name in large]
    if small:
        slices.append((f"{len(small)} others", sum(means[name] for name in small)))
    return slices


def slice_label(name: str) -> str:
    """The display label of a slice, such as `kernels` for `gpu_kernel`."""
    return _NAMES.get(name, plain(name))


def _columns(times: list[float], width: int) -> list[int]:
    """Splits `width` columns in proportion to the times, by the largest remainder method."""
    total = sum(times) or 1.0
    exact = [value / total * width for value in times]
    whole = [int(value) for value in exact]
    ranked = sorted(range(len(times)), key=lambda i: whole[i] - exact[i])
    for place in ranked[: width - sum(whole)]:
        whole[place] += 1
    return whole


def in_words(text: str) -> str:
    """Replaces the slice names in a text by their display labels."""
    return _SLICE.sub(lambda found: _NAMES.get(found[0], found[0]), text)
