from __future__ import annotations

import json

import msgspec
import pytest

from steadytorch.bench import compare as module
from steadytorch.device.facts import load_facts
from steadytorch.measure.measurement import summarize
from steadytorch.results.compare import CompareResult, Effect, Side
from steadytorch.results.measure import HostBlock, MeasureResult, ProcessMeasurement, SetUp, WarmUp
from steadytorch.results.saved import to_json

from .conftest import only_line

WORK = """
import torch
from torch import nn

class Work(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(100 * self.times):
            x = x + 1
        return x

def once():
    return Work(1).eval(), torch.ones(8)

def thrice():
    return Work(3).eval(), torch.ones(8)
"""


@pytest.fixture
def factories(folder):
    (folder / "work.py").write_text(WORK)
    return folder


def _effect(**fields):
    defaults = {"estimate": 0.05, "low": 0.03, "high": 0.07, "verdict": "slower"}
    rest = {"claim": "process", "pairs": 12, "processes": 1, "mde": 0.01}
    return Effect(**{**defaults, **rest, **fields})


@pytest.fixture
def live(monkeypatch):
    """Puts a scripted result in the place of live workers; returns what was asked for."""
    asked = []

    def script(effect=None, **fields):
        def compare(a, b, **arguments):
            asked.append((a, b, arguments))
            sides = Side(a[2], 1e6), Side(b[2], 1.05e6)
            return CompareResult.of(
                effect or _effect(), a=sides[0], b=sides[1], metric="latency", **fields
            )

        monkeypatch.setattr(module, "compare_live", compare)
        return asked

    return script


# -- real processes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_three_times_the_work_fails_the_gate(steady, factories):
    ended = steady(
        *("compare", "work.py:once", "work.py:thrice", "--fail-slower", "2%"),
        *("--processes", "3", "--json", "out.json", "--markdown", "page.md"),
    )
    assert ended.code == 1
    assert only_line(ended.err) == "gate failed: slower by more than 2.00%"
    assert "work.py:thrice is slower by" in ended.out
    found = json.loads((factories / "out.json").read_text())
    assert (found["verdict"], found["claim"], found["gate_failed"]) == ("slower", "machine", True)
    assert 0.02 < found["effect"]["low"] <= found["effect"]["estimate"] <= found["effect"]["high"]
    assert [len(pairs) >= 12 for pairs in found["samples_ns"]] == [True] * 3
    assert sum(map(len, found["samples_ns"])) == found["pairs"]
    page = (factories / "page.md").read_text()
    assert page.startswith("### work.py:thrice is slower by ")
    assert "| A | work.py:once |" in page
    assert page.endswith("Gate: failed: slower by more than 2.00%\n")


@pytest.mark.slow
def test_the_same_against_itself_passes_the_gate(steady, factories):
    ended = steady(
        *("compare", "work.py:once", "work.py:once", "--fail-slower", "2%"),
        *("--processes", "3", "--quiet"),
    )
    assert (ended.code, ended.out, ended.err) == (0, "", "")


# -- scripted -----------------------------------------------------------------------------------


def test_options_reach_the_comparison(steady, live):
    asked = live()
    ended = steady(
        *("compare", "tiny.py:small", "tiny.py:small@inference_mode", "--batch", "5"),
        *("--processes", "3", "--metric", "period", "--seed", "7", "--device", "cpu"),
        *("--budget", "90s"),
    )
    assert ended.code == 0
    ((a, b, arguments),) = asked
    assert (a[1], [str(spec) for spec in b[1]]) == ((), ["inference_mode"])
    assert a[0].inputs[0].shape == b[0].inputs[0].shape == (5, 64)
    del arguments["progress"], arguments["on_pair"]
    expected = {"processes": 3, "metric": "period", "device": "cpu", "seed": 7, "budget": 90}
    assert arguments == expected


@pytest.mark.parametrize(
    ("options", "processes"),
    [((), 1), (("--fail-slower", "2%"), 5), (("--fail-slower", "2%", "--processes", "4"), 4)],
)
def test_a_gate_is_replicated_over_processes(steady, live, options, processes):
    asked = live()
    steady("compare", "tiny.py:small", "tiny.py:small", *options)
    assert asked[0][2]["processes"] == processes


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_gate_on_too_few_processes_is_refused(steady, folder, processes):
    ended = steady("compare", "a.py:f", "b.py:f", "--fail-slower", "2%", "--processes", processes)
    assert ended.code == 2
    assert "a gate needs 3 or more" in only_line(ended.err)


@pytest.mark.parametrize(
    ("limit", "low", "code"),
    [
        ("2%", 0.03, 1),
        ("2", 0.03, 1),
        (" 2.5 % ", 0.03, 1),
        ("3%", 0.03, 0),
        ("0%", 0.0001, 1),
        ("2%", -0.01, 0),
        ("2%", None, 0),
    ],
)
def test_the_gate_fails_with_confidence_only(steady, live, limit, low, code):
    live(_effect(low=low, high=None if low is None else 0.9))
    ended = steady("compare", "tiny.py:small", "tiny.py:small", "--fail-slower", limit)
    assert ended.code == code


@pytest.mark.parametrize("limit", ["", "fast", "-1%", "2%%", "100%", "nan", "inf", "1e3", "2,5%"])
def test_a_limit_that_is_no_percentage_is_one_line(steady, live, limit):
    asked = live()
    ended = steady("compare", "tiny.py:small", "tiny.py:small", "--fail-slower", limit)
    assert (ended.code, ended.out, asked) == (2, "", [])
    assert f"--fail-slower {limit!r} is not a percentage such as 2%" in only_line(ended.err)


def test_a_workload_that_failed_midway_ends_with_1_whatever_the_gate(steady, folder, live):
    said = "the workload tiny.py:small fails: ValueError: \x1b[2J"
    live(_effect(low=None, verdict="undecided"), failed=said, note=f"stopped early: {said}")
    ended = steady(
        *("compare", "tiny.py:small", "tiny.py:small", "--fail-slower", "2%"),
        *("--json", "out.json"),
    )
    assert ended.code == 1
    assert only_line(ended.err) == said.replace("\x1b", "\\x1b")
    assert "\x1b" not in ended.out
    assert json.loads((folder / "out.json").read_text())["failed"] == said


def test_an_interrupted_comparison_ends_with_130(steady, folder, live):
    live(interrupted=True)
    ended = steady("compare", "tiny.py:small", "tiny.py:small", "--json", "out.json")
    assert ended.code == 130
    assert only_line(ended.err) == "interrupted; earlier pairs are above"
    assert json.loads((folder / "out.json").read_text())["interrupted"] is True


@pytest.mark.parametrize(
    ("path", "why"),
    [("no/folder/page.md", "there is no folder no/folder"), (".", "is a directory")],
)
def test_a_summary_that_cannot_be_written_ends_it_before_the_work(steady, live, path, why):
    asked = live()
    ended = steady("compare", "tiny.py:small", "tiny.py:small", "--markdown", path)
    assert (ended.code, ended.out, asked) == (2, "", [])
    assert why in only_line(ended.err)
    assert "--markdown" in ended.err


def test_a_summary_that_cannot_be_written_after_all_is_one_line(steady, folder, monkeypatch, live):
    live()
    monkeypatch.setattr("os.access", lambda path, mode: True)
    (folder / "page.md").symlink_to("/proc/none/page.md")
    ended = steady("compare", "tiny.py:small", "tiny.py:small", "--markdown", "page.md", "--quiet")
    assert ended.code == 2
    assert "--markdown page.md cannot be written" in only_line(ended.err)


# -- saved results ------------------------------------------------------------------------------

FIVE = (10.0e6, 10.1e6, 10.2e6, 9.9e6, 10.05e6)


@pytest.fixture
def save(folder):
    """Writes what steady measure --json writes, with these medians of processes."""

    def write(name, medians, **fields):
        facts = {**msgspec.to_builtins(load_facts("cpu")), **fields.pop("environment", {})}
        period = summarize([1000] * 60)
        processes = [
            ProcessMeasurement(
                period=msgspec.structs.replace(period, median_ns=median),
                latency=None,
                set_up=SetUp(0.1, WarmUp(1, 3, 1, 1), 1 << 20),
                resolved=True,
                host=HostBlock(1.0, 1.0, 0, 0, None, None, None, 0.0),
                device=None,
                unknown={},
            )
            for median in medians
        ]
        made = MeasureResult.of(processes, "process", medians[0], None, None)
        whole = json.loads(to_json(made, "resnet18", load_facts("cpu")))
        document = {**whole, "environment": facts, **fields}
        (folder / name).write_bytes(msgspec.json.encode(document))

    return write


def test_five_processes_each_claim_for_the_machine(steady, folder, save):
    save("a.json", FIVE)
    save("b.json", [1.1 * median for median in FIVE])
    ended = steady("compare", "a.json", "b.json", "--fail-slower", "5%", "--json", "out.json")
    assert ended.code == 1
    found = json.loads((folder / "out.json").read_text())
    assert (found["verdict"], found["claim"], found["pairs"]) == ("slower", "machine", 0)
    assert "5 processes a side; claim: machine" in ended.out


def test_one_process_each_is_undecided_and_says_what_to_do(steady, save):
    save("a.json", FIVE[:1])
    save("b.json", [2 * FIVE[0]])
    ended = steady("compare", "a.json", "b.json", "--fail-slower", "2%")
    assert (ended.code, ended.err) == (0, "")
    assert "cannot tell" in ended.out
    assert "claim: process" in ended.out
    assert "measure with --processes 5" in " ".join(ended.out.split())


def test_the_environment_is_that_of_the_measurements(steady, folder, save):
    elsewhere = {"device": "cuda", "name": "NVIDIA H200"}
    save("a.json", FIVE, environment=elsewhere)
    save("b.json", FIVE, environment=elsewhere)
    assert steady("compare", "a.json", "b.json", "--json", "out.json").code == 0
    found = json.loads((folder / "out.json").read_text())["environment"]
    assert (found["device"], found["name"]) == ("cuda", "NVIDIA H200")


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "cuda"), ("name", "Another\x1b[2J"), ("cores_logical", 999), ("mig_profile", "1g")],
)
def test_another_machine_is_refused(steady, save, field, value):
    save("a.json", FIVE)
    save("b.json", FIVE, environment={field: value})
    ended = steady("compare", "a.json", "b.json")
    assert (ended.code, ended.out) == (2, "")
    line = only_line(ended.err)
    assert f"a.json and b.json come from different machines ({field} " in line
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schema": 99}, "b.json has schema 99, this version reads"),
        ({"kind": "tune"}, "b.json holds a 'tune' result: pass one from steady measure"),
        ({"kind": "\x1b[2J\n"}, "holds a '\\x1b[2J\\n' result"),
        ({"processes": []}, "b.json holds invalid medians"),
        ({"environment": {"device": None}}, "b.json is not a saved result"),
    ],
)
def test_a_file_of_another_kind_is_one_line(steady, save, fields, said):
    save("a.json", FIVE)
    save("b.json", FIVE, **fields)
    ended = steady("compare", "a.json", "b.json")
    assert (ended.code, ended.out) == (2, "")
    assert said in only_line(ended.err)


def test_an_unreadable_file_is_one_line(steady, folder, save):
    save("a.json", FIVE)
    missing = steady("compare", "a.json", "none.json")
    assert missing.code == 2
    assert "none.json cannot be read: No such file" in only_line(missing.err)
    (folder / "b.json").write_text("{")
    broken = steady("compare", "a.json", "b.json")
    assert broken.code == 2
    assert "b.json is not a saved result" in only_line(broken.err)


@pytest.mark.parametrize("names", [("a.json", "resnet18"), ("resnet18", "a.json")])
def test_one_saved_and_one_live_are_refused(steady, save, names):
    save("a.json", FIVE)
    ended = steady("compare", *names)
    assert (ended.code, ended.out) == (2, "")
    assert "one of A and B is a saved result and the other is not" in only_line(ended.err)


@pytest.mark.parametrize(
    "option",
    [
        ("--metric", "latency"),
        ("--processes", "5"),
        ("--budget", "1m"),
        ("--batch", "2"),
        ("--device", "cuda"),
    ],
)
def test_options_of_live_comparisons_are_refused_for_saved_results(steady, folder, save, option):
    save("a.json", [10e6] * 5)
    save("b.json", [10e6] * 5)
    ended = steady("compare", "a.json", "b.json", *option)
    assert ended.code == 2
    assert f"{option[0]} is for live comparisons" in only_line(ended.err)
