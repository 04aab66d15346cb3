"""cuDNN convolution engines from earlier searches, stored with or without a plan.

Stored engines only seed the next search. The search verifies each stored engine before use and
times it if the budget allows; a faster engine replaces the stored one.
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
from steadytorch.results.candidate import Candidate, TransformSpec, describe
from steadytorch.workload.workload import Workload

FOLDER = "engines"
"""Subfolder of the plan store for engines that belong to no plan, stored as plan files."""
TRANSFORM = "cudnn_engines"
MOST_FILES = 1000
"""Limit on files read from each folder, to bound the time."""

_DECISIVE = ("device_name", "compute_capability", "sm_count", "mig_profile", "cudnn")

logger = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """The fields of a stored plan that name engines, and the payload of engines without a plan.

    Attributes:
        candidate: transforms, including the engines.
        created: ISO 8601, UTC.
    """

    candidate: Candidate
    created: str


def known_engines(facts: DeviceFacts, plans: Store) -> dict[str, Choice]:
    """Reads the stored engines for this device model and cuDNN version, by convolution problem key.

    The newest choice for a convolution problem wins. Unreadable plan files are skipped, with one
    warning for all of them.

    Args:
        facts: facts of the device.
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
            "skipped %d stored files that may name engines; the first: %s",
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
    """Stores chosen engines to seed later searches; only in memory if the disk is not writable.

    Args:
        workload: the workload with these convolutions.
        prefix: transforms under which the engines were chosen.
        facts: facts of the device.
        choices: engines by problem key; if empty, nothing is written.
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
        precision=describe(prefix, ""),
        tolerance=None,
        max_memory_bytes=None,
        ambient=ambient(),
    )
    spec = TransformSpec(TRANSFORM, (("choices", write_choices(choices)),))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    own.put(key, Kept((spec,), now))


def store_of_engines(plans: Store) -> Store | None:
    """The store for engines without a plan; None without a home directory."""
    return None if plans.root is None else Store(plans.root / FOLDER, second="")


def _entries(plans: Store) -> Iterator[Stored]:
    for store in (plans, store_of_engines(plans)):
        if store is not None:
            yield from islice(store.entries(Kept), MOST_FILES)


def _fits(key: Key, facts: DeviceFacts) -> bool:
    here = in_environment(key, facts)
    return all(getattr(key, name) == getattr(here, name) for name in _DECISIVE)


def _choices(candidate: Candidate) -> dict[str, Choice]:
    """Parses the engine choices in a candidate's `cudnn_engines` transforms.

    Raises:
        UsageError: the choices are malformed.
    """
    found: dict[str, Choice] = {}
    for spec in candidate:
        if spec.name == TRANSFORM:
            found.update(read_choices(str(dict(spec.parameters).get("choices", ""))))
    return found
