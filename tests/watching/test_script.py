from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from steadytorch.cli import main

TRAIN = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    chosen = torch.optim.SGD(model.parameters(), 0.01)
    for x in DataLoader(torch.randn(60, 4), 2, shuffle=True):
        loss = model(x).square().sum()
        loss.backward()
        chosen.step()
    print(loss.item(), torch.rand(()).item(), sys.argv)
    {end}
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def plain(*arguments, **options):
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, timeout=120, check=False, **options)


def run(*arguments, **options):
    return plain("-m", "steadytorch", "run", *arguments, **options)


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.stdout.buffer.write(bytes(range(256))); sys.exit(7)",
        "raise SystemExit('a message')",
        "import os, sys; print('x', flush=True); os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.execv('/bin/echo', ['echo', 'executed'])",
        "def f():\n    raise ValueError('bo\\nom')\nf()",
        "x = = 1",
        "import sys; sys.excepthook = lambda *a: print('mine'); 1 / 0",
        "import atexit; atexit.register(print, 'last'); print(__name__, __file__, __spec__)",
        "import sys; print(sys.argv, sys.path[0], sys.flags.optimize); sys.stdin.read()",
        "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))",
        "import multiprocessing as m\ndef f(x): return x + 1\n"
        "if __name__ == '__main__':\n    with m.get_context('fork').Pool(2) as p:\n"
        "        print(p.map(f, [1, 2]))",
        "import os\nif os.fork():\n    os.wait(); print('parent')\nelse:\n    print('child')",
        "import os\nif os.fork():\n    os.wait(); print('left')\nelse:\n    os.setsid()\n"
        "    if os.fork():\n        os._exit(0)\n    os.close(1)",
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: print('heard'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)",
        "import random as r, os; r.seed(3); print(r.random(), 'STEADYTORCH_RUN' in os.environ)",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    ],
)  # fmt: skip
@pytest.mark.sampled(every=9)
def test_a_script_behaves_as_without_us(script, text):
    path = script(text)
    expected = plain(path, "-a", "--b=c", "d", input=b"")
    found = run("--quiet", path, "-a", "--b=c", "d", input=b"")
    assert found.returncode == expected.returncode
    assert found.stdout == expected.stdout
    assert found.stderr == expected.stderr


@pytest.mark.parametrize("command", [[], ["-m", "steadytorch", "run", "--quiet"]])
def test_a_script_may_need_a_terminal(script, command):
    path = script("import os, sys; print(sys.stdin.isatty(), os.get_terminal_size(0), input())")
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *command, str(path)], stdin=its, stdout=subprocess.PIPE
    ) as child:
        os.write(ours, b"typed\n")
        out, _ = child.communicate(timeout=60)
    os.close(ours)
    os.close(its)
    assert out == b"True os.terminal_size(columns=0, lines=0) typed\n"


def test_a_module_behaves_as_without_us(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv, __name__, __spec__.name)")
    expected = plain("-m", "mine", "--json", cwd=tmp_path)
    found = run("--quiet", "-m", "mine", "--", "--json", cwd=tmp_path)
    assert expected.returncode == 0
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)


def test_a_script_that_never_trains_says_so(script):
    found = run(script("print('out')"))
    assert found.stdout == b"out\n"
    assert b"no steps found" in found.stderr


def test_training_is_the_same_and_reported(script, tmp_path):
    path = script(TRAIN.format(end="raise ValueError('boom')"))
    expected = plain(path, "x")
    files = tmp_path / "a.json", tmp_path / "a.html"
    found = run("--json", files[0], "--html", files[1], path, "x")
    assert found.returncode == expected.returncode == 1
    assert found.stdout == expected.stdout
    assert found.stderr.startswith(expected.stderr)
    lines = found.stderr[len(expected.stderr) :].decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert "29 optimizer steps" in lines[2]
    saved = json.loads(files[0].read_bytes())
    assert saved["kind"] == "run"
    assert saved["failed"] == "ValueError: boom"
    assert len(saved["measured"]["samples_ns"]) == 29
    assert b"steady run" in files[1].read_bytes()
    assert len(list(tmp_path.glob("plotly-*.min.js"))) == 1


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--keep-slow", "3"], marks=pytest.mark.slow)]
)
def test_ctrl_c_reaches_the_script_and_the_summary_follows(script, tmp_path, options):
    path = script(TRAIN.format(end="import time; print('ready', flush=True); time.sleep(60)"))
    # A test run in the background may ignore the signal, and pass that on.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    heed += "os.execv(sys.executable, [sys.executable, '-m', 'steadytorch', 'run', *sys.argv[1:]])"
    line = [sys.executable, "-c", heed, *options, str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
    with subprocess.Popen(line, **pipes) as child:
        assert child.stdout is not None
        while child.stdout.readline() not in (b"ready\n", b""):
            pass
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors
    assert b"interrupted; the steps so far" in errors
    assert b"29 optimizer steps" in errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to run"),
        (["no.py"], "there is no script no.py"),
        (["."], "is a folder"),
        (["--keepslow", "3", "x.py"], "no such option --keepslow; did you mean --keep-slow?"),
        (["--jsn=x", "x.py"], "no such option --jsn; did you mean --json?"),
        (["-x", "x.py"], "no such option -x; see steady run --help"),
        (["-m", "nothing_here"], "there is no module 'nothing_here'"),
        (["--json", "-", "x.py"], "standard output belongs to the script"),
        (["--json", "/nowhere/x.json", "x.py"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line(arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
