"""Renders the check-up of a machine in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steadytorch.device.observe import NOT_ON_CPU
from steadytorch.report.text import plain
from steadytorch.results.machine import (
    CheckUp,
    DeviceFacts,
    NoiseFloor,
    Observation,
    PluginCheck,
    Snapshot,
    Switch,
)

_WIDTH = 80
_LABEL_WIDTH = 22
_UNKNOWN = "unknown"

# A missing version shows its reason in its place.
_SOFTWARE = ("torch", "cuda", "cudnn", "triton", "driver", "python")
# Field of the facts or of the snapshot to its label.
_LABELS = {
    "name": "device name",
    "compute_capability": "compute capability",
    "sm_count": "multiprocessors",
    "memory_bytes": "memory",
    "l2_cache_bytes": "L2 cache",
    "mig_profile": "MIG slice",
    "driver": "driver",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "triton": "Triton",
    "torch": "PyTorch",
    "python": "Python",
    "cores_physical": "physical cores",
    "cores_logical": "logical cores",
    "cpu_name": "processor",
    "isa": "vector instructions",
    "os": "operating system",
    "load_average_1m": "load average",
    "cpu_busy": "CPU busy",
    "cpu_steal": "CPU steal",
    "memory_free_bytes": "memory free",
    "gpu_memory_free_bytes": "GPU memory free",
    "other_gpu_processes": "other GPU processes",
    "sm_clock_mhz": "SM clock",
    "sm_clock_max_mhz": "highest SM clock",
    "power_watts": "power",
    "power_limit_watts": "power limit",
    "temperature_celsius": "temperature",
    "clock_event_reasons": "clock held by",
}

Rows = list[tuple[str, str]]
# Names of what is hidden, the reason, and the remedies.
Hidden = tuple[list[str], str, list[str]]
HIDDEN = "Cannot be observed here, and what to do"
"""The heading of the list of hidden things."""


class Section(NamedTuple):
    """A section of the machine check-up: labels with values, then sentences."""

    title: str
    rows: Rows
    said: Sequence[str] = ()


def render_doctor(
    console: Console,
    found: CheckUp,
) -> None:
    """Prints the machine, its software and state, and unobservable facts with the reasons.

    Args:
        console: where to print; output uses at most 80 columns.
        found: the check-up.
    """
    for section in sections(found):
        _section(console, *section)
    _hidden_section(console, HIDDEN, hidden(found))


def sections(found: CheckUp) -> list[Section]:
    """The sections of the machine check-up that show known facts."""
    noise = ("A/A noise floor", _noise(found.noise_floor))
    seen = [(each.name, each.detail) for each in found.observability if each.ok]
    title = "cuDNN's benchmark mode in a new process"
    plugins = [] if found.plugins is None else [Section("Plug-ins", _plugins(found.plugins))]
    return [
        Section("Machine", machine(found.environment)),
        Section("Software", software(found.environment)),
        Section("State now", [*_state(found.state), noise]),
        Section(title, *_switch(found.benchmark_mode)),
        Section("Can be observed", seen),
        *plugins,
    ]


def _plugins(checks: Sequence[PluginCheck]) -> Rows:
    return [(each.name, _told(each)) for each in checks] or [("none", "no plug-in is installed")]


def _told(check: PluginCheck) -> str:
    if check.refused is not None:
        return f"refused: {check.refused} ({check.distribution})"
    if check.not_run is not None:
        return f"found, not run here: {check.not_run} ({check.distribution})"
    return f"ok ({check.distribution})"


def hidden(found: CheckUp) -> list[Hidden]:
    """The facts that cannot be observed on this machine, grouped by reason."""
    unknown = found.environment.unknown.items()
    fields = {field: why for field, why in unknown if field not in _SOFTWARE}
    return _hidden({**fields, **found.state.unknown}, found.observability)


def _section(console: Console, title: str, rows: Rows, said: Sequence[str] = ()) -> None:
    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=_LABEL_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for label, value in rows:
        # Text objects, never strings: a device name must not be read as markup.
        table.add_row(Text(plain(label)), Text(plain(value)))
    lines = [Padding(Text(plain(line), overflow="fold"), (0, 0, 0, 4)) for line in said]
    _show(console, title, [Padding(table, (0, 0, 0, 2), expand=False), *lines])


def _hidden_section(console: Console, title: str, groups: list[Hidden]) -> None:
    blocks = []
    for names, reason, remedies in groups:
        lines = [reason, *(f"To do: {remedy}." for remedy in remedies)]
        blocks.append(Padding(Text(plain(", ".join(names))), (0, 0, 0, 2)))
        blocks += [Padding(Text(plain(line), overflow="fold"), (0, 0, 0, 6)) for line in lines]
    if blocks:
        _show(console, title, blocks)


def _show(console: Console, title: str, blocks: Sequence[Padding]) -> None:
    width = min(_WIDTH, console.width)
    console.print(Text(title, style="bold"), width=width)
    for block in blocks:
        console.print(block, width=width, highlight=False)
    console.print()


def machine(facts: DeviceFacts) -> Rows:
    """Labels and values that describe the hardware."""
    rows: Rows = []
    if facts.device == "cuda":
        slice_unknown = "mig_profile" in facts.unknown
        rows += [
            ("GPU", _shown(facts.name)),
            ("compute capability", _shown(facts.compute_capability)),
            ("multiprocessors", _shown(facts.sm_count)),
            ("GPU memory", _bytes(facts.memory_bytes)),
            ("L2 cache", _bytes(facts.l2_cache_bytes)),
            ("MIG slice", _UNKNOWN if slice_unknown else facts.mig_profile or "none, a whole GPU"),
        ]
    rows += [
        ("processor", _shown(facts.cpu_name)),
        ("usable cores", _cores(facts)),
        ("vector instructions", _shown(facts.isa)),
    ]
    if facts.device == "cpu":
        rows.append(("memory", _bytes(facts.memory_bytes)))
    rows.append(("operating system", _shown(facts.os)))
    return rows


def software(facts: DeviceFacts) -> Rows:
    """The software versions that affect results."""
    return [
        (_LABELS[field], getattr(facts, field) or facts.unknown.get(field, _UNKNOWN))
        for field in _SOFTWARE
        if facts.unknown.get(field) != NOT_ON_CPU
    ]


def _state(now: Snapshot) -> Rows:
    rows = [
        ("load average", _shown(now.load_average_1m, "{:.2f} over the last minute")),
        ("CPU busy", _shown(now.cpu_busy, "{:.0%}")),
        ("CPU steal", _shown(now.cpu_steal, "{:.1%}")),
        ("memory free", _bytes(now.memory_free_bytes)),
    ]
    if now.device != "cuda":
        return rows
    return [
        *rows,
        ("GPU memory free", _bytes(now.gpu_memory_free_bytes)),
        ("other GPU processes", _shown(now.other_gpu_processes)),
        ("SM clock", _of(now.sm_clock_mhz, now.sm_clock_max_mhz, "MHz")),
        ("power", _of(now.power_watts, now.power_limit_watts, "W")),
        ("temperature", _shown(now.temperature_celsius, "{} degrees Celsius")),
        ("clock held by", _reasons(now.clock_event_reasons)),
    ]


def _switch(switch: Switch) -> tuple[Rows, tuple[str, ...]]:
    """The state of cuDNN's benchmark mode, and its pitfalls."""
    effect = f", without effect: {switch.no_effect}" if switch.no_effect else ""
    given = ", ".join(f"{name}={value}" for name, value in switch.environment.items())
    rows = [
        ("benchmark", _on(switch.benchmark) + effect),
        ("engines tried", _tried(switch.benchmark_limit)),
        ("deterministic", _on(switch.deterministic)),
        ("float32 convolutions", switch.fp32_precision),
        ("environment", given or "no TORCH_CUDNN_ variable is set"),
    ]
    if not switch.traps:
        return rows, ()
    head = "It is on:" if switch.benchmark else "Before you switch it on:"
    return rows, (head, *(f"- {trap}" for trap in switch.traps))


def _on(value: bool) -> str:
    return "on" if value else "off"


def _tried(limit: int | None) -> str:
    return "none" if limit is None else str(limit or "all")


def _hidden(unknown: Mapping[str, str], observations: Iterable[Observation]) -> list[Hidden]:
    """Groups unobservable facts by reason, in the order of first occurrence."""
    names: dict[str, dict[str, None]] = {}
    remedies: dict[str, dict[str, None]] = {}
    for observation in observations:
        if not observation.ok:
            names.setdefault(observation.detail, {})[observation.name] = None
            if observation.remedy:
                remedies.setdefault(observation.detail, {})[observation.remedy] = None
    for field, reason in unknown.items():
        if reason != NOT_ON_CPU:
            names.setdefault(reason, {})[_LABELS.get(field, field)] = None
    return [(list(names[why]), why, list(remedies.get(why, ()))) for why in names]


def _shown(value: Any, form: str = "{}") -> str:
    return _UNKNOWN if value is None else form.format(value)


def _bytes(count: int | None) -> str:
    if count is None:
        return _UNKNOWN
    unit, size = ("GiB", 1 << 30) if count >= 1 << 30 else ("MiB", 1 << 20)
    return f"{count / size:.1f} {unit}"


def _cores(facts: DeviceFacts) -> str:
    return f"{_shown(facts.cores_physical)} physical, {_shown(facts.cores_logical)} logical"


def _of(value: float | None, limit: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.0f} {unit}" if limit is None else f"{value:.0f} of {limit:.0f} {unit}"


def _reasons(reasons: tuple[str, ...] | None) -> str:
    if reasons is None:
        return _UNKNOWN
    return ", ".join(reason.replace("_", " ") for reason in reasons) or "nothing"


def _noise(floor: NoiseFloor) -> str:
    what = f" ({floor.what})" if floor.what else ""
    return f"{floor.a_a_spread:.2%} over {floor.pairs} pairs{what}"
