from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import only_line

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CONV = RESULTS / "steady-conv_resnet50-b64-fp16_h200_2026-11-21.json"


@pytest.fixture
def result(folder):
    """A result in the working directory."""
    (folder / "result.json").write_bytes(CONV.read_bytes())
    return folder / "result.json"


def test_a_saved_result_becomes_a_page_and_one_line_says_where(steady, result):
    ended = steady("report", "result.json")
    assert (ended.code, ended.err) == (0, "")
    written = result.with_suffix(".html")
    page, script = ended.out.splitlines()
    assert page == f"result.html, {written.stat().st_size / 2**10:.0f} KiB"
    assert script.startswith("plotly-")
    assert script.endswith(".min.js, 4.59 MiB: charts need it beside the page")
    text = written.read_text("utf-8")
    document = json.loads(result.read_bytes())
    assert "24 distinct convolutions" in text
    for layer in document["layers"]:
        assert layer["problem"] in text


def test_the_page_goes_where_it_is_asked_for_and_quietly(steady, result):
    ended = steady("report", result, "--output", "page", "--quiet")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert (result.parent / "page").stat().st_size > 1000
    assert not result.with_suffix(".html").exists()


def test_what_a_command_has_just_saved_becomes_a_page(steady, folder):
    words = ["measure", "tiny.py:small", "--budget", "0.3s", "--device", "cpu", "--quiet"]
    assert steady(*words, "--json", "small.json").code == 0
    assert steady("report", "small.json", "--quiet").code == 0
    assert "tiny.py:small" in (folder / "small.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.json"], "none.json cannot be read: No such file or directory"),
        (["tiny.py"], "tiny.py is not a saved result: JSON is malformed"),
        (["."], ". cannot be read: Is a directory"),
        (["result.json", "--output", "result.json"], "result.json is the result itself"),
        (["result.json", "--output", "no/page.html"], "there is no folder no"),
        (["result.json", "--output", "/dev/null"], "/dev/null is no regular file"),
        (["rivals.json"], "holds a 'rivals' result; pages exist for measure, explain"),
        (["plan.json"], "plan.json is not a saved result: Object missing required field `kind`"),
        (["other.json"], "other.json holds a 'soak' result; pages exist for measure, explain"),
        (["new.json"], "new.json has schema 2, this version reads 1"),
        (["empty.json"], "empty.json is not a saved result: Input data was truncated"),
        (["bare.json"], "bare.json is not a saved result: Object missing required field `work"),
        ([], "Missing argument 'RESULT'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(steady, result, folder, words, said):
    (folder / "rivals.json").write_bytes((RESULTS / "rivals_h200_2026-11-23.json").read_bytes())
    (folder / "plan.json").write_text('{"key": {}, "payload": {}, "schema": 1, "sha256": ""}')
    (folder / "other.json").write_text('{"schema": 1, "kind": "soak"}')
    (folder / "new.json").write_text('{"schema": 2, "kind": "measure"}')
    (folder / "bare.json").write_text('{"schema": 1, "kind": "measure"}')
    (folder / "empty.json").write_text("")
    ended = steady("report", *words)
    assert (ended.code, ended.out) == (2, "")
    assert said in only_line(ended.err)
    assert result.read_bytes() == CONV.read_bytes()


def test_names_are_printed_without_what_a_terminal_would_act_on(steady, result):
    ended = steady("report", result.rename(result.with_name("\x1b[2J.json")))
    assert (ended.code, ended.err) == (0, "")
    assert "\\x1b[2J.html, " in ended.out
    assert "\x1b" not in ended.out
