import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from steadytorch.process import worker as worker_module
from steadytorch.process.interpreter import Interpreter
from steadytorch.process.worker import Fault, Worker, WorkerFault, wait_any

DEADLINE_S = 60


def _gone(pid):
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def _fault_of(worker, method, deadline_s=DEADLINE_S, **arguments):
    with pytest.raises(WorkerFault) as caught:
        worker.call(method, deadline_s, **arguments)
    return caught.value


def test_a_worker_runs_under_the_given_interpreter(start, tmp_path):
    own = Interpreter.own()
    paths = (str(tmp_path), *own.paths)
    worker = start(interpreter=Interpreter(own.python, paths, tmp_path))
    folder, python, found = worker.call("where", DEADLINE_S)
    assert (folder, python, found[0]) == (str(tmp_path.resolve()), sys.executable, str(tmp_path))


def test_answers_come_back_in_order(start):
    worker = start()
    assert [worker.call("echo", DEADLINE_S, value=v) for v in (1, "two", [3.0])] == [
        1,
        "two",
        [3.0],
    ]


def test_runs_in_another_process_than_the_caller(start):
    assert start().call("pid", DEADLINE_S) != os.getpid()


def test_an_exception_is_reported_with_its_first_line_and_leaves_the_worker_alive(start):
    worker = start()
    fault = _fault_of(worker, "raises")
    assert (fault.fault, fault.reason) == (Fault.RAISED, "ValueError: first line")
    assert "raises" in fault.detail
    assert worker.call("echo", DEADLINE_S, value=1) == 1


def test_sys_exit_in_the_worker_is_an_exception_like_any_other(start):
    assert _fault_of(start(), "leaves").reason == "SystemExit: 3"


@pytest.mark.parametrize("status", [0, 7])
def test_exit_is_reported_with_its_status(start, status):
    fault = _fault_of(start(), "exits", status=status)
    assert (fault.fault, fault.reason) == (Fault.EXIT, f"process exited with status {status}")


def test_a_segmentation_fault_is_reported_as_one(start):
    fault = _fault_of(start(), "segfaults")
    assert fault.fault is Fault.SIGNAL
    where = r"segmentation fault \(SIGSEGV\) in segfaults, handlers\.py:\d+"
    assert re.fullmatch(where, fault.reason)


@pytest.mark.parametrize("method", ["is_killed", "is_killed_after_a_child_crashed"])
def test_a_worker_that_is_killed_has_crashed_nowhere(start, method):
    assert _fault_of(start(), method).reason == "killed (SIGKILL)"


def test_a_signal_without_a_name_is_told_by_its_number(start):
    number = signal.SIGRTMIN + 6
    reason = _fault_of(start(), "is_killed", number=number).reason
    assert reason == f"{signal.strsignal(number).lower()} ({number})"


def test_of_several_threads_that_which_crashed_is_named(start):
    reason = _fault_of(start(), "crashes_in_a_thread_of_several").reason
    assert " in crashes_in_a_thread_of_several, handlers.py:" in reason


@pytest.mark.parametrize(
    "text",
    [
        'so: Fatal Python error: none\n  File "mine.py", line 7 in secret\n',
        'Fatal Python error: none\n  File "mine.py", line 7 in secret\n',
        "\0\xff" * (1 << 17),
    ],
    ids=["within a line", "as a crash would", "long and binary"],
)
def test_what_a_workload_prints_is_not_where_it_crashed(start, text):
    reason = _fault_of(start(), "says_and_crashes", text=text).reason
    assert " in says_and_crashes, handlers.py:" in reason


@pytest.mark.parametrize("method", ["hangs", "stops"])
def test_a_worker_that_does_not_answer_is_killed_at_its_deadline(start, method):
    worker = start()
    worker.call("echo", DEADLINE_S, value=0)
    fault = _fault_of(worker, method, deadline_s=0.5)
    assert fault.fault is Fault.DEADLINE
    assert _gone(worker.pid)


def test_a_failed_allocation_is_out_of_memory(start):
    fault = _fault_of(start(), "out_of_memory")
    assert (fault.fault, fault.reason) == (Fault.OUT_OF_MEMORY, "out of memory")


def test_a_worker_over_its_memory_limit_is_killed(start):
    worker = start(memory_limit_bytes=200 << 20)
    fault = _fault_of(worker, "grows", byte_count=400 << 20)
    assert fault.fault is Fault.OUT_OF_MEMORY
    assert _gone(worker.pid)


def test_what_a_worker_started_goes_with_it(start):
    worker = start()
    child = worker.call("child", DEADLINE_S)
    worker.close()
    assert _gone(child)
    assert _gone(worker.pid)


def test_output_of_the_worker_goes_to_its_log_and_not_into_the_protocol(start):
    worker = start()
    assert worker.call("chatter", DEADLINE_S) == "done"
    worker.close()
    assert "to stderr" in worker.log_tail()


def test_the_environment_is_passed_on_and_added_to(start, monkeypatch):
    monkeypatch.setenv("STEADY_TEST_INHERITED", "yes")
    worker = start(environment={"STEADY_TEST_ADDED": "too"})
    found = [
        worker.call("variable", DEADLINE_S, name=f"STEADY_TEST_{n}") for n in ("INHERITED", "ADDED")
    ]
    assert found == ["yes", "too"]


def test_waiting_for_any_returns_the_one_that_answered(start):
    slow, quick = start(), start()
    slow.send("hangs")
    quick.send("echo", value=1)
    deadline = time.monotonic() + DEADLINE_S
    while not (ready := wait_any([slow, quick], 1.0)) and time.monotonic() < deadline:
        pass
    assert ready == [quick]
    assert quick.receive(DEADLINE_S) == 1


def test_the_handler_is_imported_before_anything_is_asked(tmp_path, monkeypatch):
    imported = tmp_path / "imported"
    (tmp_path / "ahead.py").write_text(
        f"import pathlib\npathlib.Path({str(imported)!r}).touch()\nclass Handler:\n"
        "    def __init__(self, directory): pass\n    def echo(self, value): return value\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker("ahead:Handler", tmp_path, "ahead")
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not imported.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert imported.exists()
        assert worker.call("echo", DEADLINE_S, value=7) == 7
    finally:
        worker.kill()


def test_further_modules_are_imported_ahead_and_a_broken_one_fails_nothing(
    start, tmp_path, monkeypatch
):
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "wanted.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    worker = start(imports=["no_such_module", "leaves", "wanted"])
    assert worker.call("imported", DEADLINE_S, names=["leaves", "wanted"]) == ["wanted"]


def test_an_unknown_handler_is_reported_and_not_fatal_to_the_caller(tmp_path):
    from steadytorch.process.worker import Worker

    worker = Worker("no_such_module:Handler", tmp_path, "w")
    fault = _fault_of(worker, "echo", value=1)
    worker.kill()
    assert "no_such_module" in fault.reason


_UNGUARDED = """
import sys
from pathlib import Path
sys.path.append({handlers!r})
from steadytorch.process.worker import Worker
worker = Worker("handlers:Handler", Path({directory!r}), "w")
print(worker.call("main_module", 60), worker.pid, flush=True)
{tail}
"""


def _script(tmp_path, tail="worker.close()"):
    return textwrap.dedent(
        _UNGUARDED.format(handlers=str(Path(__file__).parent), directory=str(tmp_path), tail=tail)
    )


@pytest.mark.parametrize("how", ["file", "stdin", "-c"])
def test_the_main_module_of_the_caller_is_not_run_again(tmp_path, how):
    script = _script(tmp_path)
    if how == "file":
        (tmp_path / "unguarded.py").write_text(script)
        arguments, given = [str(tmp_path / "unguarded.py")], None
    else:
        arguments, given = (["-"], script) if how == "stdin" else (["-c", script], None)
    done = subprocess.run(
        [sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].endswith("child.py")
    assert done.stdout.count("child.py") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signal is Linux's")
def test_a_worker_does_not_outlive_a_killed_parent(tmp_path):
    tail = "worker.send('hangs')\nimport time\ntime.sleep(300)"
    parent = subprocess.Popen(
        [sys.executable, "-c", _script(tmp_path, tail)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[1])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert _gone(pid)


def test_a_paused_worker_answers_once_it_is_resumed(start):
    worker = start()
    assert worker.call("echo", DEADLINE_S, value=1) == 1
    worker.pause()
    assert psutil.Process(worker.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_RUNNING)
    worker.send("echo", value=2)
    time.sleep(0.2)
    assert not worker.ready()
    worker.resume()
    assert worker.receive(DEADLINE_S) == 2


def test_a_pause_does_not_count_against_a_deadline(start, monkeypatch):
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr(worker_module, "time", clock)
    worker = start()
    worker.call("echo", DEADLINE_S, value=1)
    worker.send("echo", value=2)
    worker.pause()
    passed_s[0] = 1000.0
    worker.resume()
    assert not worker.overdue(500.0)
    assert worker.receive(500.0) == 2


def test_a_paused_worker_can_be_killed_and_a_killed_one_paused(start):
    worker = start()
    worker.call("echo", DEADLINE_S, value=1)
    worker.pause()
    pid = worker.pid
    worker.kill()
    assert _gone(pid)
    worker.pause()
    worker.resume()
