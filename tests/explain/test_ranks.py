"""Traces of several ranks: which rank is late, and input that cannot be compared."""

from __future__ import annotations

import gzip
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import steadytorch as steady
from steadytorch.errors import UsageError
from steadytorch.explain.ranks import compare_ranks, rank_file
from steadytorch.results.machine import DeviceFacts

from ..traces import synthetic as syn
from ..traces.jobs import DATA, host_bound_job, job, read

FACTS = DeviceFacts(device="cpu")


def compared(files, names=None):
    found = read(files)
    names = names or [f"rank{place}.json" for place in range(len(found))]
    pairs = zip(found, names, strict=True)
    return compare_ranks([rank_file(trace, Path(name)) for trace, name in pairs], FACTS)


def work(ranks, steps, late=None, by=0, seed=0, noise=0.3):
    """Own work in us by rank and step; one rank takes longer."""
    draw = random.Random(seed)
    return [
        [
            round(100 * draw.uniform(1 - noise, 1 + noise)) + (by if rank == late else 0)
            for _ in range(steps)
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_late_rank_its_slice_and_its_steps_are_named(ranks, gpu):
    steps = 10
    found = compared(job(work(ranks, steps, late=1, by=100), gpu=gpu, where=DATA))
    (late,) = found.late
    assert late.rank == 1
    assert late.slice == ("gpu_kernel" if gpu else "cpu_data_wait")
    assert late.steps == tuple(range(3, 3 + steps))
    assert late.late_ns == pytest.approx(100_000, rel=0.3)
    (finding,) = found.findings
    assert finding.id == "late-rank"
    assert finding.title.startswith("rank 1 is late by ")
    assert f"the latest rank at {steps} of {steps} steps: 3, 4, 5" in finding.evidence[2]
    assert finding.recoverable_ns == (0, round(late.late_ns))


@pytest.mark.parametrize("offset", [0, 0.4, 0.8, 3])
@pytest.mark.parametrize("host_us", [5_000, 20_000])  # short gaps are launching, long ones unknown
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_hosts_that_are_slower_than_their_gpus_accuse_none(ranks, host_us, offset):
    """The GPUs of hosts that began earlier wait in collectives, where they would be idle anyway."""
    begin = [*[0] * (ranks - 1), round(offset * host_us)]
    found = compared(host_bound_job([host_us] * ranks, begin))
    assert found.late == ()
    assert all(step.late_ns <= 0.01 * 1000 * host_us for step in found.steps[1:])
    one, other = (found.ranks[place].slices_ns for place in (0, -1))
    for name in one.keys() | other.keys():
        assert one.get(name, 0) == pytest.approx(other.get(name, 0), abs=0.1 * 1000 * host_us)


@pytest.mark.parametrize("blocked", [0, 1_000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slower_host_is_late_by_what_it_takes_longer(ranks, blocked):
    hosts = [5_000, 6_000, *[5_000] * (ranks - 2)]
    found = compared(host_bound_job(hosts, [0] * ranks, blocked_us=blocked))
    (late,) = found.late
    assert (late.rank, late.slice) == (1, "idle_launch")
    assert late.late_ns == pytest.approx(1_000_000, rel=0.2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_ranks_accuse_none(ranks):
    """Ranks that differ by chance: at most the stated share of jobs accuses one."""
    accused = sum(
        bool(compared(job(work(ranks, 10, seed=seed, noise=0.5))).late) for seed in range(20)
    )
    assert accused <= 1


@given(st.integers(2, 5), st.integers(1, 12), st.integers(1, 300))
def test_ranks_with_the_same_work_accuse_none(ranks, steps, us):
    found = compared(job([[us + step for step in range(steps)]] * ranks))
    assert found.late == ()
    assert found.findings == ()
    assert all(step.late_ns == 0 for step in found.steps)


@given(
    st.integers(2, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(1, 400), min_size=ranks, max_size=ranks), min_size=1, max_size=6
        )
    )
)
def test_variance_shares_add_up(steps):
    found = compared(job([list(rank) for rank in zip(*steps, strict=True)]))
    if found.variance_shares is None:
        assert found.why_no_variance_shares
    else:
        assert found.variance_shares.keys() == {
            *(f"rank {rank}" for rank in range(len(steps[0]))),
            "all ranks",
        }
        assert sum(found.variance_shares.values()) == pytest.approx(1)


def test_variance_goes_to_the_rank_that_varies():
    ranks = [[100] * 12, [100] * 12, [100, 100, 400] * 4]
    found = compared(job(ranks))
    assert found.variance_shares == pytest.approx(
        {"rank 0": 0, "rank 1": 0, "rank 2": 1, "all ranks": 0}
    )
    together = [[100, 200, 300, 400]] * 3
    shares = compared(job(together)).variance_shares
    assert shares == pytest.approx({"rank 0": 0, "rank 1": 0, "rank 2": 0, "all ranks": 1})


def test_a_rank_that_is_late_now_and_then_is_named():
    ranks = [[100] * 24, [100] * 24, [100, 100, 400] * 8, [100] * 24]
    (late,) = compared(job(ranks)).late
    assert (late.rank, late.late_ns) == (2, 100_000)
    assert set(range(5, 27, 3)) <= set(late.steps)


def test_one_long_step_accuses_none():
    ranks = [[100] * 10, [100] * 10, [100] * 9 + [2_000]]
    assert compared(job(ranks)).late == ()


def test_a_rank_for_which_nobody_waits_is_not_late():
    files = []
    for rank, length in enumerate((100, 100, 200)):
        events = []
        for number in range(10):
            now = 1_000 * number
            events += [
                syn.step(number, now, now + length + 10),
                syn.op("aten::mm", now, now + length),
                syn.annotation("gloo:all_reduce", now + length, now + length + 10, thread=9),
            ]
        files.append(syn.build(events, distributedInfo={"rank": rank, "world_size": 3}))
    assert compared(files).late == ()


@pytest.mark.parametrize("part", ["script", "forward"])
def test_ranks_of_a_watch_are_compared_by_its_parts(part):
    files = []
    for rank in range(3):
        events, now = [], 0
        for number in range(10):
            parts = {"script": 10, "forward": 20, "backward": 30}
            parts[part if rank == 2 else "backward"] += 40
            start = now
            for name, length in parts.items():
                events.append(syn.annotation(f"steadytorch.{name}", now, now + length))
                now += length
            events.append(syn.step(number, start, now))
        files.append(syn.build(events, distributedInfo={"rank": rank, "world_size": 3}))
    (late,) = compared(files).late
    assert (late.rank, late.slice, late.late_ns) == (2, f"cpu_{part}", 40)
    (finding,) = compared(files).findings
    assert finding.confidence == "medium"


# -- which file is which rank -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["b.rank2.json", "a-Rank_0.json.gz"], [2, 0]),
        (["run7_10.json", "run7_2.json"], [10, 2]),
        (["late.json", "early.json"], [0, 1]),
        (["run1_1.json", "run2_2.json"], [0, 1]),
    ],
)
def test_ranks_come_from_names_if_the_traces_have_none(names, expected):
    found = compared(job([[10] * 8, [10] * 8], info=False), names)
    assert [each.rank for each in found.ranks] == sorted(expected)
    assert [each.file for each in found.ranks] == [
        name for _, name in sorted(zip(expected, names, strict=True))
    ]
    assert any("ranks are" in remark for remark in found.remarks)


def test_the_order_of_files_does_not_matter():
    files = job(work(3, 10, late=2, by=200), where=DATA)
    results = [compared(list(order)) for order in itertools.permutations(files)]
    assert {tuple(each.rank for each in result.ranks) for result in results} == {(0, 1, 2)}
    assert {result.late[0].rank for result in results} == {2}


# -- input that cannot be compared --------------------------------------------------------------


def test_a_rank_given_twice_is_refused():
    files = job([[10] * 8, [20] * 8])
    with pytest.raises(UsageError, match=r"b.json and c.json are both of rank 1"):
        compared([*files, files[1]], ["a.json", "b.json", "c.json"])


def test_traces_of_other_jobs_are_refused():
    two, three = job([[10] * 3] * 2), job([[10] * 3] * 3)
    with pytest.raises(UsageError, match=r"not of one job: ranks in the job: 2 in .*, 3 in"):
        compared([two[0], three[1]])


def test_traces_of_host_and_gpu_are_refused():
    host, device = job([[10] * 3] * 2), job([[10] * 3] * 2, gpu=True)
    with pytest.raises(UsageError, match=r"kind of trace: cpu in .*, gpu in"):
        compared([host[0], device[1]])


def test_marked_and_unmarked_traces_are_refused():
    marked, bare = job([[10] * 3] * 2, first=0), job([[10] * 3] * 2, marked=False)
    with pytest.raises(UsageError, match=r"step marks: yes in .*, no in"):
        compared([marked[0], bare[1]])


def test_traces_without_a_common_step_are_refused():
    with pytest.raises(UsageError, match=r"no step is in all traces"):
        compared(job([[10] * 4] * 2, steps=[{3, 4}, {5, 6}]))


def test_unmarked_traces_are_one_step():
    found = compared(job([[10] * 4, [40] * 4], marked=False))
    assert len(found.steps) == 1
    assert found.late == ()
    # The trace ends with its last operator, before the last collective.
    assert found.ranks[0].waiting_ns == 3 * 30_000
    assert any("no step marks" in remark for remark in found.remarks)
    (abstention,) = found.abstained
    assert "1 step in all traces; naming a late rank needs 8" in abstention.why


def test_traces_without_collectives_accuse_none():
    files = []
    for rank, length in enumerate((100, 200)):
        events = [
            event
            for number in range(10)
            for event in (
                syn.step(number, 1_000 * number, 1_000 * number + length),
                syn.op("aten::mm", 1_000 * number, 1_000 * number + length),
            )
        ]
        files.append(syn.build(events, distributedInfo={"rank": rank, "world_size": 2}))
    found = compared(files)
    assert found.late == ()
    assert found.ranks[0].overlap is None
    (abstention,) = found.abstained
    assert "no collective" in abstention.why


def test_missing_ranks_and_steps_are_told():
    files = job([[10] * 9] * 4, steps=[set(range(3, 12)), *[set(range(4, 12))] * 3])
    remarks = compared(files[:3]).remarks
    assert remarks[0].startswith("3 of the job's 4 ranks: the others may be later")
    assert "8 of 9 steps are in all traces" in remarks


@pytest.mark.parametrize("info", [{"rank": "x"}, {"rank": True}, {"rank": -1.5}, {}, []])
def test_a_hostile_rank_is_left_out(info):
    files = [
        syn.build([syn.step(0, 0, 10), syn.op("a", 0, 10)], distributedInfo=info) for _ in range(2)
    ]
    assert [each.rank for each in compared(files).ranks] == [0, 1]


# -- the library --------------------------------------------------------------------------------


def test_the_library_takes_paths(tmp_path):
    paths = []
    for rank, content in enumerate(job(work(2, 10, late=0, by=300), where=DATA)):
        paths.append(tmp_path / f"{rank}.json.gz")
        paths[-1].write_bytes(gzip.compress(content))
    found = steady.explain(paths)
    assert [each.rank for each in found.late] == [0]
    assert steady.explain(tuple(map(str, paths))) == found
    with pytest.raises(UsageError, match=r"1 trace in a list"):
        steady.explain(paths[:1])
    with pytest.raises(UsageError, match=r"0 traces in a list"):
        steady.explain([])
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(UsageError, match=r"torn\.json"):
        steady.explain([*paths, tmp_path / "torn.json"])
