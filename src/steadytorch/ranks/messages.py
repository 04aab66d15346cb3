"""Messages of an agreement between ranks: JSON of bounded size, validated on read."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

MOST_BYTES = 1 << 18
"""Maximum size of a message in bytes; plans have their own limit, `MOST_PAYLOAD`."""
MOST_PAYLOAD = 1 << 20


class Vote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vote of one rank in an agreement: its plan, or why it cannot run one.

    Attributes:
        token: random and new for each agreement of each process, so that messages of an earlier
            run in the same store do not count.
        subject: what is decided; the same on all ranks.
        fields: what the subject depends on, to name differences.
        choice: digest of the decision this rank holds; None if it has no plan.
        sha256: digest of the payload of that choice.
        searches: whether the leader may search if no rank holds a plan.
        problem: why this rank must run untouched; None if it need not.
        gpu: UUID of this rank's GPU; empty on a CPU.
    """

    token: str
    subject: str
    fields: dict[str, str] = {}
    choice: str | None = None
    sha256: str | None = None
    searches: bool = False
    problem: str | None = None
    gpu: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The current decision in an agreement. Decisions of kind `serve` and `untouched` are final.

    Attributes:
        kind: `search`: the leader searches; `propose`: every rank fetches the plan and prepares it.
        nonce: random and new for each decision.
        tokens: token of each rank whose vote was counted, None for the others. The decision holds
            for these tokens only.
        choice: digest of the decision to serve.
        sha256: digest of its payload.
        source: the rank that publishes the payload.
        reason: why ranks run untouched, or a note on how the choice was made.
        is_absence: whether a rank was missing, late or gone.
    """

    kind: Literal["search", "propose", "serve", "untouched"]
    nonce: str
    tokens: tuple[str | None, ...]
    choice: str | None = None
    sha256: str | None = None
    source: int = 0
    reason: str = ""
    is_absence: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the decision is final: `serve` or `untouched`."""
        return self.kind in ("serve", "untouched")


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's answer to a proposed plan.

    Attributes:
        nonce: of the proposal.
        problem: why this rank cannot serve it; None if it is ready.
    """

    nonce: str
    problem: str | None = None


class Ending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message that ends a plan on all ranks because of a fault on one rank.

    Attributes:
        step: the first step without the plan.
        rank: the rank that asked for it.
        reason: its reason.
        kind: `plan`, or `graphs` for its recorded graphs only.
    """

    step: int
    rank: int
    reason: str
    kind: Literal["plan", "graphs"] = "plan"

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


M = TypeVar("M", Vote, Decision, Answer, Ending)


def encode(message: Vote | Decision | Answer | Ending) -> str:
    """Encodes a message as JSON text."""
    return msgspec.json.encode(message).decode()


def decode(data: bytes, kind: type[M]) -> M:
    """Decodes a message of an agreement.

    Raises:
        ValueError: it is too large or malformed.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is over the limit of {MOST_BYTES}")
    return msgspec.json.decode(data, type=kind)
