from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from steadytorch.report.ranks import render_ranks
from steadytorch.results.explain import Abstention, Finding
from steadytorch.results.machine import DeviceFacts
from steadytorch.results.ranks import JobStep, LateRank, RankComparison, RankTimes

FINDING = Finding(
    id="late-rank",
    source="synchronisation",
    title="rank 3 is late by 20.0 ms a step (40 %), in cpu_data_wait",
    evidence=("cpu_data_wait: 21 ms a step on rank 3, 1 ms on the others", "e" * 30, "at 1, 2"),
    fix="Look at rank 3 alone.",
    check="again",
    false_alarm="never",
)


def ranks(size=4, steps=10, **fields):
    one = [
        RankTimes(
            rank=rank,
            file=f"rank{rank}.json",
            step_ns=50e6,
            slices_ns={"cpu_compute": 20e6, "cpu_data_wait": 1e3 * rank},
            transfer_ns=5e6,
            waiting_ns=1e6 * min(size - rank, 8),
            communication_ns=8e6,
            overlap=0.25,
        )
        for rank in range(size)
    ]
    of = tuple(
        JobStep(index=n, without_waiting_ns=10**7 + n, latest=n % size, late_ns=10**6)
        for n in range(steps)
    )
    shares = {f"rank {rank}": 1 / (size + 1) for rank in range(size)} | {
        "all ranks": 1 / (size + 1)
    }
    given = {"ranks": tuple(one), "steps": of, "variance_shares": shares, "findings": (FINDING,)}
    return RankComparison(environment=DeviceFacts(device="cpu"), **(given | fields))


def text_of(result, everything=False):
    file = StringIO()
    render_ranks(Console(file=file, width=80, highlight=False), result, everything)
    return file.getvalue()


LONG = {"title": "t " * 200, "evidence": ("e " * 200,) * 3, "fix": "f " * 200}
LATE = tuple(
    LateRank(rank=rank, slice="cpu_gc", late_ns=1.0, steps=(1,), variance_share=None)
    for rank in (63, 5)
)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"size": 2, "steps": 1, "variance_shares": None, "why_no_variance_shares": "w " * 200},
        {"size": 64, "late": LATE, "remarks": ("r " * 200,) * 9},
        {
            "size": 1000,
            "findings": (msgspec.structs.replace(FINDING, **LONG),) * 5,
            "remarks": ("r " * 200,) * 9,
        },
        {"findings": (msgspec.structs.replace(FINDING, **LONG),), "remarks": ("r " * 200,) * 9},
        {"findings": (), "abstained": (Abstention("late-rank", "w " * 200, "r " * 200),)},
    ],
    ids=["usual", "two ranks", "many ranks", "longest", "one long finding", "abstained"],
)
def test_it_fits_thirty_lines_of_eighty_columns(fields):
    lines = text_of(ranks(**fields)).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80


def test_it_says_who_is_late_and_shows_each_rank():
    text = text_of(ranks())
    assert "4 ranks, 10 steps: 50.00 ms a step" in text
    assert "1. rank 3 is late by 20.0 ms a step (40 %), in waiting for data" in text
    assert "waiting for data: 21 ms a step on rank 3" in text
    assert "work hides 25 % of the communication" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    # own work: the step of 50 ms without 5 ms of transfer and 1 ms of waiting
    assert "3 44.00 ms 5.00 ms 1.00 ms 2 20 % products, convolutions" in rows


def test_late_ranks_have_a_line_among_many():
    text = text_of(ranks(size=64, late=LATE))
    rows = [line.split()[0] for line in text.splitlines() if "products" in line]
    assert rows[:2] == ["63", "5"]
    assert "and 56 more" in text


def test_without_findings_it_says_so():
    assert "No rank is late more than chance explains" in text_of(ranks(findings=()))
    abstained = (Abstention("late-rank", "3 steps", "profile more"),)
    text = text_of(ranks(findings=(), abstained=abstained))
    assert "late-rank: cannot tell: 3 steps; profile more" in text
    assert "No rank" not in text


def test_hostile_names_are_escaped():
    assert "\x1b" not in text_of(ranks(remarks=("ranks of \x1b[2J.json",)))


def test_all_shows_every_rank_finding_and_remark():
    findings = tuple(msgspec.structs.replace(FINDING, title=f"title {n}") for n in range(5))
    result = ranks(size=64, findings=findings, remarks=tuple(f"remark {n}" for n in range(9)))
    text = text_of(result, everything=True)
    assert text.count("products, convolutions") == 64
    assert all(f"title {n}" in text for n in range(5))
    assert all(f"remark {n}" in text for n in range(9))
    assert "--all" not in text
    assert text_of(result).count("--all") == 2
