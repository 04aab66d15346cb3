"""Engines of cuDNN that were chosen before: those of stored plans, and those kept without one.

What is read here is where the next choice starts from, no more: an engine is verified again before
it is used, timed wherever the time reaches, and a better one takes its place.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from steadytorch.ambient import ambient
from steadytorch.conv.choices import Choice, read_choices, write_choices
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import SteadyError
from steadytorch.plan.files import clean
from steadytorch.plan.fingerprint import Key, in_environment, make_key
from steadytorch.plan.store import Store, Stored
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.workload.workload import Workload

FOLDER = "engines"
"""Folder of the plan store with what was chosen without a plan; files as those of plans."""
TRANSFORM = "cudnn_engines"
MOST_FILES = 1000
"""Read from either place; a bound on time."""

_DECISIVE = ("device_name", "compute_capability", "sm_count", "mig_profile", "cudnn")

logger = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """What is read of a stored plan, and all there is where none was made.

    Attributes:
        candidate: transforms, the engines among them.
        created: ISO 8601, UTC.
    """

    candidate: Candidate
    created: str


def known_engines(facts: DeviceFacts, plans: Store) -> dict[str, Choice]:
    """Engines that were chosen on this kind of device with this cuDNN, by problem key.

    Where several were chosen for one problem, the newest counts. What cannot be read is left out,
    with one warning for all of it.

    Args:
        facts: of the device.
        plans: the plan store.
    """
    found: list[tuple[str, dict[str, Choice]]] = []
    problems: list[str] = []
    for entry in _entries(plans):
        if entry.key is None:
            problems.append(f"{entry.path} {entry.problem}")
        elif _fits(entry.key, facts):
            try:
                found.append((entry.payload.created, _choices(entry.payload.candidate)))
            except SteadyError as error:
                problems.append(f"{entry.path}: {error}")
    if problems:
        logger.warning(
            "%d of the stored files that may name engines passed over: %s",
            len(problems),
            clean(problems[0]),
        )
    merged: dict[str, Choice] = {}
    for _, choices in sorted(found, key=lambda pair: pair[0]):
        merged.update(choices)
    return merged


def keep_engines(
    workload: Workload,
    prefix: Candidate,
    facts: DeviceFacts,
    choices: Mapping[str, Choice],
    plans: Store,
) -> None:
    """Keeps what was chosen, for the next choice to start from; in memory where the disk refuses.

    Args:
        workload: whose convolutions they are for.
        prefix: transforms under which they were chosen.
        facts: of the device.
        choices: by problem key; nothing is written where there are none.
        plans: the plan store; see `FOLDER`.
    """
    own = store_of_engines(plans)
    if own is None or not choices:
        return
    key = make_key(
        workload,
        workload.signature().on(facts.device),
        facts,
        objective=FOLDER,
        precision=" + ".join(map(str, prefix)),
        tolerance=None,
        max_memory_bytes=None,
        ambient=ambient(),
    )
    spec = TransformSpec(TRANSFORM, (("choices", write_choices(choices)),))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    own.put(key, Kept((spec,), now))


def store_of_engines(plans: Store) -> Store | None:
    """Where engines are kept that were chosen without a plan; None where there is no home."""
    return None if plans.root is None else Store(plans.root / FOLDER, second="")


def _entries(plans: Store) -> Iterator[Stored]:
    for store in (plans, store_of_engines(plans)):
        if store is not None:
            yield from islice(store.entries(Kept), MOST_FILES)


def _fits(key: Key, facts: DeviceFacts) -> bool:
    here = in_environment(key, facts)
    return all(getattr(key, name) == getattr(here, name) for name in _DECISIVE)


def _choices(candidate: Candidate) -> dict[str, Choice]:
    """The engines that a candidate names.

    Raises:
        UsageError: they are not written as engines are.
    """
    found: dict[str, Choice] = {}
    for spec in candidate:
        if spec.name == TRANSFORM:
            found.update(read_choices(str(dict(spec.parameters).get("choices", ""))))
    return found
