"""Plans between machines: one file of several, written whole and read with doubt.

Its first line is `{"plans":N,"schema":1}`; each of the N others is a plan file as the store has it,
with its own digest. It is data only, like all plan files.
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
from steadytorch.plan.store import Found, Store, Stored
from steadytorch.serve.plan import Plan

SCHEMA = 1
"""Version of the file that plans are exported to; each plan in it has that of plan files."""
MOST_BYTES = 64 * MAX_BYTES


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plans: int
    schema: int


class Imported(NamedTuple):
    """What became of one plan of an imported file.

    Attributes:
        plan: as it was exported; `path` is its place in the store, None where it was not stored.
        kept: whether the store had one under the same key, which stays.
        misfit: key fields in which the machine it was made on differs from this one.
    """

    plan: Plan
    kept: bool
    misfit: tuple[Difference, ...]


def export_plans(
    path: str | os.PathLike[str],
    ids: Sequence[str] = (),
    store: str | os.PathLike[str] | None = None,
) -> list[Stored]:
    """Writes stored plans to one file that `import_plans` reads elsewhere.

    Args:
        path: the file; one that exists is replaced, whole or not at all.
        ids: of plans, or their first digits; all plans by default.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.

    Returns:
        The files looked at; those with a problem are no plans and were left out.

    Raises:
        PlanError: an id is unknown, its file is no plan, or there are none to export.
        UsageError: the file cannot be written, or the plans are too many for one.
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


def _write(path: Path, content: bytes) -> None:
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"the plans take {len(content)} bytes, and one file holds {MOST_BYTES}: name fewer"
        )
    try:
        # Renaming onto a device would replace it.
        if path.exists() and not path.is_file():
            raise UsageError(f"{clean(path)} is not a regular file: name another one")
        write_whole(path.parent.resolve() / path.name, content)
    except (OSError, ValueError) as error:
        raise UsageError(f"{clean(path)} cannot be written: {why(error)}") from error


def import_plans(
    path: str | os.PathLike[str], store: str | os.PathLike[str] | None = None
) -> list[Imported]:
    """Stores the plans of an exported file, or none of them where the file is not in order.

    Each is stored under its own key, and so is used where it fits. A plan that the store has
    already stays as it is: it was made or accepted here.

    Args:
        path: what `export_plans` wrote; a regular file of one's own.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.

    Raises:
        PlanError: the file cannot be read, or was cut or altered.
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
        reason = why(error) if refused else "its first line is not that of exported plans"
        raise PlanError(f"{shown} was refused: {reason}; see steady plans export") from None
    if head.schema != SCHEMA:
        raise PlanError(f"{shown} has schema {head.schema}, and this version reads {SCHEMA}")
    if head.plans != len(lines):
        raise PlanError(
            f"{shown} has {len(lines)} of the {head.plans} plans that it names: copy it anew"
        )
    try:
        if any(len(line) > MAX_BYTES for line in lines):
            raise BrokenError(f"is larger than {MAX_BYTES} bytes")
        return [decoded(line, Plan).payload for line in lines]
    except BrokenError as fault:
        raise PlanError(f"a plan in {shown} {fault}: copy it anew") from None


def misfit(key: Key) -> tuple[Difference, ...]:
    """The key fields in which the machine of a key differs from this one; empty where it fits."""
    try:
        facts = load_facts(key.device)
    except UsageError:  # a device that nobody has
        facts = load_facts("cpu")
    return tuple(differing_fields(key, in_environment(key, facts)))
