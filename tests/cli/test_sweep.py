"""`steady tune --list`; what tunes is `tuning.py`, in real worker processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.cli import steady as root
from steadytorch.cli import sweep as sweep_command
from steadytorch.cli.submit import worker_command
from steadytorch.cli.sweep import read_items
from steadytorch.cli.tune import tune
from steadytorch.errors import UsageError
from steadytorch.sweeps.leases import Leases

from .conftest import only_line

PATIENCE_S = 120


@pytest.fixture
def fake(monkeypatch, folder):
    """Makes the worker processes of this process run `tuning.py`."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(sweep_command, "HANDLER", "tuning:Handler")
    monkeypatch.setenv("STEADYTORCH_SWEEP_LEASE", "0.5")
    return folder


def listed(folder, *lines):
    path = folder / "list.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def context(path, *words):
    return made(["--list", str(path), *words])


def made(words):
    """The context of `steady tune`, below that of `steady`, whose help option it inherits."""
    return tune.make_context("tune", words, click.Context(root, **root.context_settings))


def read(folder, *lines, words=()):
    path = listed(folder, *lines)
    return read_items(path, context(path, *words))


# -- the list -----------------------------------------------------------------------------------


def test_a_line_is_a_workload_with_options(folder):
    found = read(folder, "# a comment", "", "  a.py:f --batch 4 --train # why", "'b c' --seed 1")
    assert [item.text for item in found] == ["a.py:f --batch 4 --train", "'b c' --seed 1"]
    assert found[0].options["batch"] == 4
    assert found[0].options["train"] is True
    assert found[1].options["workload"] == "b c"


def test_options_beside_the_list_are_defaults(folder):
    words = ("--budget", "9s", "--precision", "fp16", "--input", "2x64", "--train")
    found = read(folder, "a", "b --budget 5s --input 4x64", words=words)
    assert [item.options["budget"] for item in found] == ["9s", "5s"]
    assert [item.options["inputs"] for item in found] == [("2x64",), ("4x64",)]
    assert {item.options["precision"] for item in found} == {"fp16"}
    assert {item.options["train"] for item in found} == {True}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("a", "  a  # again", True),
        ("a --batch 4 --seed 1", "--seed 1 a --batch 4", True),
        ("a --budget 9s", "a --budget 10s", True),
        ("a --batch 4", "a --batch 8", False),
        ("a", "a --train", False),
        ("a", "a --precision fp16", False),
        ("a --device cpu", "a --device cuda", False),
        ("a.py:f", "a.py:g", False),
    ],
)
def test_lines_with_one_meaning_are_one_workload(folder, first, second, same):
    assert len(read(folder, first, second)) == (1 if same else 2)


def test_the_device_of_a_worker_does_not_distinguish_workloads(folder):
    ids = {read(folder, "a", words=("--device", f"cuda:{n}"))[0].id for n in range(2)}
    assert len(ids) == 1


def test_a_changed_file_is_another_workload(folder):
    before = read(folder, "tiny.py:small")[0].id
    (folder / "tiny.py").write_text("# changed")
    assert read(folder, "tiny.py:small")[0].id != before


def test_every_wrong_line_is_named_at_once(steady, folder):
    path = listed(
        folder,
        "a --bacth 3",
        '"x',
        "fine",
        "--batch 3",
        "b --json x",
        "c --batch x",
        "d e",
        "f --budget soon",
        "g --max-memory lots",
        "h --precision fp3",
    )
    ended = steady("tune", "--list", path)
    assert ended.code == 2
    first, *lines = ended.err.splitlines()
    assert "has lines that cannot be read" in first
    assert [line.split(":")[0].strip() for line in lines] == [
        f"line {number}" for number in (1, 2, 4, 5, 6, 7, 8, 9, 10)
    ]
    for line, part in zip(
        lines,
        ("--bacth", "quotation", "WORKLOAD", "--json", "'x'", "(e)", "soon", "lots", "fp3"),
        strict=True,
    ):
        assert part in line
    assert not path.with_name("list.txt.sweep").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"# only this\n\n", "is empty"), (b"\xff\xfe\x00", "is not UTF-8")],
)
def test_a_list_without_workloads_is_refused(steady, folder, content, said):
    (folder / "list.txt").write_bytes(content)
    ended = steady("tune", "--list", "list.txt")
    assert ended.code == 2
    assert said in only_line(ended.err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--list", "nothing.txt"], "nothing.txt is not a file"),
        (["--list", "."], "is not a file"),
        (["--list", "list.txt", "resnet18"], "resnet18 and --list exclude each other"),
        (["--list", "list.txt", "--shard", "5/4"], "'5/4'"),
        (["--list", "list.txt", "--all"], "--all and --list"),
        (["--list", "list.txt", "--sweep", "/proc/x"], "/proc/x cannot be used"),
        (["--list", "list.txt", "--partition", "p"], "--partition needs --submit"),
        (["--list", "list.txt", "--submit", "2", "--status"], "--submit prints no table"),
        (["resnet18", "--status"], "--status needs --list"),
        (["resnet18", "--sweep", "x"], "--sweep needs --list"),
        ([], "Missing argument 'WORKLOAD'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line(steady, folder, words, said):
    listed(folder, "a")
    ended = steady("tune", *words)
    assert ended.code == 2
    assert said in only_line(ended.err)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=6))
def test_any_text_is_read_or_refused(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lists") / "list.txt"
    path.write_text("\n".join(lines), "utf-8", newline="")
    try:
        found = read_items(path, context(path))
    except UsageError:
        return
    for item in found:
        assert shlex.split(item.text)
    assert len({item.id for item in found}) == len(found)


# -- the work -----------------------------------------------------------------------------------


def test_a_sweep_from_end_to_end(steady, fake):
    listed(fake, "good --batch 2", "raises", "good", "good --batch 2", "dies")
    words = ("tune", "--list", "list.txt", "--budget", "9s")
    ended = steady(*words, "--json", "out.json")
    assert ended.code == 1
    assert ended.err == ""
    found = json.loads((fake / "out.json").read_text())
    assert (found["kind"], found["schema"], found["list"]) == ("sweep", 1, "list.txt")
    rows = found["rows"]
    assert [(row["workload"], row["status"]) for row in rows] == [
        ("good --batch 2", "done"),
        ("raises", "failed"),
        ("good", "done"),
        ("dies", "failed"),
    ]
    assert rows[0]["plan"]["id"] == "abcdef012345"
    assert rows[0]["worker"].endswith(f":{os.getpid()}")
    assert rows[0]["seconds"] > 0
    assert rows[1]["reason"] == "RuntimeError: the data are missing"
    assert rows[3]["reason"] == "killed (SIGKILL)"
    table = ended.out.partition("gain, 99 % interval")[2]
    assert table.count("abcdef012345") == 2
    assert "1.32x [1.28, 1.36]" in table
    assert "2 of 4 workloads done, 2 failed" in table
    assert (fake / "tuned.log").read_text().splitlines() == [
        "good 2 9.0 auto replay",
        "raises None 9.0 auto replay",
        "good None 9.0 auto replay",
        "dies None 9.0 auto replay",
    ]
    again = steady(*words, "--status")
    assert (again.code, again.out.strip()) == (1, table_of(ended.out).strip())
    assert not list((fake / "list.txt.sweep").glob("*.lease"))


def table_of(output):
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["workload", "plan"])
    return "\n".join(lines[start:])


def test_a_second_start_searches_nothing_but_retries_when_asked(steady, fake):
    listed(fake, "good", "raises")
    assert steady("tune", "--list", "list.txt", "--quiet").out == ""
    assert steady("tune", "--list", "list.txt", "--quiet").code == 1
    assert len((fake / "tuned.log").read_text().splitlines()) == 2
    assert steady("tune", "--list", "list.txt", "--retry").code == 1
    assert (fake / "tuned.log").read_text().split()[::5] == ["good", "raises", "raises"]


def test_status_does_no_work(steady, fake):
    listed(fake, "good")
    ended = steady("tune", "--list", "list.txt", "--status", "--json", "-")
    assert ended.code == 1
    assert [row["status"] for row in json.loads(ended.out)["rows"]] == ["waiting"]
    assert "0 of 1 workload done, 1 waiting" in ended.err
    assert not (fake / "list.txt.sweep").exists()


def test_a_lease_of_a_dead_host_is_taken_over(steady, fake):
    path = listed(fake, "good", "good --batch 2")
    (fake / "shared").mkdir()
    item = read_items(path, context(path))[0]
    assert Leases(fake / "shared", "dead:1").claim(item.id, None) is not None
    words = ("tune", "--list", path, "--sweep", "shared")
    assert "1 running" in steady(*words, "--status").out
    ended = steady(*words)
    assert ended.code == 0
    assert "waiting for 1 workload of other workers" in ended.out
    assert "2 of 2 workloads done" in ended.out


def test_a_shard_starts_at_its_part(steady, fake, monkeypatch):
    listed(fake, *(f"good --batch {number}" for number in (1, 2, 3, 4)))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "2")
    assert steady("tune", "--list", "list.txt").code == 0
    assert (fake / "tuned.log").read_text().split()[1::5] == ["3", "4", "1", "2"]


@pytest.mark.parametrize(
    ("line", "device", "said"),
    [
        ("unable", "auto", "the plan was not stored"),
        ("good", "cuda:7", "this machine cannot tune: no GPU here"),
    ],
)
def test_a_machine_that_can_tune_nothing_leaves_the_list_to_others(
    steady, fake, line, device, said
):
    listed(fake, line)
    ended = steady("tune", "--list", "list.txt", "--quiet", "--device", device)
    assert (ended.code, only_line(ended.err)) == (3, said)
    assert not list((fake / "list.txt.sweep").iterdir())


def test_so_does_a_machine_whose_installation_is_broken(steady, fake, monkeypatch):
    monkeypatch.setattr(sweep_command, "HANDLER", "not_installed:Handler")
    listed(fake, "good")
    ended = steady("tune", "--list", "list.txt", "--quiet")
    assert ended.code == 3
    assert "No module named 'not_installed'" in only_line(ended.err)
    assert not list((fake / "list.txt.sweep").iterdir())


def test_so_does_a_machine_without_room_for_a_process(steady, fake, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    listed(fake, "good")
    ended = steady("tune", "--list", "list.txt", "--quiet")
    assert ended.code == 3
    assert "no process can start here" in only_line(ended.err)


def test_a_device_of_the_line_fails_the_line_alone(steady, fake):
    listed(fake, "good --device cuda:7", "good")
    ended = steady("tune", "--list", "list.txt")
    assert ended.code == 1
    assert "good --device cuda:7: no GPU here" in ended.out
    assert "1 of 2 workloads done, 1 failed" in ended.out


def hears_ctrl_c():
    """Undoes what a shell does to commands in the background, where the tests may run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupted_sweep_keeps_its_results(fake):
    listed(fake, "good", "sleeps")
    code = (
        "import sys; from steadytorch.cli import main, sweep; sweep.HANDLER = 'tuning:Handler'; "
        "main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "tune", "--list", "list.txt", "--json", "out.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, env=environment, text=True, preexec_fn=hears_ctrl_c
    ) as running:
        end = time.monotonic() + PATIENCE_S
        while not (fake / "sleeping").exists() or not (fake / "sleeping").read_text():
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        children = psutil.Process(running.pid).children(recursive=True)
        for number in (signal.SIGINT, signal.SIGINT):
            running.send_signal(number)
        _, told = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert only_line(told).startswith("interrupted; results so far are in ")
    rows = json.loads((fake / "out.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["done", "waiting"]
    assert not Path((fake / "sleeping").read_text()).exists()
    assert children
    assert not any(child.is_running() for child in children)
    assert not list((fake / "list.txt.sweep").glob("*.lease"))


@pytest.mark.slow
def test_a_real_search_and_its_replay(steady, folder):
    listed(folder, "tiny.py:raising", "tiny.py:small")
    words = ("tune", "--list", "list.txt", "--store", "plans", "--budget", "60s")
    ended = steady(*words, "--json", "out.json")
    assert ended.code == 1
    failed, found = json.loads((folder / "out.json").read_text())["rows"]
    assert "the data are missing" in failed["reason"]
    assert (found["status"], found["replayed"]) == ("done", False)
    assert Path(found["plan"]["path"]).is_file()
    assert steady(*words, "--sweep", "again", "--json", "again.json").code == 1
    again = json.loads((folder / "again.json").read_text())["rows"][1]
    assert (again["replayed"], again["plan"]) == (True, found["plan"])


# -- submitit -----------------------------------------------------------------------------------


def test_a_job_gets_the_words_of_the_user(folder):
    path = listed(folder, "a")
    words = ("--sweep", "s", "--shard", "auto", "--input", "2x3", "--input", "4", "--train")
    ctx = context(path, *words, "--submit", "2", "--partition", "p", "--slurm", "a=1", "--retry")
    command = worker_command(ctx)
    assert command[:4] == [sys.executable, "-m", "steadytorch", "tune"]
    there = made(command[4:])
    here = context(path, *words)
    assert there.params == here.params


def test_submission_without_submitit_says_what_to_install(steady, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    listed(folder, "a")
    ended = steady("tune", "--list", "list.txt", "--submit", "2")
    assert ended.code == 3
    assert "pip install 'steadytorch[slurm]'" in only_line(ended.err)


@pytest.mark.parametrize(
    ("setting", "said"),
    [("gpus", "not KEY=VALUE"), ("=1", "not KEY=VALUE"), ("colour=red", "colour")],
)
def test_a_wrong_parameter_of_submitit_is_named(steady, folder, setting, said):
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    listed(folder, "a")
    ended = steady("tune", "--list", "list.txt", "--submit", "2", "--slurm", setting)
    assert ended.code == 2
    assert said in only_line(ended.err)


def test_jobs_do_the_work(steady, steady_process, fake):
    submitit = pytest.importorskip("submitit", reason="the extra slurm is not installed")
    if submitit.AutoExecutor(folder=fake / "any").cluster != "local":
        pytest.skip("jobs would go to the SLURM of this machine")
    listed(fake, "nothing.py:a", "nothing.py:b", "nothing.py:c")
    ended = steady_process("tune", "--list", "list.txt", "--submit", "2")
    assert ended.returncode == 0, ended.stderr
    assert "submitted on this machine, which has no SLURM: " in ended.stdout
    end = time.monotonic() + PATIENCE_S
    while "3 failed" not in (told := steady("tune", "--list", "list.txt", "--status").out):
        assert time.monotonic() < end, told
        time.sleep(0.2)
    assert told.count("file not found: nothing.py") == 3
