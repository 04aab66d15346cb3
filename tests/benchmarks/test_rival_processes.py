"""Verdicts over fresh processes."""

from __future__ import annotations

from random import Random

import pytest
from rival_arms import Arm
from rival_processes import anew, close, over_processes

from .rivalry import judgement, row


class Scripted:
    """A worker whose iterations all take the same time."""

    def __init__(self, ns):
        self.ns, self.alive = ns, True

    def call(self, method, deadline_s, metric, count):
        assert self.alive
        return [round(self.ns)] * count

    def kill(self):
        self.alive = False


told = []


def sets(*times):
    """One set of arms per mapping from option to ns."""
    given = iter(times)

    def started():
        return [Arm(name, Scripted(ns), stage="ready") for name, ns in next(given).items()]

    return anew(started, len(times), ("period",), 0.0, Random(0), told.append)


def rows():
    first = {"period": judgement(0.04, "slower")}
    return [
        row("net", "steadytorch", 10.4),
        row("net", "freezing", 10.0, ours_against_it=first),
        row("net", "eager", 30.0, ours_against_it={"period": judgement(-0.65)}),
    ]


def test_those_that_may_be_the_best_are_close_to_it_and_right():
    given = [*rows(), row("net", "compile", 10.9), row("net", "wrong", 9.9, error=0.2)]
    assert close(given) == ["freezing", "compile"]
    assert close(rows()[:1]) == []


def test_the_best_by_latency_counts_as_well():
    given = [*rows(), row("net", "graph", 12.0, latency_ms=9.0)]
    assert close(given) == ["freezing", "graph"]


def test_the_verdict_is_of_one_estimate_per_process_and_not_of_the_first():
    found = rows()
    over_processes(
        found,
        sets(
            {"steadytorch": 9.9e6, "freezing": 10e6},
            {"steadytorch": 10.1e6, "freezing": 10e6},
            {"steadytorch": 10.1e6, "freezing": 10.2e6},
        ),
    )
    ours, best, eager = found
    claim = best["ours_against_it"]["period"]
    assert (claim["processes"], claim["claim"]) == (3, "machine")
    assert claim["estimate"] == pytest.approx(-0.0034, abs=1e-3)
    assert claim["low"] < claim["estimate"] < claim["high"]
    assert claim["verdict"] == "undecided"
    assert ours["process_period_ms"] == [9.9, 10.1, 10.1]
    assert [set(each["period"]) for each in best["process_block_medians_ns"]] == [
        {10e6},
        {10e6},
        {10.2e6},
    ]
    assert (ours["period_ms"], best["period_ms"]) == (10.1, 10.0)
    assert best["first"]["ours_against_it"]["period"]["estimate"] == 0.04
    assert ours["first"]["period_ms"] == 10.4
    assert eager == rows()[2]


def test_one_that_failed_in_a_process_counts_in_the_others():
    taken = sets(*[{"steadytorch": 9e6, "freezing": 10e6}] * 4)
    taken[1][1].reject("segmentation fault")
    found = rows()
    over_processes(found, taken)
    assert found[1]["ours_against_it"]["period"]["processes"] == 3
    assert found[1]["ours_against_it"]["period"]["verdict"] == "faster"
    assert len(found[0]["process_period_ms"]) == 4


def test_a_row_of_what_failed_stays_one():
    failed = {**row("net", "steadytorch", 1.0), "period_ms": None, "failed": "died"}
    found = [dict(failed), *rows()[1:]]
    over_processes(found, sets({"steadytorch": 9e6, "freezing": 10e6}))
    assert found[0] == failed


def test_without_ours_in_any_the_rows_say_what_was_timed():
    found = rows()
    over_processes(found, sets({"freezing": 11e6}))
    assert found[1]["ours_against_it"] is None
    assert found[1]["period_ms"] == 11.0
