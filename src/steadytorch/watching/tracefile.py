"""Writes a recorded slow step, with the steps before it, as a Chrome trace."""

from __future__ import annotations

import gzip
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from steadytorch.ledger.operator_slices import PARTS
from steadytorch.plan.files import write_whole
from steadytorch.watching.flight import FIRST_MODULE, FULL, LEAVE, SlowTape, StepTape

if TYPE_CHECKING:
    from steadytorch.device.recording import Recording

_AHEAD_NS = 1_000
"""Time in ns before the first event, because a timestamp of zero counts as missing."""
_MAIN, _OTHERS = 1, 2
"""Thread ids in the trace: of the watched thread, and of the first other thread."""


class Range(NamedTuple):
    """A named span of time in a thread of the trace."""

    name: str
    start_ns: int
    end_ns: int
    thread: int = _MAIN


class Names(NamedTuple):
    """Names of the modules and user code lines that a recorded step refers to by number."""

    modules: Sequence[str]
    lines: Sequence[str]


def file_name(index: int, rank: str = "0") -> str:
    """File name of the trace of a step."""
    return f"step-{index}.json.gz" if rank == "0" else f"step-{index}.rank{rank}.json.gz"


def write_trace(
    path: Path,
    slow: SlowTape,
    names: Names,
    recording: Recording,
    what: Sequence[str],
    job: Mapping[str, int] | None = None,
) -> None:
    """Write the trace of a slow step.

    Args:
        path: the file, which is replaced.
        slow: the recorded steps.
        names: names of modules and lines.
        recording: telemetry, whose garbage collections are shown.
        what: differences of the slow step from usual steps, one line each.
        job: `rank` and `world_size`, written as PyTorch's profiler does; None outside of a job.

    Raises:
        OSError: the file cannot be written.
    """
    origin = slow.steps[0].start_ns - _AHEAD_NS
    ranges = [each for step in slow.steps for each in _of_step(step, names.modules)]
    ranges += _lines(slow, names.lines)
    ranges += _collections(slow, recording)
    threads = {_MAIN: "watched thread", **_other_threads(slow)}
    process = os.getpid()
    events = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": thread,
            "args": {"name": _text(name)},
        }
        for thread, name in threads.items()
    ]
    events += [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": _text(each.name),
            "pid": process,
            "tid": each.thread,
            "ts": (each.start_ns - origin) / 1000,
            "dur": (each.end_ns - each.start_ns) / 1000,
        }
        for each in ranges
    ]
    document = {  # the parts of `PARTS` are in the order of `clock.SLICES`
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin + time.time_ns() - time.perf_counter_ns(),
        **({"distributedInfo": dict(job)} if job else {}),
        "steadytorch": {"slow_step": slow.steps[-1].number, "what": [*map(_text, what)]},
        "traceEvents": events,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, gzip.compress(msgspec.json.encode(document), 6, mtime=0), mode=0o666)


def _text(name: str) -> str:
    """The name, with characters replaced that UTF-8 cannot encode; file names may contain them."""
    return name.encode("utf-8", "replace").decode()


def _of_step(step: StepTape, modules: Sequence[str]) -> Iterator[Range]:
    """The trace ranges of a step, its slices and its module calls."""
    yield Range(f"ProfilerStep#{step.number}", step.start_ns, step.end_ns)
    parts = list(PARTS)
    part, since = -1, step.start_ns
    calls: list[tuple[int, int]] = []
    for at, code in zip(step.at_ns, step.codes, strict=True):
        if code >= FIRST_MODULE:
            calls.append((code - FIRST_MODULE, at))
        elif code == LEAVE:
            if calls:
                yield Range(f"nn.Module: {modules[(call := calls.pop())[0]]}", call[1], at)
        else:
            if part >= 0 and at > since:
                yield Range(parts[part], since, at)
            part, since = (-1 if code == FULL else code), at
    if part >= 0:
        yield Range(parts[part], since, step.end_ns)
    for call, at in calls:
        yield Range(f"nn.Module: {modules[call]}", at, step.end_ns)


def _lines(slow: SlowTape, lines: Sequence[str]) -> Iterator[Range]:
    """The trace ranges of the sampled code lines of all threads.

    A line's range in the watched thread ends at the next sample or event, so that ranges nest.
    """
    edges = sorted({at for step in slow.steps for at in (*step.at_ns, step.end_ns)})
    last = slow.steps[-1].end_ns
    threads = {name: thread for thread, name in _other_threads(slow).items()}
    for place, sample in enumerate(slow.samples):
        following = slow.samples[place + 1].at_ns if place + 1 < len(slow.samples) else last
        edge = bisect_right(edges, sample.at_ns)
        if sample.place >= 0 and edge < len(edges):
            until = min(following, edges[edge])
            yield Range(f"{lines[sample.place]} (sampled)", sample.at_ns, until)
        for name, line in sample.others:
            yield Range(f"{lines[line]} (sampled)", sample.at_ns, following, threads[name])


def _other_threads(slow: SlowTape) -> dict[int, str]:
    """Names of the other sampled threads, by their thread id in the trace."""
    names = dict.fromkeys(name for sample in slow.samples for name, _ in sample.others)
    return dict(enumerate(names, _OTHERS))


def _collections(slow: SlowTape, recording: Recording) -> Iterator[Range]:
    """The trace ranges of garbage collections during the recorded steps."""
    begin, end = slow.steps[0].start_ns, slow.steps[-1].end_ns
    every = zip(
        recording.gc_start_ns, recording.gc_duration_ns, recording.gc_generation, strict=True
    )
    for start, took, generation in every:
        if start < end and start + took > begin:
            yield Range(f"steadytorch.gc generation {generation}", start, start + took)
