"""Explain a workload or a trace file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from steadytorch.device.facts import DeviceFacts, load_facts, resolve_device
from steadytorch.device.probes import corrupts_dropout
from steadytorch.errors import TraceError, UsageError
from steadytorch.explain.ranks import compare_ranks, rank_file
from steadytorch.findings.figures import many
from steadytorch.findings.finding import Case
from steadytorch.ledger.conditions import Conditions, join
from steadytorch.ledger.ledger import Ledger, build_ledger
from steadytorch.ledger.variability import variance_shares
from steadytorch.quantities import parse_duration
from steadytorch.rates.regime import regime_of
from steadytorch.rates.roofline import roofline
from steadytorch.results.explain import Explanation, StepTime
from steadytorch.results.ranks import RankComparison
from steadytorch.results.saved import FORMS, content_of, kind_of, named
from steadytorch.rules import findings
from steadytorch.traces.quality import quality
from steadytorch.traces.reader import read_trace

if TYPE_CHECKING:
    from steadytorch.explain.capture import Capture
    from steadytorch.results.candidate import Candidate
    from steadytorch.traces.events import Trace
    from steadytorch.workload.workload import Workload

TracePaths = list[str] | list[Path] | tuple[str, ...] | tuple[Path, ...]
"""Trace files of the ranks of one job."""
MOST_STEPS = 1000
MOST_LINES = 50
"""Maximum kernels kept in an explanation."""


@overload
def explain(subject: TracePaths, *, progress: Callable[[str], None] = ...) -> RankComparison: ...


@overload
def explain(
    subject: Workload | tuple[Any, Any] | str | Path,
    *,
    device: str | None = ...,
    budget: str | float = ...,
    steps: int = ...,
    pause: str | float | None = ...,
    candidate: Candidate = ...,
    progress: Callable[[str], None] = ...,
) -> Explanation: ...


def explain(
    subject: Workload | tuple[Any, Any] | str | Path | TracePaths,
    *,
    device: str | None = None,
    budget: str | float = "20s",
    steps: int = 5,
    pause: str | float | None = None,
    candidate: Candidate = (),
    progress: Callable[[str], None] = lambda message: None,
) -> Explanation | RankComparison:
    """Explain where the time goes in a workload, or in the steps of a trace file.

    A workload is measured in a fresh process without the profiler, then profiled in the same
    process. A trace file is only read; nothing runs. Several trace files, one for each rank of a
    job, are compared. Ctrl-C keeps the completed results; before anything was timed, it raises
    `KeyboardInterrupt`.

    Args:
        subject: a workload, its `(model, inputs)`, or the path of a Chrome trace of PyTorch's
            profiler, `.json` or `.json.gz`; or a list of such paths, two or more.
        device: where to run a workload; None for its own device.
        budget: time for sampling and profiling, such as `20s`, excluding start-up.
        steps: maximum number of steps to profile, 1 to 1,000.
        pause: time between calls in production, such as `100ms`; None for back-to-back calls.
        candidate: transforms to apply; none for the workload as it is.
        progress: receives progress messages.

    Raises:
        UsageError: the workload fails before anything was timed, a file is not a trace, traces are
            not of the ranks of one job, or an argument is invalid.
        UnsupportedError: the device is not available.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"cannot profile {steps} steps: give 1 to {MOST_STEPS:,}")
    seconds = parse_duration(budget)
    pause_s = None if pause is None else parse_duration(pause)
    paths = _traces(subject)
    if paths is not None:
        return _compared(paths, progress)
    if isinstance(subject, str | Path):
        progress(f"reading {Path(subject).name}")
        trace = _read(Path(subject))
        facts = facts_of(trace)
        return _explained(_case(trace, facts=facts), facts, Path(subject).name)
    # PyTorch takes seconds to load, and trace files do not need it.
    from steadytorch.explain.capture import capture
    from steadytorch.workload.given import workload_of

    subject = workload_of(subject)
    target = resolve_device(device or str(subject.device))
    facts = load_facts(target)
    seen = capture(
        subject,
        device=target,
        seconds=seconds,
        steps=steps,
        pause_s=pause_s,
        candidate=candidate,
        progress=progress,
    )
    case = _case(
        seen.trace,
        measured=seen.measured,
        series=seen.series,
        workload=subject,
        facts=facts,
        rates=seen.rates,
        notes=seen.notes,
    )
    explained = _explained(case, facts, "capture")
    remarks = (*explained.remarks, *_on_dropout(subject, facts))
    return _with_capture(msgspec.structs.replace(explained, remarks=remarks), seen)


def _read(path: Path) -> Trace:
    """Read a trace file; for a result saved by `steady`, the error names the command to show it."""
    try:
        return read_trace(path)
    except TraceError:
        kind = _kind_of_result(path)
        if kind is None:
            raise
        command = {"ranks": "explain", "sweep": "tune --list"}.get(kind, kind)
        raise TraceError(
            f"{named(path)} is a result of steady {command}: see it with "
            f"`steady report {named(Path(shlex.quote(str(path))))}`"
        ) from None


def _kind_of_result(path: Path) -> str | None:
    """Kind of a result file that `steady` saved; None for any other file."""
    try:
        kind = kind_of(path, content_of(path))
    except UsageError:
        return None
    return kind if kind in FORMS else None


def _traces(subject: object) -> list[Path] | None:
    """The paths of several traces; None for any other subject, such as `(model, inputs)`."""
    if not isinstance(subject, list | tuple):
        return None
    if not all(isinstance(each, str | Path) for each in subject):
        return None
    if len(subject) < 2:
        raise UsageError(
            f"{many(len(subject), 'trace')} in a list: pass one path, or the traces of two or more "
            "ranks"
        )
    return [Path(each) for each in subject]


def _compared(paths: Sequence[Path], progress: Callable[[str], None]) -> RankComparison:
    files, environment = [], None
    for path in paths:
        progress(f"reading {path.name}")
        trace = _read(path)
        environment = environment or facts_of(trace)
        files.append(rank_file(trace, path))
    assert environment is not None
    return compare_ranks(files, environment)


def _on_dropout(workload: Workload, facts: DeviceFacts) -> tuple[str, ...]:
    """Remark on torch.compile if the workload trains with dropout that PyTorch miscompiles."""
    from torch.nn.modules.dropout import _DropoutNd

    drops = workload.is_training and any(
        isinstance(module, _DropoutNd) and module.training and module.p > 0
        for module in getattr(workload.untouched, "modules", tuple)()
    )
    if not drops or not corrupts_dropout(facts.torch, facts.device):
        return ()
    return (
        f"Compiled by PyTorch {facts.torch}, groups of four channels may get one dropout mask "
        "(pytorch issue 198333): check the masks before you use torch.compile. steady tune "
        "verifies them.",
    )


def facts_of(trace: Trace) -> DeviceFacts:
    """Device facts that a trace contains; all other facts are marked as unknown."""
    found = trace.devices[0] if trace.devices else {}

    def given(key: str, kind: type) -> Any:
        return found[key] if type(found.get(key)) is kind else None

    major, minor = given("computeMajor", int), given("computeMinor", int)
    known = {
        "name": given("name", str),
        "compute_capability": None if None in (major, minor) else f"{major}.{minor}",
        "sm_count": given("numSms", int),
        "memory_bytes": given("totalGlobalMem", int),
    }
    missing = {
        field
        for field in DeviceFacts.__struct_fields__
        if field not in ("device", "unknown", "mig_profile") and known.get(field) is None
    }
    unknown = dict.fromkeys(sorted(missing), "not in the trace")
    return DeviceFacts(device="cuda" if len(trace.on_gpu) else "cpu", unknown=unknown, **known)


def _case(trace: Trace | None, **known: Any) -> Case:
    if trace is None:
        return Case(**known)
    ledger = build_ledger(trace)
    variance = variance_shares(trace, ledger, _conditions(trace, ledger, known.get("notes") or {}))
    return Case(trace=trace, ledger=ledger, variance=variance, **known)


def _conditions(trace: Trace, ledger: Ledger, notes: Mapping[str, Any]) -> tuple[Conditions, ...]:
    """Machine conditions in each step; empty without telemetry on the clock of the trace."""
    recording, offset_ns = notes.get("profile_recording"), notes.get("clock_offset_ns")
    if recording is None or offset_ns is None or trace.origin_ns is None:
        return ()
    return join(trace, ledger, recording, offset_ns=offset_ns)


def _explained(case: Case, facts: DeviceFacts, source: str) -> Explanation:
    found, abstained = findings(case)
    lines = None if case.trace is None else roofline(case.trace, case.rates, case.ledger)
    return Explanation(
        source=source,
        environment=facts,
        regime=regime_of(case.ledger, lines),
        findings=found,
        abstained=abstained,
        roofline=lines and msgspec.structs.replace(lines, lines=lines.lines[:MOST_LINES]),
        **_of_ledger(case),
        **_of_variance(case),
    )


def _of_ledger(case: Case) -> dict[str, Any]:
    if case.trace is None or case.ledger is None:
        return {}
    judged, ledger = quality(case.trace), case.ledger
    remarks = (*judged.notes, *ledger.notes)
    if case.series is not None and ledger.kind == "cpu":
        remarks = case.trace.notes  # a user of the CPU expects no GPU events
    return {
        "steps": tuple(StepTime(s.index, s.total_ns, s.slices) for s in ledger.steps),
        "marked": ledger.marked,
        "gpu": ledger.gpu,
        "problems": judged.problems,
        "remarks": remarks,
    }


def _of_variance(case: Case) -> dict[str, Any]:
    if case.variance is None:
        return {}
    return {
        "variance_shares": case.variance.shares,
        "why_no_variance_shares": case.variance.reason,
        "kernel_variance": case.variance.kernels,
        "slowest": tuple(case.variance.slowest),
    }


def _with_capture(explanation: Explanation, seen: Capture) -> Explanation:
    return msgspec.structs.replace(
        explanation,
        abstained=(*seen.gaps, *explanation.abstained),
        measured=seen.measured.period,
        distortion=seen.distortion,
        notes=msgspec.to_builtins(seen.notes),
        failed=seen.failed,
        interrupted=seen.interrupted,
    )
