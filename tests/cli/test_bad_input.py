from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from steadytorch.errors import PlanError, UsageError
from steadytorch.measure import noise
from steadytorch.tune.session import Session

from .conftest import only_line


@pytest.fixture
def no_search(monkeypatch):
    """Fails the test where a search is begun."""

    def search(self, watcher=None):
        raise AssertionError("a search was begun")

    monkeypatch.setattr(Session, "search", search)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resnet5"], ["unknown workload 'resnet5'", "did you mean", "resnet50"]),
        (["vit_b16"], ["vit_b_16"]),
        (["zzz"], ["unknown workload 'zzz'", "use a bundled name"]),
        (["torchvisio:resnet18"], ["torchvisio", "torchvision"]),
        (["nothing.py:small"], ["file not found: nothing.py"]),
        (["tiny.py"], ["tiny.py needs a factory name"]),
        (["tiny.py:smal"], ["no factory 'smal'", "did you mean small"]),
        (["broken.py:small"], ["broken.py:3", "def small(:"]),
        (["tiny.py:small", "--input", "2y64"], ["'2y64' is not a shape", "64x3x224x224"]),
        (["tiny.py:small", "--input", "2x64:float33"], ["float33", "float32"]),
        (["tiny.py:small", "--batch", "4", "--input", "4x64"], ["cannot be combined"]),
        (["tiny.py:small", "--budget", "soon"], ["'soon' is not a time", "90s"]),
        (["tiny.py:small", "--budget", "0s"], ["0s"]),
        (["tiny.py:small", "--budget", "-3m"], ["-3m"]),
        (["tiny.py:small", "--max-memory", "lots"], ["'lots' is not a size", "8GiB"]),
        (["tiny.py:small", "--tolerance", "7"], ["tolerance 7.0", "between 0 and 1"]),
        (["tiny.py:small", "--device", "tpu"], ["tpu"]),
        (["tiny.py:small", "--devices", "cpu,cpu"], ["needs GPUs"]),
        (["tiny.py:small", "--devices", "tpu"], ["unknown device 'tpu'"]),
        (["--list", "tiny.py", "--devices", "all"], ["--devices does not apply to --list"]),
        (["tiny.py:small", "--mode", "strict"], ["no stored plan for", "no plan is stored"]),
        (["tiny.py:small", "--train"], ["train"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_that_names_it(steady, folder, no_search, words, said):
    (folder / "broken.py").write_text("import torch\n\ndef small(:\n    pass\n")
    ended = steady("tune", *words, "--store", "plans")
    assert ended.code == 2
    line = only_line(ended.err)
    for part in said:
        assert part in line


def test_a_factory_that_raises_is_shown_with_its_place(steady, no_search):
    ended = steady("tune", "tiny.py:raising")
    assert ended.code == 2
    first, *frames = ended.err.splitlines()
    assert first == "steady: tiny.py:raising raised RuntimeError: the data are missing"
    assert any("tiny.py:" in frame and "in raising" in frame for frame in frames)
    assert "Traceback" not in ended.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [["tune", "tiny.py:small"], ["demo"], ["doctor"]])
def test_a_device_that_is_not_there_ends_with_3(steady, no_search, command):
    ended = steady(*command, "--device", "cuda")
    assert ended.code == 3
    assert "cuda" in only_line(ended.err).lower()


def test_names_are_not_taken_for_markup(steady, folder, no_search):
    (folder / "[bold].py").write_text((folder / "tiny.py").read_text())
    ended = steady("tune", "[bold].py:small", "--mode", "strict")
    assert ended.code == 2
    assert "[bold].py:small" in ended.out


# -- files that cannot be written ---------------------------------------------------------------


@pytest.mark.parametrize("command", [["tune", "tiny.py:small"], ["demo"], ["doctor"]])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no/such/folder/out.json", "there is no folder no/such/folder"),
        ("tiny.py/out.json", "there is no folder tiny.py"),
        (".", "is a directory"),
    ],
)
def test_a_result_that_cannot_be_written_ends_it_before_the_work(
    steady, no_search, monkeypatch, command, path, why
):
    def measured(device):
        raise AssertionError("work was begun")

    monkeypatch.setattr(noise, "noise_floor", measured)
    ended = steady(*command, "--json", path)
    assert (ended.code, ended.out) == (2, "")
    assert why in only_line(ended.err)


def test_the_early_look_leaves_no_file_behind(steady, folder, no_search):
    steady("tune", "resnet5", "--json", "out.json")
    assert not (folder / "out.json").exists()


def test_a_result_file_without_permission_is_refused(steady, folder, no_search, monkeypatch):
    (folder / "out.json").write_text("{}")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anything
    ended = steady("tune", "tiny.py:small", "--json", "out.json")
    assert (ended.code, ended.out) == (2, "")
    assert "out.json cannot be written: no permission" in only_line(ended.err)


# -- the plan store -----------------------------------------------------------------------------


def test_an_empty_store_is_no_error(steady):
    ended = steady("plans", "list", "--store", "plans")
    assert (ended.code, ended.err) == (0, "")
    assert "no plans in" in ended.out


@pytest.mark.parametrize("name", ["0123", "", "../../etc", "[red]"])
def test_an_unknown_plan_is_one_line(steady, name):
    ended = steady("plans", "show", name, "--store", "plans")
    assert (ended.code, ended.out) == (PlanError.exit_code, "")
    assert f"no plan with id {name!r}" in only_line(ended.err)


def test_a_store_that_is_a_file_is_refused(steady):
    ended = steady("plans", "list", "--store", "tiny.py")
    assert ended.code == UsageError.exit_code
    assert "tiny.py" in only_line(ended.err)


def test_a_file_in_the_store_that_is_no_plan_is_listed_as_such(steady, folder):
    inside = folder / "plans" / ("0" * 64)
    inside.mkdir(parents=True)
    (inside / f"{'1' * 64}.json").write_text("\x1b[2J not a plan")
    ended = steady("plans", "list", "--store", "plans")
    assert (ended.code, ended.err) == (0, "")
    assert "is not a plan" in " ".join(ended.out.split())
    assert "\x1b" not in ended.out


@pytest.mark.parametrize("wrong", [("--batch", "x"), ("--nope",)])
def test_standard_output_is_back_after_a_wrong_option(steady, wrong):
    before, where = sys.stdout, os.fstat(1)
    ended = steady("measure", "resnet18", "--json", "-", *wrong)
    assert (ended.code, ended.out) == (2, "")
    assert sys.stdout is before
    assert os.path.samestat(os.fstat(1), where)


# -- searches -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_inputs_that_do_not_fit_end_it_with_the_error_of_the_workload(steady, folder):
    ended = steady("tune", "tiny.py:unfit", "--budget", "60s", "--json", "out.json", "--quiet")
    assert (ended.code, ended.out) == (2, "")
    line = only_line(ended.err)
    assert "the untouched workload fails" in line
    assert "mat1 and mat2 shapes cannot be multiplied" in line


def test_a_budget_too_small_for_the_baseline_says_so(steady):
    ended = steady("tune", "tiny.py:slow", "--budget", "500ms", "--quiet")
    assert (ended.code, ended.out) == (2, "")
    assert "is too small" in only_line(ended.err)
    assert "--budget" in ended.err or "give at least" in ended.err


def test_a_search_from_end_to_end(steady, folder, nothing_left):
    """One search, and then what there is to do with its plan."""
    words = ["tiny.py:small", "--store", "plans"]
    ended = steady("tune", *words, "--budget", "12s", "--quiet", "--json", "a.json")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    found = json.loads((folder / "a.json").read_text())
    assert (found["kind"], found["workload"], found["replayed"]) == ("tune", "tiny.py:small", False)
    assert found["candidates"][0]["transforms"] == []
    name, path = found["plan"]["id"], found["plan"]["path"]
    assert path.startswith(str(folder / "plans"))

    replayed = steady("tune", *words, "--mode", "strict", "--json", "b.json")
    assert (replayed.code, replayed.err) == (0, "")
    assert name in replayed.out
    again = json.loads((folder / "b.json").read_text())
    assert (again["replayed"], again["plan"]["id"]) == (True, name)

    listed = steady("plans", "list", "--store", "plans")
    assert name in listed.out
    for part in (name, name[:4], name.upper()):
        shown = steady("plans", "show", part, "--store", "plans")
        assert (shown.code, shown.err) == (0, "")
        assert path in "".join(shown.out.split())

    other = steady("tune", *words, "--batch", "3", "--mode", "strict")
    assert other.code == 2
    assert "no stored plan" in other.err


@pytest.mark.slow
def test_an_unwritable_store_costs_the_store_only(steady_process, folder):
    ended = steady_process(
        *("tune", "tiny.py:small", "--budget", "20s", "--store", "tiny.py/plans"),
        *("--json", "a.json"),
    )
    assert ended.returncode == 0
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "plans are kept in memory only" in ended.stderr
    found = json.loads((folder / "a.json").read_text())
    assert found["plan"]["path"] is None
    assert found["plan"]["id"] in ended.stdout
    assert "in memory only" in ended.stdout


@pytest.mark.parametrize("command", ["measure", "tune", "explain"])
def test_a_model_without_values_is_one_line(steady, command):
    ended = steady(command, "tiny.py:meta", "--device", "cpu")
    assert ended.code == 2
    assert "parameter 'weight' is on the meta device" in only_line(ended.err)
