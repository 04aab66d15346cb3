"""The queue of background jobs: order, failures, and the end of the process."""

import logging
import subprocess
import sys
import textwrap

from steadytorch.process.job_queue import JobQueue


def ended(script, cwd):
    """The result of running a script that ends while its jobs run."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_jobs_run_in_order_and_a_failed_one_does_not_stop_the_next(caplog):
    caplog.set_level(logging.WARNING, "steadytorch")
    queue, ran = JobQueue("jobs"), []
    queue.start(lambda: ran.append(1))
    queue.start(lambda: 1 / 0)
    assert queue.start(lambda: ran.append(2)).wait(60)
    assert ran == [1, 2]
    assert "a job of jobs failed: ZeroDivisionError" in caplog.text
    assert queue.start(lambda: ran.append(3)).wait(60)  # in a new thread
    assert ran == [1, 2, 3]


def test_the_end_of_the_process_interrupts_the_job_and_drops_those_that_wait(tmp_path):
    script = """
        import time
        from pathlib import Path
        from threading import Event
        from steadytorch.process.job_queue import JobQueue

        def job():
            begun.set()
            try:
                while True:
                    time.sleep(0.01)
            finally:
                Path("cleaned").touch()

        begun, queue = Event(), JobQueue("jobs")
        queue.start(job)
        queue.start(Path("started").touch)
        begun.wait()
    """
    result = ended(script, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["cleaned"]


def test_the_process_ends_without_a_job_that_is_stuck(tmp_path):
    script = """
        import time
        from threading import Event
        from steadytorch.process import job_queue

        def job():
            begun.set()
            time.sleep(1000)

        job_queue._GRACE_S = 0.2
        begun = Event()
        job_queue.JobQueue("jobs").start(job)
        begun.wait()
    """
    result = ended(script, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_exit_code_is_the_scripts_own(tmp_path):
    script = """
        import time
        from steadytorch.process.job_queue import JobQueue

        JobQueue("jobs").start(lambda: [time.sleep(0.01) for _ in range(100_000)])
        raise SystemExit(7)
    """
    assert ended(script, tmp_path).returncode == 7
