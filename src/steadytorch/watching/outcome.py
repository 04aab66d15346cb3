"""Builds the result of a watch from its recorded steps, stack samples and telemetry."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from steadytorch.bench.measure import host_block
from steadytorch.bench.series import Series
from steadytorch.device.facts import load_facts
from steadytorch.errors import one_line
from steadytorch.findings.figures import duration
from steadytorch.findings.finding import Case
from steadytorch.findings.watched_steps import Setting, SteppedOptimizer, WatchedSteps
from steadytorch.ledger.variability import FEWEST, TOLD
from steadytorch.measure.causes import CONTEXT_SWITCH, CPU_STEAL
from steadytorch.measure.variability import UNATTRIBUTED
from steadytorch.quantities import counted
from steadytorch.results.explain import SlowStep
from steadytorch.results.measure import Measurement
from steadytorch.results.watched import LineShare, Watched
from steadytorch.rules import findings
from steadytorch.watching.clock import REST, SLICES, UNITS, StepClock
from steadytorch.watching.flight import DEEPEST, MODULE_SHARE, MOST_SHARE
from steadytorch.watching.probes import probe_cost

if TYPE_CHECKING:
    from steadytorch.device.recording import Recording
    from steadytorch.watching.flight import FlightRecorder, SlowTape
    from steadytorch.watching.stacks import StackSampler

MOST_SLOW = 50
MOST_LINES = 20
_LEAST_LINE = 0.01


def outcome(
    clock: StepClock,
    sampler: StackSampler | None,
    recording: Recording | None,
    *,
    elapsed_ns: int,
    error: BaseException | None = None,
    optimizers: Iterable[SteppedOptimizer] = (),
    rank: int = 0,
    ranks: tuple[dict[int, dict[str, tuple[float, float]]], str] = ({}, ""),
    traces: Path | None = None,
) -> Watched:
    """Build the result of a watch.

    Args:
        clock: the recorded steps.
        sampler: the sampled lines; None if no step ended.
        recording: telemetry of the steps; None if no step ended.
        elapsed_ns: time from start to end of the watch.
        error: the exception that ended the watched code.
        optimizers: the optimizers that stepped.
        rank: this process's rank in its job.
        ranks: by rank, mean time of each slice and its standard error in ns, if this rank
            collected them; and a remark.
        traces: folder for the traces of slow steps, if the clock has a flight recorder.
    """
    known: dict[str, Any] = {
        "unit": UNITS[clock.unit],
        "environment": load_facts("cpu" if recording is None else recording.device),
        "elapsed_s": elapsed_ns * 1e-9,
        "failed": _failure(error),
        "interrupted": isinstance(error, KeyboardInterrupt),
        "peak_memory_bytes": _peak_memory(),
    }
    if not clock.steps or sampler is None or recording is None:
        return Watched(**known)
    seen = _Seen(clock, sampler)
    around = sampler.process
    setting = Setting() if around is None else around.setting(optimizers)
    cost = probe_cost()
    spent = cost.of(clock) + sampler.cpu_ns
    if clock.flight is not None:
        spent += clock.flight.cost_ns()
    overhead = spent / sum(clock.durations_ns) + recording.cpu_share
    series = Series(
        durations_ns=clock.durations_ns.tolist(),
        stretches=_stretches(seen.starts, seen.durations),
        host_ns=[],
        overhead_ns=overhead * float(np.median(seen.durations)),
        group=1,
        resolved=False,
        recording=recording,
    )
    measured = series.summary("period")
    first = measured.warmup_dropped
    lost = [o.index - first for o in measured.outliers if o.cause in (CONTEXT_SWITCH, CPU_STEAL)]
    steady = replace(
        seen.steady(first), setting=setting, rank=rank, ranks=ranks[0], contended=tuple(lost)
    )
    found, abstained = findings(Case(series=series, watched=steady))
    varied = float(np.ptp(steady.totals_ns)) > 0 and len(steady.totals_ns) >= FEWEST
    shares = {name: steady.variance_share(name) or 0.0 for name in SLICES} if varied else None
    slowest, remarks = seen.slow(measured), [*_remarks(clock), *filter(None, (ranks[1],))]
    if clock.flight is not None and traces is not None:
        remarks += _of_flight(clock.flight, clock.steps)
        if not slowest:
            remarks.insert(0, "No step stood out: no trace was kept.")
        slowest = _with_traces(slowest, clock.flight, traces, sampler.names, recording, remarks)
    return Watched(
        **known,
        measured=measured,
        starts_ns=tuple(clock.starts_ns),
        slices_ns={
            name: tuple(column) for name, column in zip(SLICES, clock.slices_ns, strict=True)
        },
        variance_shares=shares,
        why_no_variance_shares=None if varied else f"{len(steady.totals_ns)} steps, or all equal",
        slowest=tuple(slowest),
        lines=tuple(seen.lines()),
        findings=found,
        abstained=abstained,
        host=host_block(np.median(seen.durations), series.overhead_ns, recording),
        overhead_share=overhead,
        ranks={
            number: {name: mean for name, (mean, _) in times.items()}
            for number, times in ranks[0].items()
        },
        traces=str(traces) if any(step.trace is not None for step in slowest) else None,
        remarks=tuple(remarks),
    )


def _stretches(starts: np.ndarray, durations: np.ndarray) -> list[tuple[int, int]]:
    """Splits steps at gaps; returns (start of the first step in ns, step count) of each part."""
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + durations[:-1]) + 1
    bounds = [0, *breaks.tolist(), len(starts)]
    return [(int(starts[first]), after - first) for first, after in itertools.pairwise(bounds)]


class _Seen:
    """Watched steps, joined with the code lines that were sampled during each step."""

    def __init__(self, clock: StepClock, sampler: StackSampler) -> None:
        self.starts = np.asarray(clock.starts_ns, dtype=np.int64)
        self.durations = np.asarray(clock.durations_ns, dtype=np.int64)
        self._slices = [np.asarray(column, dtype=np.float64) for column in clock.slices_ns]
        self._names, self._functions = sampler.names, sampler.functions
        self._routine = np.asarray(sampler.routine, dtype=bool)
        self._flight = clock.flight
        count = len(sampler.places)  # the arrays grow in this order
        at = np.asarray(sampler.at_ns[:count], dtype=np.int64)
        step = np.searchsorted(self.starts, at, side="right") - 1
        inside = (step >= 0) & (at < (self.starts + self.durations)[step.clip(min=0)])
        self._step = step[inside]
        self._phase = np.asarray(sampler.phases[:count], dtype=np.int64)[inside]
        self._place = np.asarray(sampler.places, dtype=np.int64)[inside]

    def steady(self, first: int) -> WatchedSteps:
        """Slice times and sampled lines of the steps after the warm-up."""
        late = self._step >= first
        lines, routine = {}, 0.0
        for place, name in enumerate(SLICES):
            here = self._place[late & (self._phase == place)]
            seen = here[here >= 0]
            if place == REST:
                routine = self._routine[seen].sum() / max(1, len(here))
                seen = seen[~self._routine[seen]]
            counts = self._ranked(seen.tolist())
            lines[name] = tuple((self._names[line], n / len(here)) for line, n in counts)
        slices: dict[str, np.ndarray] = dict(
            zip(SLICES, (column[first:] for column in self._slices), strict=True)
        )
        return WatchedSteps(slices, lines, routine=float(routine))

    def _ranked(self, places: list[int]) -> list[tuple[int, int]]:
        """Lines with their sample counts, sorted by the function's count, then by the line's."""
        functions = Counter(self._functions[place] for place in places)
        counts = Counter(places).most_common()
        counts.sort(key=lambda each: (-functions[self._functions[each[0]]], -each[1]))
        return counts[:MOST_LINES]

    def lines(self) -> list[LineShare]:
        """The most frequently sampled code lines over all steps."""
        counts = Counter(zip(self._phase.tolist(), self._place.tolist(), strict=True))
        return [
            LineShare(SLICES[phase], self._names[place], count / len(self._step))
            for (phase, place), count in counts.most_common(MOST_LINES)
            if place >= 0 and count >= _LEAST_LINE * len(self._step)
        ]

    def slow(self, measured: Measurement) -> list[SlowStep]:
        """The slow outlier steps with their causes, slowest first."""
        slow = [each for each in measured.outliers if each.sample_ns > measured.median_ns]
        slow.sort(key=lambda each: -each.sample_ns)
        held = {} if self._flight is None else self._flight.held()
        most = MOST_SLOW if self._flight is None else max(MOST_SLOW, self._flight.keep)
        found = []
        for each in slow[:most]:
            excess = each.sample_ns - measured.median_ns
            what = [] if each.cause == UNATTRIBUTED else [each.cause]
            what += self._differences(each.index, excess, held.get(each.index))
            if each.index in held:
                what += self._meanwhile(held[each.index])
            name = f"step {each.index}"
            found.append(SlowStep(each.index, name, each.sample_ns, round(excess), tuple(what)))
        return found

    def _meanwhile(self, tape: SlowTape) -> list[str]:
        """The line that other threads ran most in a slow step, but not in the steps before it."""
        during = tape.of_slow()
        earlier = tape.samples[: len(tape.samples) - len(during)]
        before = {each for s in earlier for each in s.others}
        lines = Counter(each for s in during for each in s.others if each not in before)
        threads: Counter[str] = Counter()
        for (name, _), count in lines.items():
            threads[name] += count
        return [
            f"thread {name} meanwhile at {self._names[line]}"
            for (name, line), _ in lines.most_common(1)
            if 2 * threads[name] >= len(during)
        ]

    def _differences(self, step: int, excess: float, tape: SlowTape | None) -> list[str]:
        """The slices of a step that took longer than usual, each with its most sampled line.

        Uses the flight recorder's samples if given, because it samples slow steps more often.
        """
        told = []
        for place, column in enumerate(self._slices):
            usual = float(np.median(column))
            over = float(column[step]) - usual
            if over < TOLD * excess:
                continue
            if tape is None:
                here = self._place[(self._step == step) & (self._phase == place)].tolist()
            else:
                here = [each.place for each in tape.of_slow() if each.phase == place]
            counts = Counter(line for line in here if line >= 0).most_common(1)
            line = f" ({self._names[counts[0][0]]})" if counts else ""
            name = "own code" if place == REST else SLICES[place]
            text = f"{name} {duration(float(column[step]))}, usually {duration(usual)}"
            told.append((over, text + line))
        return [text for _, text in sorted(told, reverse=True)]


def _with_traces(
    slowest: list[SlowStep],
    flight: FlightRecorder,
    folder: Path,
    lines: list[str],
    recording: Recording,
    remarks: list[str],
) -> list[SlowStep]:
    """Write the traces of the slowest steps and note their paths; remark on missing traces."""
    from steadytorch.watching.tracefile import Names, file_name, write_trace

    held, names = flight.held(), Names(flight.module_names(), lines)
    most = slowest[: flight.keep]
    if missing := sum(step.index not in held for step in most):
        remarks.append(
            f"{missing} of the {counted(len(most), 'slowest step')} have no trace: they were not "
            "recorded, or many of the warm-up were slower."
        )
    rank, size, found = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1"), []
    in_job = rank.isdecimal() and size.isdecimal() and int(size) > 1
    job = {"rank": int(rank), "world_size": int(size)} if in_job else None
    for place, step in enumerate(slowest):
        if place < flight.keep and step.index in held:
            path = folder / file_name(step.index, rank)
            try:
                write_trace(path, held[step.index], names, recording, step.what, job)
            except OSError as error:
                remarks.append(f"Traces could not be written to {folder}: {one_line(error)}.")
                return [*found, *slowest[place:]]
            found.append(msgspec.structs.replace(step, trace=str(path)))
        else:
            found.append(step)
    return found


def _of_flight(flight: FlightRecorder, steps: int) -> list[str]:
    told = []
    if flight.recorded < steps:
        told.append(
            f"{flight.recorded:,} of {steps:,} steps were recorded: recording all would have cost "
            f"over {100 * MOST_SHARE:.0f} %."
        )
    if flight.profiled:
        told.append(
            f"{flight.profiled:,} steps ran under the script's own profiler; their traces were not "
            "kept."
        )
    if flight.depth < DEEPEST:
        told.append(
            f"Traces show {counted(flight.depth, 'level')} of module calls: more would have cost "
            f"over {100 * MODULE_SHARE:.1f} %."
        )
    return told


def _failure(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"exit code {error.code}"
    return one_line(error)


def _peak_memory() -> int | None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _remarks(clock: StepClock) -> list[str]:
    told = []
    if clock.untimed:
        told.append(f"{clock.untimed:,} later steps were not timed: a watch keeps {clock.steps:,}.")
    return told
