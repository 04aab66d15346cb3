"""One agreement between ranks: all ranks run the same plan, or all run the untouched model.

Ranks communicate only through the process group's key-value store, without collectives or pickle.

1. Each rank writes its vote: a random token, the subject of the agreement, and its plan, if any.
2. The leader, rank 0, reads the votes and proposes a plan. If no rank has a plan, the leader may
   search first.
3. Ranks without the proposed plan fetch its bytes and check their digest. Each rank prepares the
   plan and writes whether it can run the plan.
4. The leader writes the final decision. A rank past its deadline writes the final decision
   `untouched` itself. The leader and late ranks write with `compare_set` on one key, so the first
   final decision holds for all ranks.

A decision holds for a rank only if it contains the token of that rank's vote, because the store of
`torchrun` survives restarts. A rank that loses its connection to the store before it answers a
proposal runs the untouched model; without its answer, no rank runs the plan. A rank that loses the
connection after answering cannot know the decision and raises `UncertainError`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import finalize

import msgspec

from steadytorch.errors import SteadyError, first_line, one_line
from steadytorch.ranks.group import Ranks
from steadytorch.ranks.messages import (
    MOST_PAYLOAD,
    Answer,
    Decision,
    Vote,
    decode,
    encode,
)

LATE_S = 1.0
"""Seconds past a deadline after which the store counts as lost, because a call to it hangs."""
BEAT_S = 1.0
_POLL_S = 0.001
_SLOWEST_POLL_S = 0.02

log = logging.getLogger("steadytorch")

T = TypeVar("T")


class UncertainError(SteadyError):
    """The store was lost after this rank had answered, so the final decision is unknown."""


class Ballot(NamedTuple):
    """This rank's input to an agreement: its plan, any problem, and a function that searches.

    Attributes:
        subject: digest of what is decided; must be equal on all ranks.
        fields: what the subject depends on, to name differences.
        choice: digest of the decision this rank holds; None without a plan.
        payload: the bytes of the plan, for ranks without it; at most 1 MiB.
        problem: why this rank must run untouched.
        search: makes the payload where no rank has a plan, given the GPUs of all ranks: returns
            choice and payload, or the reason why there is none. Called on the leader only; None for
            no search.
        gpu: UUID of this rank's GPU; empty on a CPU.
    """

    subject: str
    fields: Mapping[str, str] = MappingProxyType({})
    choice: str | None = None
    payload: bytes | None = None
    problem: str | None = None
    search: Callable[[tuple[str, ...]], tuple[str, bytes] | str] | None = None
    gpu: str = ""


class Refusal(NamedTuple):
    """Why all ranks run the untouched model; `is_absence` if a rank was missing, late or gone."""

    reason: str
    is_absence: bool = False


class _LostError(Exception):
    """The process group's key-value store failed or hangs."""


class Agreement:
    """Decides once, for all ranks together, whether a plan is used.

    On every rank, call `propose`, prepare the plan, then call `finish`. All ranks must make their
    agreements in the same order. `propose` and `finish` block for at most the deadline plus two
    seconds without a heartbeat from another rank. Ranks send heartbeats while they search or
    prepare a plan.

    Args:
        ranks: this process and its group.
        what: what is agreed on, for messages.
    """

    def __init__(self, ranks: Ranks, what: str = "a plan") -> None:
        self._ranks, self._what = ranks, what
        self._prefix = ranks.next_prefix()
        self._token = secrets.token_hex(16)
        self._store: Any = None
        self._life = time.monotonic()
        self._alive = 0
        self._vote = Vote(token=self._token, subject="")
        self._payload: bytes | None = None
        self._decision: Decision | None = None
        self._answered = self._is_over = False
        self._lock = Lock()
        self._stop_beating: Callable[[], None] = lambda: None

    def propose(self, ballot: Ballot) -> bytes | Refusal | None:
        """Votes, and waits for the leader's proposal.

        Returns:
            The payload of the proposed plan if it is not this rank's own, None if it is, or a
            `Refusal` on all ranks.

        Raises:
            BaseException: whatever the search raises on the leader; the others run untouched.
        """
        payload = ballot.payload
        self._payload = payload
        self._vote = Vote(
            token=self._token,
            subject=ballot.subject,
            fields=dict(ballot.fields),
            choice=ballot.choice,
            sha256=None if payload is None else hashlib.sha256(payload).hexdigest(),
            searches=ballot.search is not None,
            problem=ballot.problem,
            gpu=ballot.gpu,
        )
        self._life = time.monotonic()
        try:
            decision, fetched = self._guarded(self._voted)
            if decision.kind == "search":
                assert ballot.search is not None
                decision, fetched = self._searched(ballot.search)
        except _LostError as error:
            return self._lost(error)
        if decision.kind == "untouched":
            return self._refused(decision)
        self._decision = decision
        if fetched is not None and (damage := checked(fetched, decision.sha256)) is not None:
            return self.finish(damage) or Refusal(damage)
        self._beat()
        return fetched

    def finish(self, problem: str | None = None) -> Refusal | None:
        """Announces whether this rank can run the plan, and waits for the final decision.

        Args:
            problem: why this rank cannot serve the proposed plan; None if it is ready.

        Returns:
            None if every rank serves the plan, or a `Refusal` on all ranks.

        Raises:
            UncertainError: the store was lost after this rank had said that it is ready.
        """
        self._stop_beating()
        self._life = time.monotonic()
        try:
            decision = self._guarded(lambda: self._settled(problem))
        except _LostError as error:
            if not self._answered or problem is not None:
                return self._lost(error)
            raise UncertainError(
                f"the process group's store was lost while ranks agreed on {self._what} "
                f"({error}): other ranks may serve the plan; restart the job"
            ) from None
        if decision.kind == "untouched":
            return self._refused(decision)
        if self._ranks.rank == 0:
            note = f": {decision.reason}" if decision.reason else ""
            log.info("%d ranks agree on %s%s", self._ranks.size, self._what, note)
        return None

    # -- results --------------------------------------------------------------------------------

    def _refused(self, decision: Decision) -> Refusal:
        if self._ranks.rank == 0:
            log.warning("all ranks run untouched (%s): %s", self._what, decision.reason)
        return Refusal(decision.reason, decision.is_absence)

    def _lost(self, error: _LostError) -> Refusal:
        reason = f"the process group's store was lost: {error}"
        log.error("running untouched (%s): %s", self._what, reason)
        return Refusal(reason, True)

    # -- the store ------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], T]) -> T:
        """Runs store access in a separate thread, because a call to a stopped store may hang.

        Raises:
            _LostError: the store failed, or a call to it hangs.
        """
        done, found, failed = Event(), [], []

        def run() -> None:
            try:
                if self._store is None:
                    self._store = _with_prefix(self._ranks.store, self._prefix)
                found.append(work())
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        Thread(target=run, name="steadytorch-ranks", daemon=True).start()
        try:
            while not done.wait(max(0.0, self._deadline + LATE_S - time.monotonic())):
                if time.monotonic() >= self._deadline + LATE_S:
                    raise _LostError(f"it did not answer within {self._ranks.deadline_s:g} s")
        except BaseException:
            with self._lock:
                self._is_over = True  # this rank answers no more, so no rank serves
            raise
        if failed:
            raise _LostError(one_line(failed[0])) from None
        return found[0]

    @property
    def _deadline(self) -> float:
        return self._life + self._ranks.deadline_s

    def _pace(self) -> Iterator[bool]:
        """Yields at each poll whether the deadline has passed; the wait between polls grows."""
        pause = _POLL_S
        while not self._is_over:
            alive = self._store.add("alive", 0)
            if alive != self._alive:
                self._alive, self._life = alive, time.monotonic()
            yield time.monotonic() > self._deadline
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_S, 1.3 * pause)
        raise _LostError("interrupted")

    @contextmanager
    def _beating(self) -> Iterator[None]:
        self._beat()
        try:
            yield
        finally:
            self._stop_beating()

    def _beat(self) -> None:
        """Starts a thread that sends heartbeats until `_stop_beating` is called."""
        stopped, store = Event(), self._store
        seconds = min(BEAT_S, self._ranks.deadline_s / 4)

        def beat() -> None:
            with suppress(Exception):  # a lost store is reported by the next step
                while not stopped.wait(seconds):
                    store.add("alive", 1)

        Thread(target=beat, name="steadytorch-ranks-alive", daemon=True).start()
        self._stop_beating = stopped.set
        finalize(self, stopped.set)  # an agreement that is dropped must not keep others waiting

    def _read(self) -> tuple[str, Decision | None]:
        """Reads the stored decision: its text, and the decoded decision if valid for this rank."""
        if not self._store.check(["decision"]):
            return "", None
        data = self._store.get("decision")
        try:
            decision = decode(data, Decision)
        except ValueError:
            return data.decode("utf-8", "replace"), None
        tokens = decision.tokens
        mine = len(tokens) == self._ranks.size and tokens[self._ranks.rank] == self._token
        return data.decode(), decision if mine else None

    def _swap(self, seen: str, decision: Decision) -> None:
        self._store.compare_set("decision", seen, encode(decision))

    def _untouched(
        self, reason: str, votes: Sequence[Vote | None], is_absence: bool = False
    ) -> Decision:
        return Decision(
            kind="untouched",
            nonce=secrets.token_hex(8),
            tokens=tuple(None if vote is None else vote.token for vote in votes),
            reason=reason[:2000],
            is_absence=is_absence,
        )

    def _votes(self) -> list[Vote | None]:
        """The votes so far; None for a rank without a vote.

        A malformed vote is replaced by one that reports this as the rank's problem.
        """
        names = [f"vote/{rank}" for rank in range(self._ranks.size)]
        if self._store.check(names):
            return [_vote(data) for data in self._store.multi_get(names)]
        return [_vote(self._store.get(n)) if self._store.check([n]) else None for n in names]

    # -- voting ---------------------------------------------------------------------------------

    def _voted(self) -> tuple[Decision, bytes | None]:
        self._alive = self._store.add("alive", 0)
        self._store.set(f"vote/{self._ranks.rank}", encode(self._vote))
        return self._proposed()

    def _proposed(self) -> tuple[Decision, bytes | None]:
        """Waits for a proposal or a final decision, and fetches the proposed plan."""
        for is_late in self._pace():
            seen, decision = self._read()
            if decision is not None and decision.is_final:
                return decision, None
            if self._ranks.rank == 0:
                self._lead(seen, decision)
                if decision is not None and decision.kind == "search" and not self._vote.choice:
                    return decision, None
            if decision is not None and decision.kind == "propose":
                fetched = self._fetched(decision)
                if fetched is not _PENDING:
                    return decision, fetched
            if is_late and (final := self._give_up(seen, decision)) is not None:
                return final, None
        raise AssertionError  # `_pace` ends by raising

    def _fetched(self, decision: Decision) -> Any:
        """The plan's bytes; None if this rank has the plan, `_PENDING` until they are published."""
        name = f"plan/{decision.nonce}"
        if decision.source == self._ranks.rank and self._payload is not None:
            if not self._store.check([name]):
                self._store.set(name, self._payload)
            return None
        if decision.choice == self._vote.choice:
            return None
        return self._store.get(name) if self._store.check([name]) else _PENDING

    def _searched(
        self, search: Callable[[tuple[str, ...]], tuple[str, bytes] | str]
    ) -> tuple[Decision, bytes | None]:
        """Searches while sending heartbeats, then proposes the plan found; on the leader only."""
        votes = self._guarded(self._votes)
        gpus = tuple(vote.gpu for vote in votes if vote is not None and vote.gpu)
        try:
            with self._beating():
                found = search(gpus)
        except BaseException as error:
            text = one_line(error) if isinstance(error, Exception) else type(error).__name__
            self._life = time.monotonic()
            with suppress(_LostError):
                self._guarded(lambda: self._vetoed(f"the search of rank 0 failed: {text}"))
            raise
        self._life = time.monotonic()
        if isinstance(found, str):
            return self._guarded(lambda: self._vetoed(found)), None
        choice, self._payload = found
        digest = hashlib.sha256(self._payload).hexdigest()
        self._vote = msgspec.structs.replace(self._vote, choice=choice, sha256=digest)
        return self._guarded(self._voted)

    def _vetoed(self, reason: str) -> Decision:
        """Returns the final decision; writes the decision `untouched` if there is none yet."""
        while True:
            seen, decision = self._read()
            if decision is not None and decision.is_final:
                return decision
            self._swap(seen, self._untouched(reason, self._votes()))

    def _give_up(self, seen: str, decision: Decision | None) -> Decision | None:
        """Writes the decision `untouched` after the deadline, and returns None.

        If the other ranks decided without this rank, returns a local `untouched` decision instead.
        """
        votes = self._votes()
        missing = [rank for rank, vote in enumerate(votes) if vote is None]
        if decision is None and _is_final(seen):
            # Either of an earlier run, or made without this rank, which then must not serve.
            return self._untouched("the other ranks decided without this one", votes, True)
        silent: list[int] = []
        if decision is not None and decision.kind == "propose":
            silent = [r for r in range(self._ranks.size) if self._answer(r, decision) is None]
        within = f"within {self._ranks.deadline_s:g} s"
        if missing:
            reason = (
                f"no vote of {_named(missing)} {within}: pass agree=False where only some ranks "
                "take part"
            )
        elif silent:
            reason = f"no answer of {_named(silent)} {within}"
        else:
            reason = f"no decision of rank 0 {within}"
        self._swap(seen, self._untouched(reason, votes, True))
        return None

    # -- the leader -----------------------------------------------------------------------------

    def _lead(self, seen: str, decision: Decision | None) -> None:
        """Updates the decision from the votes and answers so far; on the leader only."""
        if not self._store.check([f"vote/{rank}" for rank in range(self._ranks.size)]):
            return
        votes = [vote for vote in self._votes() if vote is not None]
        tokens = tuple(vote.token for vote in votes)
        found = decision is not None and decision.kind == "search" and votes[0].choice is not None
        if decision is None or decision.tokens != tokens or found:
            self._swap(seen, decide(votes))
            return
        if decision.kind != "propose":
            return
        answers = [self._answer(rank, decision) for rank in range(self._ranks.size)]
        problems = {rank: a.problem for rank, a in enumerate(answers) if a and a.problem}
        if problems:
            self._swap(seen, self._untouched(_listed(problems), votes))
        elif all(answers):
            nonce = secrets.token_hex(8)
            self._swap(seen, msgspec.structs.replace(decision, kind="serve", nonce=nonce))

    def _answer(self, rank: int, decision: Decision) -> Answer | None:
        """The answer of a rank to a proposal; None if the rank has not answered yet."""
        name = f"answer/{rank}"
        if not self._store.check([name]):
            return None
        try:
            answer = decode(self._store.get(name), Answer)
        except ValueError as error:
            return Answer(nonce=decision.nonce, problem=f"malformed answer: {first_line(error)}")
        return answer if answer.nonce == decision.nonce else None

    # -- settling -------------------------------------------------------------------------------

    def _settled(self, problem: str | None) -> Decision:
        """Answers the proposal, and waits for the final decision."""
        assert self._decision is not None
        proposed, answered = self._decision, None
        for is_late in self._pace():
            seen, decision = self._read()
            if decision is not None and decision.is_final:
                return decision
            # A restarted rank makes the leader propose again.
            if decision is not None and decision.kind == "propose" and decision.nonce != answered:
                answered = decision.nonce
                other = "the proposal changed" if decision.choice != proposed.choice else None
                self._fetched(decision)
                answer = Answer(nonce=answered, problem=problem or other)
                with self._lock:
                    if self._is_over:
                        continue
                    self._answered = self._answered or answer.problem is None
                self._store.set(f"answer/{self._ranks.rank}", encode(answer))
            if self._ranks.rank == 0:
                self._lead(seen, decision)
            if is_late and (final := self._give_up(seen, decision)) is not None:
                return final
        raise AssertionError  # `_pace` ends by raising


_PENDING = object()


def decide(votes: Sequence[Vote]) -> Decision:
    """The leader's decision once every rank has voted; depends on the votes only."""
    tokens, nonce = tuple(vote.token for vote in votes), secrets.token_hex(8)

    def untouched(reason: str) -> Decision:
        return Decision(kind="untouched", nonce=nonce, tokens=tokens, reason=reason[:2000])

    problems = {rank: vote.problem for rank, vote in enumerate(votes) if vote.problem}
    if problems:
        return untouched(_listed(problems))
    others = [rank for rank, vote in enumerate(votes) if vote.subject != votes[0].subject]
    if others:
        return untouched(_differing(votes, others))
    holders = [rank for rank, vote in enumerate(votes) if vote.choice]
    if not holders:
        if votes[0].searches:
            return Decision(kind="search", nonce=nonce, tokens=tokens)
        return untouched("no rank has a plan for these inputs")
    # The lowest rank wins, as times of different ranks cannot be compared.
    source = holders[0]
    without = [rank for rank, vote in enumerate(votes) if not vote.choice]
    others = [rank for rank in holders if votes[rank].choice != votes[source].choice]
    notes = [f"{_named(without)} had no plan"] if without else []
    notes += [f"{_named(others)} had another plan"] if others else []
    took = f", and took that of rank {source}" if notes else ""
    return Decision(
        kind="propose",
        nonce=nonce,
        tokens=tokens,
        choice=votes[source].choice,
        sha256=votes[source].sha256,
        source=source,
        reason=" and ".join(notes) + took,
    )


def checked(payload: bytes, sha256: str | None) -> str | None:
    """The reason to reject the fetched bytes of a plan; None if their size and digest are valid."""
    if len(payload) > MOST_PAYLOAD:
        return f"the plan's {len(payload)} bytes are over the limit of {MOST_PAYLOAD}"
    if hashlib.sha256(payload).hexdigest() != sha256:
        return "the bytes of the plan arrived damaged"
    return None


def _with_prefix(store: Any, prefix: str) -> Any:
    from torch.distributed import PrefixStore

    # Not a clone: `TCPStore.clone` hung in one run of ten with PyTorch 2.13. All calls are short,
    # so sharing the connection blocks no other user of the store.
    return PrefixStore(prefix, store)


def _vote(data: bytes) -> Vote:
    try:
        return decode(data, Vote)
    except ValueError as error:
        return Vote(token="", subject="", problem=f"malformed vote: {first_line(error)}")


def _is_final(text: str) -> bool:
    try:
        return decode(text.encode(), Decision).is_final
    except ValueError:
        return False


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _listed(problems: Mapping[int, str | None]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in problems.items():
        by_text.setdefault(str(text)[:300], []).append(rank)
    return "; ".join(f"{_named(ranks)}: {text}" for text, ranks in list(by_text.items())[:4])


def _differing(votes: Sequence[Vote], others: Sequence[int]) -> str:
    first, other = votes[0].fields, votes[others[0]].fields
    names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
    text = ", ".join(
        f"{n} ({str(other.get(n))[:60]} against {str(first.get(n))[:60]})" for n in names[:4]
    )
    return f"{_named(others)} differ from rank 0 in {text or 'what they ask for'}"
