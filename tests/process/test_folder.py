from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from steadytorch.process.folder import shared_folder

PATIENCE_S = 60


def test_it_is_private_and_removed_after_the_block():
    made = []

    def failing():
        with shared_folder() as folder:
            made.append(folder)
            (folder / "weights").touch()
            assert folder.stat().st_mode & 0o777 == 0o700
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        failing()
    assert not made[0].exists()


def test_it_may_be_gone_already():
    with shared_folder() as folder:
        folder.rmdir()


def test_what_a_thread_uses_when_the_process_ends_goes_with_it(tmp_path):
    """Also ends the worker and its children, which would write to the folder."""
    script = f"""
        import sys, threading, time
        from pathlib import Path
        sys.path.append({os.path.dirname(__file__)!r})
        from steadytorch.process.folder import shared_folder
        from steadytorch.process.worker import Worker

        begun = threading.Event()

        def work():
            with shared_folder() as folder:
                worker = Worker("handlers:Handler", folder, "worker")
                print(worker.call("child", 60))
                begun.set()
                time.sleep(600)

        threading.Thread(target=work, daemon=True).start()
        assert begun.wait(60)
        print(*[path.name for path in Path({str(tmp_path)!r}).iterdir()])
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    pid, name = ended.stdout.split()
    assert name.startswith("steadytorch-")
    assert list(tmp_path.iterdir()) == []
    end = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert ended.stderr == ""


def test_a_fork_of_the_process_ends_without_them():
    """A program may fork for its own reasons during a search."""
    script = f"""
        import os, sys
        sys.path.append({os.path.dirname(__file__)!r})
        from steadytorch.process.folder import shared_folder
        from steadytorch.process.worker import Worker

        with shared_folder() as folder:
            worker = Worker("handlers:Handler", folder, "worker")
            worker.call("echo", 60, value=1)
            if (child := os.fork()) == 0:
                sys.exit()
            os.waitpid(child, 0)
            print(folder.exists(), worker.call("echo", 60, value=2))
            worker.close()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == ["True", "2"]
