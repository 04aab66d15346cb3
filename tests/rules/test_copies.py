from __future__ import annotations

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.copies import LEAST_SHARE, MOST, NAME, rule

from ..findings.cases import MS, US, kernel, memcpy, op, step, the, traced


def _copies(count, length, name="Memcpy HtoD (Pinned -> Device)"):
    copies = [
        memcpy(name, at * 20 * US, at * 20 * US + length, size=1000, correlation=at + 1)
        for at in range(count)
    ]
    return [step(1, 0, 10 * MS), *copies, kernel("k", 5 * MS, 9 * MS, correlation=1000)]


def test_long_copies_are_found():
    found = the(rule(traced(_copies(1, round(LEAST_SHARE * 10 * MS) + US))))
    assert found.id == NAME
    assert found.confidence == "high"
    assert found.recoverable_ns == (0, 501 * US)


def test_many_copies_are_found():
    found = the(rule(traced(_copies(MOST + 1, US))))
    assert found.confidence == "low"
    assert found.cost_ns == 11 * US
    assert "HtoD: 11 a step" in found.evidence[0]


def test_few_and_short_copies_are_not():
    assert rule(traced(_copies(MOST, US))) == ()


def test_copies_behind_kernels_cost_nothing():
    events = [*_copies(1, 2 * MS), kernel("k", 0, 4 * MS, correlation=50, stream=9)]
    assert rule(traced(events)) == ()


def test_each_direction_has_its_line_the_longest_first():
    events = _copies(11, US) + _copies(1, 600 * US, "Memcpy DtoD (Device -> Device)")
    found = the(rule(traced(events)))
    assert [line.split(":")[0] for line in found.evidence] == ["DtoD", "HtoD"]


def test_copies_within_the_device_are_not_to_be_pinned():
    found = the(rule(traced(_copies(MOST + 1, US, "Memcpy DtoD (Device -> Device)"))))
    assert "pinned" not in found.fix
    assert "keep data on the device" not in found.fix
    events = _copies(MOST + 1, US, "Memcpy DtoD (Device -> Device)") + _copies(1, US)
    assert "pinned" in the(rule(traced(events))).fix


def test_without_step_marks_copies_are_those_of_the_trace():
    copies = [
        memcpy("Memcpy HtoD (Pinned -> Device)", at * US, at * US + 500, size=10**7, correlation=at)
        for at in range(1, 1601)
    ]
    found = the(rule(traced(copies)))
    assert found.title.startswith("copies: 1600 transfers in the trace")
    assert "step" not in found.title
    assert found.evidence[0].startswith("HtoD: 1600 in the trace, 14.9 GiB,")


def test_a_trace_of_the_cpu_alone_abstains():
    assert isinstance(rule(traced([op("aten::mm", 0, MS)])), Abstention)


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case()), Abstention)
