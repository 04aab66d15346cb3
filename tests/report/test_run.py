from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from steadytorch.report.run import WIDTH, advice, headline, render_run
from steadytorch.results.watched import Watched

from .measured import MS, series
from .watched import watched


def text_of(result: Watched) -> str:
    console = Console(file=StringIO(), width=WIDTH, highlight=False)
    render_run(console, "train.py", result)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "fields", [{}, {"failed": "ValueError: boom " * 20, "interrupted": True}, {"findings": ()}]
)
def test_summary_fits_thirty_lines_of_eighty_columns(fields):
    lines = text_of(watched(**fields)).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80


def test_longest_texts_still_fit():
    full = watched()
    words = {"title": "t " * 200, "fix": "f " * 200, "evidence": ("e " * 200,)}
    long = [msgspec.structs.replace(full.findings[0], information=False, **words)] * 5
    slow = [msgspec.structs.replace(s, what=("w " * 300,)) for s in full.slowest]
    ended = {"failed": "f " * 200, "interrupted": True}
    result = watched(findings=tuple(long), slowest=tuple(slow), **ended)
    lines = text_of(result).splitlines()
    fixes = [line for line in lines if set(line.removeprefix("     fix:")) <= set("f ")]
    assert len(lines) - len(fixes) + len(long[:3]) <= 30
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("count", [1, 3])
def test_fixes_are_wrapped_and_whole(count):
    fix = " ".join(f"word{number}" for number in range(60))
    long = msgspec.structs.replace(watched().findings[0], information=False, fix=fix)
    words = text_of(watched(findings=(long,) * count)).split()
    assert words.count("word59") == count
    assert "…" not in "".join(words)


def test_a_long_tail_is_never_called_steady():
    samples = series(slow={i: 50 * MS for i in range(800, 1000)})
    settled = msgspec.structs.replace(samples, steady=True, why_unsteady=None)
    drifting = msgspec.structs.replace(samples, steady=False, why_unsteady="drifts by +9 %")
    for measured, told in ((settled, "no drift"), (drifting, "drift not excluded: drifts by")):
        lines = list(headline(watched(measured=measured)))
        assert lines[1].startswith(told)
        assert not any("steady" in line for line in lines)


def test_remarks_are_printed():
    text = text_of(watched(remarks=("No step stood out: no trace was kept.",)))
    assert "No step stood out: no trace was kept." in text.splitlines()


@pytest.mark.parametrize(
    ("trains", "told"),
    [
        (True, "steady.Workload.training(model, inputs, loss, optimizer)"),
        (False, "(model, inputs)"),
    ],
)
def test_advice_names_what_a_factory_returns(trains, told):
    slices = {"forward": (MS,), "backward": (MS * trains,)}
    (line,) = advice(watched(slices_ns=slices))
    assert line.endswith(f"steady explain FILE:FACTORY; FACTORY() returns {told}")
    assert len(line) <= 2 * WIDTH


def test_summary_names_steps_overhead_slices_and_slow_steps():
    text = text_of(watched())
    assert "1,000 optimizer steps" in text
    assert "overhead of watching 0.20 %" in text
    assert "the script's own code" in text
    assert "step 900" in text
    assert "a.py:3 main" in text


def test_kept_traces_are_told_in_one_line():
    full = watched()
    assert "and 8 more; --json lists them" in text_of(full)
    folder = "/srv/a b/" + "x" * 100
    slow = [msgspec.structs.replace(s, trace=f"{folder}/{s.name}") for s in full.slowest[:3]]
    lines = text_of(watched(slowest=(*slow, *full.slowest[3:]))).splitlines()
    (line,) = (line for line in lines if "kept" in line)
    assert line.startswith("  3 traces kept; open one: steady explain '/srv/a b/xxx")
    assert len(line) <= 80
    assert len(lines) <= 30


def test_script_without_steps_says_so():
    text = text_of(watched(measured=None, slices_ns={}, slowest=(), findings=()))
    assert "no steps found" in text


def test_slices_of_a_step_add_up():
    result = watched()
    total = sum(result.mean_slices_ns().values())
    assert total == pytest.approx(sum(result.measured.samples_ns) / 1000)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Watched) == result
