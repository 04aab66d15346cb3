"""Regenerates the outputs that pages of the documentation show, by running the commands.

    python docs/outputs/regenerate.py            # all
    python docs/outputs/regenerate.py gate help  # some

Measurements are of the machine that runs this, on one core, so that other programs on it change
little. Pages that show them do not claim their figures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = (
    *("demo", "measure", "run", "explain", "compare", "gate", "track", "tune", "conv", "plans"),
    *("report", "doctor"),
)
WORK = """
import torch
from torch import nn


def factory(batch=8):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head).eval(), torch.randn(batch, 3, 64, 64)
"""
SLOWER = WORK.replace("nn.MaxPool2d(2)]", "nn.MaxPool2d(2), nn.Conv2d(64, 64, 3), nn.ReLU()]")

PROGRESS = re.compile(
    r"^(.*pair of processes \d.*|process \d+ of \d+|checking out .*|installing .*"
    r"|calls after pauses|measuring without the profiler|profiling"
    r"|measuring the device's limits)\n",
    re.MULTILINE,
)


def shown(text: str) -> str:
    """The output without progress, temporary paths and trailing blanks."""
    text = PROGRESS.sub("", text)
    text = re.sub(r"/tmp/[\w./-]+?(?=/steadytorch)", "~/.cache", text)
    return "\n".join(line.rstrip() for line in text.strip().split("\n")) + "\n"


def steady(folder: Path, *words: str) -> str:
    """Runs a command and returns its output, whatever its exit code."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    environment = os.environ | own
    done = subprocess.run(
        [sys.executable, "-m", "steadytorch", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def helps(folder: Path) -> dict[str, str]:
    """`--help` of every command."""
    found = {"help": steady(folder, "--help")}
    return found | {f"help-{name}": steady(folder, name, "--help") for name in COMMANDS}


def _project(folder: Path) -> None:
    (folder / "serving.py").write_text(WORK)


def _one(name: str, *words: str) -> Callable[[Path], dict[str, str]]:
    def make(folder: Path) -> dict[str, str]:
        _project(folder)
        return {name: f"$ steady {' '.join(words)}\n{shown(steady(folder, *words))}"}

    return make


def gate(folder: Path) -> dict[str, str]:
    """A gate with one slower workload, and its comment."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    _project(folder)
    for words in (["init", "-q"], ["add", "serving.py"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    (folder / "serving.py").write_text(SLOWER)
    words = ("gate", "--base", "HEAD", "serving.py:factory")
    text = shown(steady(folder, *words, "--markdown", "comment.md"))
    # The hash changes with every run.
    hashes = re.compile(r"\b[0-9a-f]{12}\b")
    return {
        "gate": f"$ steady {' '.join(words)}\n{hashes.sub('0123456789ab', text)}",
        "gate-comment": hashes.sub("0123456789ab", (folder / "comment.md").read_text()),
    }


MAKERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "help": helps,
    "doctor": _one("doctor", "doctor"),
    "measure": _one("measure", "measure", "serving.py:factory"),
    "compare": _one("compare", "compare", "serving.py:factory", "serving.py:factory@channels_last"),
    "explain": _one("explain", "explain", "serving.py:factory"),
    "tune": _one("tune", "tune", "serving.py:factory", "--budget", "1m"),
    "gate": gate,
}


def main() -> None:
    """Regenerates the named outputs, or all."""
    for name in sys.argv[1:] or list(MAKERS):
        with tempfile.TemporaryDirectory() as folder:
            for file, text in MAKERS[name](Path(folder)).items():
                (HERE / f"{file}.txt").write_text(text)
                print(f"{file}.txt")


if __name__ == "__main__":
    main()
