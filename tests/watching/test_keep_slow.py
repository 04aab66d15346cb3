from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import steadytorch as steady
from steadytorch.cli import main
from steadytorch.errors import UsageError
from steadytorch.measure.variability import slow_limit
from steadytorch.results.saved import decode, to_json

STEPS = 200
SLOW = {
    53: "loader", 62: "forward", 71: "script", 80: "gc", 89: "thread", 98: "loader",
    107: "forward", 116: "script", 125: "gc", 134: "thread", 143: "loader", 152: "forward",
    161: "script", 199: "gc",
}  # fmt: skip
EXCESS_S = 0.2
TOLD = {
    "loader": ("waiting for data", "__getitem__"),
    "forward": ("forward", "in_forward"),
    "script": ("the script's own code", "in_script"),
    "gc": ("garbage collection", "steadytorch.gc"),
    "thread": ("", ""),
}
"""What the explanation of a trace names: the slice, and where its time went."""


class Run:
    """A loop with slow steps, some ms each; the step that runs is `at`."""

    def __init__(self, slow):
        self.slow, self.at = slow, -1

    def cause(self, kind):
        return self.slow.get(self.at) == kind

    def in_script(self):
        time.sleep(EXCESS_S)

    def neighbour(self):
        ends = time.perf_counter() + EXCESS_S
        while time.perf_counter() < ends:
            pass

    def train(self, steps=STEPS):
        model = nn.Sequential(nn.Linear(256, 256), Slowed(self), nn.ReLU(), nn.Linear(256, 256))
        chosen = torch.optim.SGD(model.parameters(), 0.001)
        for x in DataLoader(Samples(self, steps + 1), batch_size=None):
            thread = threading.Thread(target=self.neighbour, name="neighbour")
            if self.cause("thread"):
                thread.start()
            chosen.zero_grad()
            model(x).square().mean().backward()
            if self.cause("script"):
                self.in_script()
            if self.cause("gc"):
                paused()
            if self.cause("thread"):
                thread.join()
            chosen.step()
            self.at += 1


class Samples(Dataset):
    def __init__(self, run, steps):
        self.run, self.steps = run, steps

    def __len__(self):
        return self.steps

    def __getitem__(self, place):
        if self.run.cause("loader"):
            time.sleep(EXCESS_S)
        return torch.ones(768, 256)


class Slowed(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = [run]

    def forward(self, x):
        return self.in_forward(x)

    def in_forward(self, x):
        if self.run[0].cause("forward"):
            time.sleep(EXCESS_S)
        return x


class Cycle:
    """Garbage whose collection takes long."""


def paused():
    """Collect garbage whose finaliser takes the time of a large heap."""
    garbage = Cycle()
    garbage.itself = garbage
    weakref.finalize(garbage, time.sleep, EXCESS_S)
    del garbage
    gc.collect()


@pytest.fixture
def one_thread():
    threads, enabled = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    yield
    torch.set_num_threads(threads)
    if enabled:
        gc.enable()


@pytest.mark.alone
def test_fourteen_slow_steps_among_two_hundred_are_kept_and_explained(tmp_path, one_thread):
    with steady.watch(keep_slow=14, traces=tmp_path / "t") as seen:
        Run(SLOW).train()
    result = seen.result
    of_steps_told(result.measured, SLOW)
    kept = {step.index: step for step in result.slowest if step.trace is not None}
    assert kept.keys() == SLOW.keys()
    assert result.traces == str(tmp_path / "t")
    assert sorted(os.listdir(tmp_path / "t")) == sorted(f"step-{n}.json.gz" for n in SLOW)
    for index, step in kept.items():
        explained = steady.explain(step.trace)
        slowest = explained.slowest[0]
        assert slowest.name == f"ProfilerStep#{index}"
        told = "; ".join(slowest.what)
        cause = SLOW[index]
        if cause == "thread":
            assert any("thread neighbour meanwhile at" in text for text in step.what)
        else:
            label, where = TOLD[cause]
            assert slice_of(label) in told
            assert where in told or where in "; ".join(step.what)
    saved = decode("x", to_json(result, "watch", result.environment), "run")
    assert saved.result == result
    assert f"14 traces kept; open one: steady explain {result.slowest[0].trace}"[:40] in (
        seen._repr_html_()
    )


def of_steps_told(measured, slow):
    """Skip where other programs make other steps as slow, or so uneven that none stands out."""
    samples, dropped = measured.samples_ns, measured.warmup_dropped
    if dropped > min(slow):
        pytest.skip(f"too crowded: the first {dropped} steps count as warm-up")
    others = [ns for step, ns in enumerate(samples) if step not in slow]
    least = min(samples[step] for step in slow)
    if (limit := max(*others, slow_limit(samples))) >= least:
        pytest.skip(f"too crowded: only steps above {limit / 1e6:.0f} ms stand out")


def slice_of(label):
    return {
        "waiting for data": "cpu_data_wait",
        "forward": "cpu_forward",
        "the script's own code": "cpu_script",
        "garbage collection": "cpu_gc",
    }[label]


@pytest.mark.alone
def test_only_as_many_as_asked_are_kept(tmp_path, one_thread):
    slow = dict.fromkeys((55, 58, 61), "script")
    with steady.watch(keep_slow=1, traces=tmp_path) as seen:
        Run(slow).train(70)
    of_steps_told(seen.result.measured, slow)
    (trace,) = [step.trace for step in seen.result.slowest if step.trace is not None]
    assert trace == seen.result.slowest[0].trace
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.alone
def test_slow_steps_without_a_trace_are_counted(tmp_path, one_thread):
    seen = steady.watch(keep_slow=2, traces=tmp_path)
    with seen:
        Run(dict.fromkeys((55, 58), "script")).train(70)
        seen.clock.flight.clear()
    of_steps_told(seen.result.measured, [55, 58])
    assert not any(step.trace for step in seen.result.slowest)
    assert any("2 of the 2 slowest steps have no trace" in text for text in seen.result.remarks)


def test_a_steady_run_leaves_no_folder(tmp_path, one_thread):
    with steady.watch(keep_slow=5, traces=tmp_path / "t") as seen:
        Run({}).train(3)
    assert seen.result.traces is None
    assert not (tmp_path / "t").exists()
    assert seen.result.remarks[0] == "No step stood out: no trace was kept."


@pytest.mark.alone
def test_traces_that_cannot_be_written_are_told(tmp_path, one_thread):
    with steady.watch(keep_slow=5, traces=tmp_path / "t") as seen:
        Run({55: "script"}).train(60)
        (tmp_path / "t").write_text("a file")
    of_steps_told(seen.result.measured, [55])
    assert seen.result.traces is None
    assert any("could not be written" in text for text in seen.result.remarks)


def test_the_scripts_own_profiler_is_undisturbed(tmp_path, one_thread):
    def profiled():
        with torch.profiler.profile(acc_events=True) as found:
            Run({}).train(4)
        return sorted(event.key for event in found.key_averages())

    expected = profiled()
    with steady.watch(keep_slow=5, traces=tmp_path) as seen:
        Run({}).train(4)
        assert profiled() == expected
    assert any("script's own profiler" in text for text in seen.result.remarks)


def failing(seen, error):
    with seen:
        Run({55: "script"}).train(60)
        raise error


@pytest.mark.alone
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_what_ends_the_loop_early_keeps_the_traces(tmp_path, one_thread, error):
    seen = steady.watch(keep_slow=1, traces=tmp_path)
    with pytest.raises(type(error)):
        failing(seen, error)
    of_steps_told(seen.result.measured, [55])
    assert os.listdir(tmp_path) == ["step-55.json.gz"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_no_traces(tmp_path, one_thread):
    with steady.watch(keep_slow=3, traces=tmp_path) as seen:
        Run({}).train(3)
        child = os.fork()
        if not child:
            Run({}).train(2)
            seen.stop()
            os._exit(len(os.listdir(tmp_path)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("keep", "folder", "told"),
    [(-1, "t", "keep 0 to 1,000"), (1001, "t", "keep 0 to 1,000"), (1, "file/t", "is no folder")],
)
def test_bad_arguments_are_refused_at_once(tmp_path, keep, folder, told):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=told):
        steady.watch(keep_slow=keep, traces=tmp_path / folder)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--traces", "t"], "--traces needs --keep-slow"),
        (["--keep-slow", "0"], "0 is not in the range"),
        (["--keep-slow", "2", "--traces", "x.py"], "is no folder"),
    ],
)
def test_bad_options_are_one_line(arguments, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("ran"))
    (tmp_path / "x.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments, "x.py"])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


SCRIPT = """
    import sys, time, torch
    from torch import nn
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    chosen = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(-1, 120):
        loss = model(torch.ones(64, 256)).square().mean()
        loss.backward()
        if step in (60, 80, 100):
            time.sleep(0.3)
        chosen.step()
    print(loss.item(), torch.rand(()).item())
"""


@pytest.mark.alone
@pytest.mark.slow
def test_a_script_runs_as_without_a_recorder(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT) + "raise SystemExit(3)\n")
    options = {"capture_output": True, "cwd": tmp_path, "timeout": 120, "check": False}
    expected = subprocess.run([sys.executable, str(path)], **options)
    command = [sys.executable, "-m", "steadytorch", "run", "--keep-slow", "3", "--json", "a.json"]
    found = subprocess.run([*command, str(path)], **options)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    lines = found.stderr.decode().splitlines()
    assert max(map(len, lines)) <= 80
    content = (tmp_path / "a.json").read_bytes()
    of_steps_told(decode(Path("a.json"), content, "run").result.measured, [60, 80, 100])
    assert any(
        "3 traces kept; open one: steady explain steady-traces/step-" in line for line in lines
    )
    assert {s["index"] for s in json.loads(content)["slowest"] if s["trace"]} == {60, 80, 100}
    quiet = subprocess.run([*command[:4], "--quiet", *command[4:6], str(path)], **options)
    assert quiet.stderr == expected.stderr
    explained = subprocess.run(
        [sys.executable, "-m", "steadytorch", "explain", "steady-traces/step-80.json.gz"], **options
    )
    assert b"ProfilerStep#80 took" in explained.stdout
