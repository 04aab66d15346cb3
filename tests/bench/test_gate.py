"""A gate between revisions: real repositories and workers, and simulated processes."""

from __future__ import annotations

from itertools import count
from random import Random

import numpy as np
import pytest

from steadytorch.bench import gate as module
from steadytorch.bench.gate import LEAST_PAIRS, MOST_PAIRS, gate
from steadytorch.errors import UsageError
from steadytorch.measure.race import ALPHA

WORK = """
import torch
from torch import nn

class Work(nn.Module):
    def forward(self, x):
        for _ in range({times}):
            x = x + 1
        return x

def steps():
    return Work().eval(), torch.ones(8)
"""
RAISES = "\ndef {name}():\n    raise OSError('the disk is full')\n"
EMPTY = "\ndef {name}():\n    return Work().eval(), torch.ones(8)\n"


@pytest.fixture
def simulated(monkeypatch, repository):
    """Replaces the processes of both sides by simulated times; returns the drawing function."""
    repository.commit(a_txt="")

    def simulate(effects, sd=0.004, between=0.004, fail=None, seed=0):
        rng = np.random.default_rng(seed)

        def take(race, arm, number, order):
            if fail == (arm.given, number):
                arm.ended = module.Ended("failed", "it fails on the head: killed")
                return
            effect = effects[arm.given] + between * rng.standard_normal()
            base, head = sd * rng.standard_normal((2, LEAST_PAIRS))
            arm.taken.append(
                list(zip(1e6 * np.exp(base), 1e6 * np.exp(head + effect), strict=True))
            )

        monkeypatch.setattr(module.Race, "take", take)

        def run(**options):
            options = {"base": "HEAD", "folder": repository.root, "device": "cpu"} | options
            return gate(list(effects), **options)

        return run

    return simulate


def verdicts(result):
    return [row.verdict for row in result.rows]


# -- verdicts on simulated processes ------------------------------------------------------------


def test_each_workload_gets_its_own_verdict(simulated):
    run = simulated({"slow": 0.05, "fast": -0.05, "same": 0.0})
    result = run()
    assert verdicts(result) == ["slower", "faster", "tie"]
    assert result.gate_failed
    slow = result.rows[0]
    assert slow.interval.low < np.expm1(0.05) < slow.interval.high
    assert slow.processes == 5
    assert slow.pairs == 5 * LEAST_PAIRS
    assert len(slow.samples) == 5


def test_a_slowdown_within_the_threshold_does_not_fail(simulated):
    result = simulated({"a": 0.02}, between=0.001, sd=0.001)(threshold=0.05)
    assert verdicts(result) == ["tie"]
    assert not result.gate_failed
    assert result.rows[0].interval.low > 0


def test_noise_gives_no_verdict_but_what_would_be_found(simulated):
    result = simulated({"a": 0.0}, between=0.1)()
    assert verdicts(result) == ["undecided"]
    assert not result.gate_failed
    assert result.rows[0].mde > 0.05
    assert result.rows[0].processes == 40


def test_the_error_probability_is_divided_among_workloads_and_looks(simulated):
    one = simulated({"a": 0.0})().rows[0]
    three = simulated({"a": 0.0, "b": 0.0, "c": 0.0})(processes=5).rows[0]
    assert one.alpha == pytest.approx(ALPHA / 6)  # looks at 5, 8, 12, 18, 27 and 40
    assert three.alpha == pytest.approx(ALPHA / 3)  # three workloads, one look


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("effects", [{"a": 0.0}, {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}])
def test_equal_sides_rarely_fail(simulated, effects):
    failed = 0
    for seed in range(40):
        failed += simulated(effects, between=0.02, seed=seed)(threshold=0.0).gate_failed
    assert failed <= 3  # P(Binomial(40, 1 %) > 3) is 0.1 %


def test_three_percent_are_found(simulated):
    found = [simulated({"a": 0.03}, seed=seed)().gate_failed for seed in range(20)]
    assert all(found)


def test_a_failure_after_some_processes_takes_the_verdict_away(simulated):
    result = simulated({"a": 0.2, "b": 0.2}, fail=("a", 3))()
    assert verdicts(result) == [None, "slower"]
    assert (result.rows[0].status, result.rows[0].processes) == ("failed", 2)
    assert result.failed == (result.rows[0],)


def test_a_spent_budget_leaves_three_processes(simulated, monkeypatch):
    monkeypatch.setattr(module, "monotonic", count().__next__)
    result = simulated({"a": 0.0})(budget="1s")
    assert result.rows[0].processes == 3
    assert result.rows[0].interval.low is not None


def test_ctrl_c_keeps_what_was_timed(simulated, monkeypatch):
    run = simulated({"a": 0.05, "b": 0.05})
    take, taken = module.Race.take, []

    def interrupted(race, arm, number, order):
        taken.append(arm.given)
        if len(taken) == 8:
            raise KeyboardInterrupt
        take(race, arm, number, order)

    monkeypatch.setattr(module.Race, "take", interrupted)
    result = run()
    assert result.interrupted
    assert [row.processes for row in result.rows] == [4, 3]
    assert [row.status for row in result.rows] == ["judged", "judged"]


def test_ctrl_c_before_the_first_pair_is_passed_on(simulated, monkeypatch, repository):
    run = simulated({"a": 0.0})

    def interrupted(race, arm, number, order):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Race, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert repository.worktrees() == 1


def test_uncommitted_files_and_submodules_are_told(simulated, repository):
    run = simulated({"a": 0.0})
    assert run().notes == ()
    repository.write(new_txt="", _gitmodules="")
    result = run()
    assert result.head.changed == 2
    assert result.notes == (
        "The head is the working tree, with 2 uncommitted files.",
        "Submodules are not checked out on the base.",
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"base": "gone"}, "revision 'gone' does not exist"),
        ({"threshold": 1.0}, "is not a fraction"),
        ({"processes": 4}, "4 processes are too few for a gate: use 5 or more"),
        ({"metric": "p99"}, "unknown metric 'p99'"),
        ({"install": True, "base_env": "python"}, "exclude each other"),
        ({"base_env": "/nowhere/python"}, "is not a Python executable"),
        ({"budget": "soon"}, "'soon' is not"),
    ],
)
def test_wrong_arguments_are_refused(simulated, repository, options, reason):
    with pytest.raises(UsageError, match=reason):
        simulated({"a": 0.0})(**options)
    assert repository.worktrees() == 1


def test_workloads_are_needed_and_named_once(repository):
    with pytest.raises(UsageError, match="at least one"):
        gate([], base="HEAD", folder=repository.root)
    with pytest.raises(UsageError, match="a is given twice"):
        gate(["a", "b", "a"], base="HEAD", folder=repository.root)


# -- real processes -----------------------------------------------------------------------------


@pytest.fixture
def real(repository):
    """Runs a gate with real workers in a subfolder of the repository."""

    def run(*workloads, **options):
        options = {"base": "HEAD", "device": "cpu", "processes": 5, "budget": 1e-3} | options
        return gate(workloads, folder=repository.root, **options)

    return run


@pytest.mark.slow
def test_three_times_the_work_is_slower(real, repository):
    repository.commit(work_py=WORK.format(times=60))
    repository.write(work_py=WORK.format(times=180))
    row = real("work.py:steps").rows[0]
    assert row.status == "judged"
    assert row.head_median_ns > 1.5 * row.base_median_ns
    assert row.interval.estimate > 0.5
    assert repository.worktrees() == 1


@pytest.mark.slow
def test_without_a_workload_on_both_sides_there_is_no_verdict(real, repository, no_process_left):
    work = WORK.format(times=60)
    repository.commit(
        work_py=work + EMPTY.format(name="old") + RAISES.format(name="mended"),
        broken_py=work + EMPTY.format(name="breaks"),
    )
    repository.write(
        work_py=work + EMPTY.format(name="new") + EMPTY.format(name="mended"),
        broken_py=work + RAISES.format(name="breaks"),
    )
    names = ("work.py:old", "work.py:new", "work.py:mended", "broken.py:breaks")
    result = real(*names)
    assert [row.status for row in result.rows] == ["removed", "added", "failed", "failed"]
    assert verdicts(result) == [None] * 4
    assert not result.gate_failed
    reasons = [row.reason for row in result.rows]
    assert reasons[0] == "it exists on the base only"
    assert reasons[1] == "it exists on the head only"
    assert reasons[2].startswith("it fails on the base: ")
    assert "OSError: the disk is full" in reasons[2]
    assert reasons[3].startswith("it fails on the head: ")


def test_a_workload_on_neither_side_is_bad_input(real, repository):
    repository.commit(work_py=WORK.format(times=60))
    with pytest.raises(UsageError, match=r"work\.py:gone exists on neither side: no factory"):
        real("work.py:gone")
    assert repository.worktrees() == 1


def test_an_absolute_path_within_the_tree_is_looked_up_in_both(real, repository):
    repository.commit(other_py="")
    repository.write(work_py=WORK.format(times=60))
    assert real(f"{repository.root}/work.py:steps").rows[0].status == "added"


def test_code_of_the_working_tree_in_the_base_is_noticed(real, repository):
    load = f"import sys\nsys.path.insert(0, {str(repository.root)!r})\nimport helper\n"
    repository.commit(work_py=load + WORK.format(times=60), helper_py="")
    row = real("work.py:steps").rows[0]
    assert row.status == "failed"
    assert row.reason.startswith("the base cannot be kept apart: it imports helper from ")
    assert row.reason.endswith("use --install")


def test_temporary_folders_may_lie_in_the_repository(real, repository, monkeypatch):
    repository.commit(work_py="import helper\n" + WORK.format(times=60), helper_py="")
    repository.write(work_py="import helper\n" + RAISES.format(name="steps"))
    inside = repository.root / "tmp"
    inside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(inside))
    assert real("work.py:steps").rows[0].reason.startswith("it fails on the head: ")


def test_an_interpreter_without_pytorch_is_told(real, repository, tmp_path):
    repository.commit(work_py=WORK.format(times=60))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no torch' >&2\nexit 1\n")
    python.chmod(0o755)
    row = real("work.py:steps", base_env=str(python)).rows[0]
    assert row.status == "failed"
    assert row.reason.endswith("process exited with status 1: ModuleNotFoundError: no torch")


def test_a_file_that_is_no_program_is_told(real, repository, tmp_path):
    repository.commit(work_py=WORK.format(times=60))
    (tmp_path / "python").write_bytes(b"\x00")
    (tmp_path / "python").chmod(0o755)
    row = real("work.py:steps", base_env=str(tmp_path / "python")).rows[0]
    assert row.status == "failed"
    assert row.reason == f"the base's {tmp_path}/python cannot start: Exec format error"


def test_the_order_within_pairs_is_random():
    order = []
    blocks = [lambda i=i: order.append(i) or 1.0 for i in range(2)]
    module.compare(blocks[0], blocks[1], rng=Random(0), looks=(MOST_PAIRS,))
    firsts = order[::2]
    assert 25 < sum(firsts) < MOST_PAIRS - 25


@pytest.mark.parametrize(
    ("pair_ms", "pairs"), [(0.01, MOST_PAIRS), (40, 50), (100, LEAST_PAIRS), (5000, LEAST_PAIRS)]
)
def test_short_workloads_are_timed_in_more_pairs(pair_ms, pairs):
    assert module.pair_count(pair_ms * 1e6) == pairs
