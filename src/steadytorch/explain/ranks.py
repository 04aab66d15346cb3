"""Compare the traces of several ranks of one job, and name the ranks that delay the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.findings.figures import many
from steadytorch.ledger.ranks import IN_WATCH, Compared, RankSteps, compare, steps_of
from steadytorch.ledger.variability import FEWEST, share_of_variance
from steadytorch.results.explain import Abstention, Finding
from steadytorch.results.ranks import JobStep, LateRank, RankComparison, RankTimes
from steadytorch.rules.late_rank import LEAST_MATCH, LEAST_SHARE, NAME, Late, finding
from steadytorch.traces.events import Trace
from steadytorch.traces.quality import quality

CHANCE = 0.01
"""Maximum probability that equal ranks show this much lateness of one rank."""
ALL = "all ranks"
"""Key of the part of the variance that no rank causes alone."""
MOST_STEPS = 8
"""Maximum steps listed in a finding."""
_CHECK = "profile all ranks again and pass their traces to steady explain"
_UNSLOWED = "; the profiler slows launches, so also run the job under steady run, which does not"
_DRAWS = 10_000
_MOST_DEALT = 1_000_000
"""Steps assigned to random ranks at a time, to bound memory."""
_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


class RankFile(NamedTuple):
    """The trace of one rank, reduced to its steps.

    Attributes:
        path: of the trace.
        job: `Trace.job`.
        steps: the steps.
        problems: faults that make figures unreliable, one sentence each.
    """

    path: Path
    job: dict[str, Any]
    steps: RankSteps
    problems: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Lateness:
    """The latest rank (by index) and its delay at each step, shape (steps,)."""

    own: np.ndarray
    latest: np.ndarray
    late: np.ndarray

    def of(self, rank: int) -> np.ndarray:
        """Lateness of one rank at each step; 0 where another rank was the latest."""
        return np.where(self.latest == rank, self.late, 0.0)


def rank_file(trace: Trace, path: Path) -> RankFile:
    """Reduce the trace of a rank to its steps, which take much less memory.

    Args:
        trace: the trace.
        path: its file.
    """
    return RankFile(path, dict(trace.job), steps_of(trace), quality(trace).problems)


def compare_ranks(files: Sequence[RankFile], environment: DeviceFacts) -> RankComparison:
    """Compare the ranks of one job over the steps that all of them recorded.

    Args:
        files: two or more.
        environment: the device of the first.

    Raises:
        UsageError: a rank is given twice, the files are of different jobs or kinds, or share no
            step.
    """
    numbers, remark = _numbers(files)
    _check(files, numbers)
    order = sorted(range(len(files)), key=lambda place: numbers[place])
    files, ranks = [files[place] for place in order], [numbers[place] for place in order]
    compared, lateness, places = _late_places([each.steps for each in files])
    shares, why = _variance_shares(lateness, ranks)
    late = [_late_rank(place, ranks, compared, lateness, shares) for place in places]
    abstained = _abstained(files, compared)
    return RankComparison(
        environment=environment,
        ranks=tuple(_times(p, rank, files[p].path, compared) for p, rank in enumerate(ranks)),
        steps=tuple(
            JobStep(index=n, without_waiting_ns=round(own), latest=ranks[latest], late_ns=round(by))
            for n, own, latest, by in zip(
                compared.numbers, lateness.own, lateness.latest, lateness.late, strict=True
            )
        ),
        late=tuple(late),
        variance_shares=shares,
        why_no_variance_shares=why,
        findings=tuple(
            _finding(each, place, compared, files[place])
            for each, place in zip(late, places, strict=True)
        ),
        abstained=abstained,
        remarks=tuple(_remarks(files, ranks, remark, compared)),
    )


# -- which file is which rank -------------------------------------------------------------------


def _numbers(files: Sequence[RankFile]) -> tuple[list[int], str]:
    """Rank of each file, and a remark if the traces do not contain their ranks."""
    named = [each.job.get("rank") for each in files]
    if all(type(number) is int for number in named):
        return named, ""  # type: ignore[return-value]
    names = [each.path.name for each in files]
    matches = [_IN_NAME.search(name) for name in names]
    if all(matches):
        return [int(match[1]) for match in matches if match], "ranks are from the names of files"
    column = _differing_number(names)
    if column is not None:
        return column, "ranks are from the numbers in the names of files"
    return list(range(len(files))), "ranks are the places of the files: no trace names its rank"


def _differing_number(names: Sequence[str]) -> list[int] | None:
    """Values of the only number in which the file names differ; None if there is no such number."""
    if len({re.sub(r"\d+", "0", name) for name in names}) > 1:
        return None
    columns = zip(*(re.findall(r"\d+", name) for name in names), strict=True)
    differing = [column for column in columns if len(set(column)) > 1]
    return [int(value) for value in differing[0]] if len(differing) == 1 else None


def _check(files: Sequence[RankFile], numbers: Sequence[int]) -> None:
    for place, number in enumerate(numbers):
        first = numbers.index(number)
        if first < place:
            both = f"{files[first].path.name} and {files[place].path.name}"
            raise UsageError(f"{both} are both of rank {number}: pass one trace of each rank")
    for what, of in (
        ("ranks in the job", lambda each: each.job.get("world_size")),
        ("backend", lambda each: each.job.get("backend")),
        ("kind of trace", lambda each: each.steps.kind),
        ("step marks", lambda each: "yes" if each.steps.marked else "no"),
    ):
        for each in files[1:]:
            if of(each) != of(files[0]):
                raise UsageError(
                    f"the traces are not of one job: {what}: {of(files[0])} in "
                    f"{files[0].path.name}, {of(each)} in {each.path.name}"
                )
    if not set.intersection(*(set(each.steps.numbers) for each in files)):
        raise UsageError(
            "no step is in all traces: profile the same steps on each rank, with one "
            "torch.profiler.schedule"
        )


# -- who is late --------------------------------------------------------------------------------


def _late_places(ranks: Sequence[RankSteps]) -> tuple[Compared, _Lateness, list[int]]:
    """The compared steps, the lateness at each step, and the late ranks, the latest first."""
    choices = IN_WATCH if ranks[0].kind == "watch" else ((),)
    found = []
    for waits in choices:
        compared = compare(ranks, waits)
        lateness = _lateness(compared.own)
        found.append((compared, lateness, _late(compared, lateness)))
        if found[-1][2]:
            break
    return found[-1]


def _lateness(own: np.ndarray) -> _Lateness:
    latest = own.argmax(axis=0)
    mine = own.max(axis=0)
    return _Lateness(mine, latest, mine - _others(own, latest))


def _others(values: np.ndarray, rank: np.ndarray | int) -> np.ndarray:
    """Median of `values` over all ranks except `rank` at each step, shape (steps,)."""
    mine = np.arange(len(values))[:, None] == rank
    return np.nanmedian(np.where(mine, np.nan, values), axis=0)


def _late(compared: Compared, lateness: _Lateness) -> list[int]:
    ranks, steps = compared.total.shape
    if not _waits(compared) or steps < _least_steps(ranks):
        return []
    cost = np.array([lateness.of(rank).mean() for rank in range(ranks)])
    waited = [_waited(compared, rank) for rank in range(ranks)]
    found = [
        rank
        for rank in range(ranks)
        if cost[rank] >= LEAST_SHARE * compared.total.mean()
        and waited[rank] >= LEAST_MATCH * cost[rank]
    ]
    chance = _chance(lateness.late, cost) if found else cost
    return sorted((rank for rank in found if chance[rank] <= CHANCE), key=lambda r: -cost[r])


def _waited(compared: Compared, rank: int) -> float:
    """Mean time per step that the other ranks wait longer than `rank`."""
    return float((_others(compared.waiting, rank) - compared.waiting[rank]).mean())


def _chance(late: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Probability of each rank's mean lateness if all ranks were equal, shape (ranks,).

    Equal ranks are equally likely to be late at each step. Each of `_DRAWS` simulations assigns the
    lateness of every step to a random rank. The largest simulated mean of a rank is compared with
    each observed mean.
    """
    generator, ranks, steps = np.random.default_rng(0), len(cost), len(late)
    rows, exceeded = max(1, _MOST_DEALT // steps), np.ones(ranks)
    for start in range(0, _DRAWS, rows):
        count = min(rows, _DRAWS - start)
        dealt = generator.integers(0, ranks, (count, steps)) + ranks * np.arange(count)[:, None]
        sums = np.bincount(dealt.ravel(), np.tile(late, count), count * ranks)
        largest = sums.reshape(count, ranks).max(axis=1) / steps
        exceeded += (largest[:, None] >= cost * (1 - 1e-9)).sum(axis=0)
    return exceeded / (1 + _DRAWS)


def _least_steps(ranks: int) -> int:
    """Minimum number of steps for which one rank being always the latest is significant."""
    return 1 + int(np.ceil(np.log(1 / CHANCE) / np.log(ranks)))


def _waits(compared: Compared) -> bool:
    return bool(compared.waiting.any())


def _abstained(files: Sequence[RankFile], compared: Compared) -> tuple[Abstention, ...]:
    steps, least = len(compared.numbers), _least_steps(len(files))
    if files[0].steps.kind != "watch" and not compared.collectives:
        why = "the traces hold no collective: ranks did not wait for one another, or it is unseen"
        return (Abstention(NAME, why, "profile steps of the job that communicate"),)
    if steps < least:
        why = f"{many(steps, 'step')} in all traces; naming a late rank needs {least}"
        return (Abstention(NAME, why, f"profile {least} marked steps or more on each rank"),)
    return ()


# -- figures ------------------------------------------------------------------------------------


def _times(place: int, rank: int, path: Path, compared: Compared) -> RankTimes:
    exposed = compared.transfer[place].mean() + compared.waiting[place].mean()
    running = float(compared.communication[place].mean())
    return RankTimes(
        rank=rank,
        file=path.name,
        step_ns=float(compared.total[place].mean()),
        slices_ns={n: float(v[place].mean()) for n, v in compared.slices.items() if v.any()},
        transfer_ns=float(compared.transfer[place].mean()),
        waiting_ns=float(compared.waiting[place].mean()),
        communication_ns=running,
        overlap=float(1 - exposed / running) if running else None,
    )


def _variance_shares(
    lateness: _Lateness, ranks: Sequence[int]
) -> tuple[dict[str, float] | None, str | None]:
    if len(lateness.own) < FEWEST:
        steps = many(len(lateness.own), "step")
        return None, f"{steps}: variance shares need at least {FEWEST}, better 10"
    if not np.ptp(lateness.own):
        return None, "all steps took the same time"
    parts = {f"rank {rank}": lateness.of(place) for place, rank in enumerate(ranks)}
    parts[ALL] = lateness.own - lateness.late
    return {name: share_of_variance(part, lateness.own) for name, part in parts.items()}, None


def _late_rank(
    place: int,
    ranks: Sequence[int],
    compared: Compared,
    lateness: _Lateness,
    shares: dict[str, float] | None,
) -> LateRank:
    at = lateness.latest == place
    every = {**compared.slices, "transfer": compared.transfer}
    excess = {
        name: float((values[place] - _others(values, place))[at].mean())
        for name, values in every.items()
    }
    return LateRank(
        rank=ranks[place],
        slice=max(excess, key=lambda name: excess[name]),
        late_ns=float(lateness.of(place).mean()),
        steps=tuple(np.array(compared.numbers)[at].tolist()),
        variance_share=None if shares is None else shares[f"rank {ranks[place]}"],
    )


def _finding(late: LateRank, place: int, compared: Compared, file: RankFile) -> Finding:
    values = {**compared.slices, "transfer": compared.transfer}[late.slice]
    watched = file.steps.kind == "watch"
    waits = "forward and backward" if watched else "collectives"
    listed = ", ".join(map(str, late.steps[:MOST_STEPS]))
    more = ", ..." if len(late.steps) > MOST_STEPS else ""
    return finding(
        Late(late.rank, late.slice, late.late_ns, waits, _waited(compared, place)),
        step_ns=float(compared.total.mean()),
        mine_ns=float(values[place].mean()),
        usual_ns=float(_others(values, place).mean()),
        confidence="medium" if watched else "high",
        look_at=f"steady explain {file.path.name}",
        check=_CHECK + (_UNSLOWED if late.slice == "idle_launch" else ""),
        more=(
            f"the latest rank at {len(late.steps)} of {many(len(compared.numbers), 'step')}: "
            f"{listed}{more}",
        ),
        variance_share=late.variance_share,
    )


def _remarks(
    files: Sequence[RankFile], ranks: Sequence[int], remark: str, compared: Compared
) -> Iterator[str]:
    size = files[0].job.get("world_size")
    if type(size) is int and size > len(files):
        yield (
            f"{len(files)} of the job's {size} ranks: the others may be later, and transfer "
            "includes waiting for them"
        )
    if remark:
        yield remark
    recorded = max(len(each.steps.numbers) for each in files)
    if recorded > len(compared.numbers):
        yield f"{len(compared.numbers)} of {many(recorded, 'step')} are in all traces"
    if not files[0].steps.marked:
        yield "no step marks: each trace counts as one step; call the profiler's step()"
    if compared.unmatched:
        yield (
            f"{compared.unmatched:,} of {many(compared.collectives, 'collective')} have no "
            "counterpart on other ranks; their time counts as transfer"
        )
    if files[0].steps.kind == "watch":
        yield "recorded by a watch: waiting is what exceeds the fastest rank in backward"
    for each, rank in zip(files, ranks, strict=True):
        yield from (f"rank {rank}: {problem}" for problem in each.problems)
