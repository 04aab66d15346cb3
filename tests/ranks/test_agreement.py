"""The agreement, with ranks as threads over an in-memory store."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.ranks.agreement import Agreement, Ballot, Refusal, checked, decide
from steadytorch.ranks.group import DEADLINE, Ranks, ranks_of
from steadytorch.ranks.messages import MOST_BYTES, Answer, Decision, Vote, decode, encode


class OwnProcess(Ranks):
    """A rank whose agreements are numbered as in a process of its own."""

    def next_prefix(self):
        return self.name


def together(store, ballots, problems=None, deadline_s=10.0, present=None):
    """What each rank gets: the served choice's payload, or a refusal."""
    size = len(ballots)
    present = range(size) if present is None else present
    start = Barrier(len(present))

    def one(rank):
        agreement = Agreement(OwnProcess(rank, size, store, "t", deadline_s))
        start.wait()
        answer = agreement.propose(ballots[rank])
        if isinstance(answer, Refusal):
            return answer
        refusal = agreement.finish((problems or {}).get(rank))
        return refusal or (ballots[rank].payload if answer is None else answer)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, present))


def hit(choice, **more):
    return Ballot("subject", {"torch": "2.13"}, choice, choice.encode(), **more)


MISS = Ballot("subject", {"torch": "2.13"})


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.mark.parametrize(
    ("ballots", "served"),
    [
        ([hit("a"), hit("a"), hit("a")], b"a"),
        ([MISS, hit("a"), MISS], b"a"),
        ([hit("b"), hit("a"), MISS], b"b"),
    ],
    ids=["all hit", "one hit", "different plans"],
)
def test_all_ranks_serve_the_plan_of_the_lowest_rank_that_has_one(store, ballots, served):
    assert together(store, ballots) == [served] * 3


def test_only_the_leader_searches_and_knows_the_gpus_of_all(store):
    told = []

    def search(gpus):
        told.append(gpus)
        return "found", b"plan"

    def forbidden(gpus):
        raise AssertionError

    ballots = [
        Ballot("s", {}, search=search, gpu="one"),
        Ballot("s", {}, search=forbidden),
        Ballot("s", {}, search=forbidden, gpu="two"),
    ]
    found = together(store, ballots)
    assert found == [None, b"plan", b"plan"]  # the leader has made its own
    assert told == [("one", "two")]


def test_a_failed_search_leaves_the_others_untouched(store, caplog):
    def search(gpus):
        raise KeyboardInterrupt

    ballots = [Ballot("s", {}, search=search), Ballot("s", {}, search=search)]
    agreements = [Agreement(OwnProcess(rank, 2, store, "f", 10.0)) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(agreements[1].propose, ballots[1])
        with pytest.raises(KeyboardInterrupt):
            agreements[0].propose(ballots[0])
        assert other.result().reason == "the search of rank 0 failed: KeyboardInterrupt"


def test_a_miss_on_all_ranks_without_a_search_is_said_once(store, caplog):
    with caplog.at_level(logging.WARNING, "steadytorch"):
        found = together(store, [MISS, MISS, MISS])
    assert found == [Refusal("no rank has a plan for these inputs")] * 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("ballots", "problems", "reason"),
    [
        (
            [hit("a"), hit("a", problem="no memory"), hit("a", problem="no memory")],
            {},
            "ranks 1, 2: no memory",
        ),
        ([hit("a")] * 3, {2: "the build failed"}, "rank 2: the build failed"),
        (
            [hit("a"), hit("a"), Ballot("other", {"torch": "2.11"}, "a", b"a")],
            {},
            "rank 2 differ from rank 0 in torch (2.11 against 2.13)",
        ),
    ],
    ids=["cannot serve", "cannot build", "another version"],
)
def test_a_rank_with_a_problem_leaves_all_untouched(store, ballots, problems, reason):
    assert together(store, ballots, problems) == [Refusal(reason)] * 3


def test_a_missing_rank_leaves_the_others_untouched_at_the_deadline(store):
    found = together(store, [hit("a")] * 3, deadline_s=0.3, present=[0, 2])
    assert {each.is_absence for each in found} == {True}
    assert {each.reason for each in found} == {
        "no vote of rank 1 within 0.3 s: pass agree=False where only some ranks take part"
    }


def test_messages_of_an_earlier_run_do_not_count(store):
    assert together(store, [hit("a"), hit("a")]) == [b"a", b"a"]
    # The same keys, as after a restart that kept the store.
    assert together(store, [hit("b"), MISS]) == [b"b", b"b"]
    assert together(store, [hit("b"), hit("b")], {1: "gone"}) == [Refusal("rank 1: gone")] * 2


def test_damaged_bytes_are_refused():
    assert checked(b"plan", "0" * 64) == "the bytes of the plan arrived damaged"
    assert "over the limit" in checked(b"x" * (1 << 21), "")


votes = st.builds(
    Vote,
    token=st.uuids().map(str),
    subject=st.sampled_from(["s", "s", "s", "t"]),
    choice=st.sampled_from([None, "a", "b"]),
    searches=st.booleans(),
    problem=st.sampled_from([None, None, None, "p"]),
)


@given(st.lists(votes, min_size=2, max_size=6))
def test_a_decision_names_every_vote_and_proposes_only_what_fits_all(found):
    decision = decide(found)
    assert decision.tokens == tuple(vote.token for vote in found)
    if decision.kind in ("propose", "search"):
        assert not any(vote.problem for vote in found)
        assert len({vote.subject for vote in found}) == 1
    if decision.kind == "propose":
        assert decision.choice == found[decision.source].choice
        assert not any(vote.choice for vote in found[: decision.source])
    if decision.kind == "untouched":
        assert decision.reason


@given(st.binary(max_size=200), st.sampled_from([Vote, Decision, Answer]))
def test_malformed_messages_are_value_errors(data, kind):
    with suppress(ValueError):
        assert isinstance(decode(data, kind), kind)


def test_messages_round_trip_and_are_bounded():
    vote = Vote(token="t", subject="s", fields={"torch": "2.13"})
    assert decode(encode(vote).encode(), Vote) == vote
    with pytest.raises(ValueError, match="over the limit"):
        decode(b" " * (MOST_BYTES + 1), Vote)


def test_without_a_group_there_is_nobody_to_agree_with():
    assert ranks_of() is None
    assert ranks_of(agree=False) is None


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_wrong_deadline_is_refused(monkeypatch, text):
    from steadytorch.ranks import group

    monkeypatch.setenv(DEADLINE, text)
    with pytest.raises(UsageError, match=DEADLINE):
        group.deadline_from_environment()
