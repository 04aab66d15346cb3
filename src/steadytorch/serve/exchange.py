"""Exports and imports several plans as one file, written atomically and validated on read.

The first line of an export file is `{"plans":N,"schema":1}`. Each of the N following lines holds
one plan, in the format of the plan store, with its own digest. An export file contains only data
and no executable code, like all plan files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from steadytorch.device.facts import load_facts
from steadytorch.errors import PlanError, UnsupportedError, UsageError
from steadytorch.plan.files import (
    MAX_BYTES,
    BrokenError,
    clean,
    decoded,
    encoded,
    read_bytes,
    why,
    write_whole,
)
from steadytorch.plan.fingerprint import Difference, Key, differing_fields, in_environment
from steadytorch.plan.remote import RemoteStore
from steadytorch.plan.store import Found, Store, Stored
from steadytorch.serve.plan import Plan

SCHEMA = 1
"""Version of the export format; each plan in it has its own schema."""
MOST_BYTES = 64 * MAX_BYTES


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plans: int
    schema: int


class Imported(NamedTuple):
    """The result of importing one plan.

    Attributes:
        plan: the exported plan; `path` is its file in the store.
        kept: whether the store already had a plan under this key, which stays.
        misfit: key fields in which the plan's machine differs from this one.
    """

    plan: Plan
    kept: bool
    misfit: tuple[Difference, ...]


class Pushed(NamedTuple):
    """The result of pushing one plan to a second store.

    Attributes:
        path: its file in the local store.
        added: whether it was written; False if the second store already had a plan under its key.
        problem: why it could not be pushed, or None.
    """

    path: Path
    added: bool
    problem: str | None


def export_plans(
    path: str | os.PathLike[str],
    ids: Sequence[str] = (),
    store: str | os.PathLike[str] | None = None,
) -> list[Stored]:
    """Exports stored plans to one file, which `import_plans` reads.

    Args:
        path: the file to write; an existing file is replaced atomically.
        ids: ids of plans, or their first digits; all plans by default.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.

    Returns:
        The files read. Files with a problem were not exported.

    Raises:
        PlanError: an id is unknown or ambiguous, its file is unusable, or the store has no plans.
        UsageError: the file cannot be written, or the plans exceed its size limit.
    """
    opened = Store(store, second="")
    entries = [opened.find(each, Plan) for each in ids] if ids else list(opened.entries(Plan))
    for entry in entries if ids else ():
        if entry.problem:
            raise PlanError(f"plan file {clean(entry.path)} {entry.problem}: tune again")
    found = {e.key.digest: encoded(e.key, e.payload) for e in entries if e.key is not None}
    if not found:
        raise PlanError(f"no plans to export in {opened.root}: make one with steady tune")
    head = msgspec.json.encode(_Head(len(found), SCHEMA), order="sorted")
    _write(Path(path), b"".join(line + b"\n" for line in (head, *found.values())))
    return entries


def push_plans(
    url: str, ids: Sequence[str] = (), store: str | os.PathLike[str] | None = None
) -> list[Pushed]:
    """Copies stored plans to a second store; plans already in the second store are kept.

    Args:
        url: an fsspec URL, as in `STEADYTORCH_SECOND_STORE`.
        ids: ids of plans, or their first digits; all plans by default.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.

    Raises:
        PlanError: an id is unknown or ambiguous, or the store has no plans.
    """
    opened, remote, made = Store(store, second=""), RemoteStore(url), []
    entries = [opened.find(each, Plan) for each in ids] if ids else list(opened.entries(Plan))
    if not entries:
        raise PlanError(f"no plans to push in {opened.root}: make one with steady tune")
    for entry in entries:
        problem, added = entry.problem, False
        if entry.key is not None:
            try:
                added = remote.push(entry.key, encoded(entry.key, entry.payload))
            except BrokenError as fault:
                problem = f"{remote.name} {fault}"
        made.append(Pushed(entry.path, added, problem))
    return made


def _write(path: Path, content: bytes) -> None:
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"the plans take {len(content)} bytes; the limit is {MOST_BYTES}: export fewer by id"
        )
    try:
        # Renaming onto a device file would replace it.
        if path.exists() and not path.is_file():
            raise UsageError(f"{clean(path)} is not a regular file: choose another path")
        write_whole(path.parent.resolve() / path.name, content)
    except (OSError, ValueError) as error:
        raise UsageError(f"{clean(path)} cannot be written: {why(error)}") from error


def import_plans(
    path: str | os.PathLike[str], store: str | os.PathLike[str] | None = None
) -> list[Imported]:
    """Imports the plans of an exported file; stores nothing if any part of the file is invalid.

    Each plan is stored under its own key and applies only to machines and models that match it.
    Plans already in the store are kept.

    Args:
        path: a file written by `export_plans`; a regular file of this user.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.

    Raises:
        PlanError: the file cannot be read, or was truncated or altered.
        UnsupportedError: the store cannot be written.
    """
    opened, made = Store(store, second=""), []
    for plan in _plans_in(path):
        there = opened.get(plan.key, Plan)
        kept = isinstance(there, Found)
        at = there.path if isinstance(there, Found) else opened.put(plan.key, plan)
        if at is None:
            raise UnsupportedError(f"import stopped after {len(made)} plans: {opened.trouble}")
        located = msgspec.structs.replace(plan, path=os.fspath(at))
        made.append(Imported(located, kept, misfit(plan.key)))
    return made


def _plans_in(path: str | os.PathLike[str]) -> list[Plan]:
    shown = clean(path)
    try:
        first, *lines = read_bytes(path, MOST_BYTES).removesuffix(b"\n").split(b"\n")
        head = msgspec.json.decode(first, type=_Head)
    except FileNotFoundError:
        raise PlanError(f"{shown} does not exist: check the path") from None
    except (OSError, ValueError, RecursionError, BrokenError) as error:
        # msgspec's errors are ValueErrors, as are those of paths that no file system can have.
        refused = isinstance(error, OSError | BrokenError)
        reason = why(error) if refused else "its first line is not the header of exported plans"
        raise PlanError(f"{shown} was refused: {reason}; see steady plans export") from None
    if head.schema != SCHEMA:
        raise PlanError(f"{shown} has schema {head.schema}; this version reads {SCHEMA}")
    if head.plans != len(lines):
        raise PlanError(f"{shown} holds {len(lines)} of {head.plans} plans: copy it again")
    try:
        if any(len(line) > MAX_BYTES for line in lines):
            raise BrokenError(f"is larger than {MAX_BYTES} bytes")
        return [decoded(line, Plan).payload for line in lines]
    except BrokenError as fault:
        raise PlanError(f"a plan in {shown} {fault}: copy it again") from None


def misfit(key: Key) -> tuple[Difference, ...]:
    """Returns the key fields in which this machine differs; empty if the key fits."""
    try:
        facts = load_facts(key.device)
    except UsageError:  # an unknown device
        facts = load_facts("cpu")
    return tuple(differing_fields(key, in_environment(key, facts)))
