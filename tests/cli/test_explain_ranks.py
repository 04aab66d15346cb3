from __future__ import annotations

import json

import pytest

from steadytorch.results.ranks import RankComparison
from steadytorch.results.saved import decode, kind_of

from ..traces.jobs import DATA, job
from .conftest import only_line


@pytest.fixture
def files(folder):
    work = [[100] * 10, [300] * 10, [100] * 10, [100] * 10]
    names = [f"rank{rank}.json" for rank in range(4)]
    for name, content in zip(names, job(work, where=DATA), strict=True):
        (folder / name).write_bytes(content)
    return names


def test_traces_of_ranks_are_compared_without_pytorch(steady_process, folder, files):
    (folder / "torch.py").write_text("raise RuntimeError('PyTorch was loaded')")
    ended = steady_process("explain", *files, "--json", "out.json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "1. rank 1 is late by 200 us a step (66 %), in waiting for data" in ended.stdout
    path = folder / "out.json"
    found = json.loads(path.read_text())
    assert (found["kind"], found["workload"]) == ("ranks", " ".join(files))
    assert found["late"][0]["slice"] == "cpu_data_wait"
    saved = decode(path, path.read_bytes(), kind_of(path, path.read_bytes()))
    assert isinstance(saved.result, RankComparison)
    assert saved.result.late[0].steps == tuple(range(3, 13))


def test_ranks_have_a_page(steady, folder, files):
    assert steady("explain", *files, "--json", "out.json", "--quiet").code == 0
    assert steady("report", "out.json").code == 0
    assert "Who is latest" in (folder / "out.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rank0.json", "resnet18"], "'resnet18' is not a trace (.json, .json.gz)"),
        (["resnet18", "resnet50"], "'resnet18' is not a trace"),
        (["rank0.json", "rank0.json"], "rank0.json and rank0.json are both of rank 0"),
        (["rank0.json", "missing.json"], "cannot open the trace"),
        (["rank0.json", "rank1.json", "--steps", "3"], "--steps is for workloads"),
    ],
)
def test_what_cannot_be_compared_is_one_line(steady, files, words, said):
    ended = steady("explain", *words, "--quiet")
    assert (ended.code, ended.out) == (2, "")
    assert said in only_line(ended.err)
