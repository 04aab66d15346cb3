from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from steadytorch.errors import PlanError
from steadytorch.plan.files import MAX_BYTES, read_file
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import QUARANTINE, Found, Miss, Store


class Payload(msgspec.Struct):
    number: int
    text: str = ""


def miss(store: Store, key: Key) -> Miss:
    found = store.get(key, Payload)
    assert isinstance(found, Miss)
    return found


def quarantined(store: Store) -> list[bytes]:
    assert store.root is not None
    return [each.read_bytes() for each in (store.root / QUARANTINE).glob("*")]


def test_a_stored_payload_is_found(store: Store, key: Key, path: Path) -> None:
    assert store.get(key, Payload) == Found(Payload(1), path)


def test_another_store_object_finds_it(store: Store, key: Key, path: Path) -> None:
    assert Store(store.root).get(key, Payload) == Found(Payload(1), path)


def test_a_second_payload_replaces_the_first(store: Store, key: Key, path: Path) -> None:
    assert store.put(key, Payload(2)) == path
    assert store.get(key, Payload) == Found(Payload(2), path)


def test_the_first_payload_added_stays_and_is_returned(store: Store, key: Key, path: Path) -> None:
    assert store.add(key, Payload(1)) == Found(Payload(1), path)
    assert Store(store.root).add(key, Payload(2)) == Found(Payload(1), path)
    assert store.get(key, Payload) == Found(Payload(1), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_add_replaces_an_unusable_file(store: Store, key: Key, path: Path) -> None:
    store.put(key, Payload(1))
    path.write_bytes(b"no plan")
    assert store.add(key, Payload(2)) == Found(Payload(2), path)
    assert len(store.quarantined()) == 1


def test_add_works_without_hard_links(
    store: Store, key: Key, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object, **named: object) -> None:
        raise PermissionError("operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert store.add(key, Payload(1)) == Found(Payload(1), path)
    assert store.get(key, Payload) == Found(Payload(1), path)


def test_a_file_stands_in_the_folder_of_its_environment(store: Store, key: Key, path: Path) -> None:
    assert store.root is not None
    assert path == store.root / key.environment_digest / f"{key.digest}.json"


def test_the_store_is_private(store: Store, path: Path) -> None:
    assert store.root is not None
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (store.root, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_the_default_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store().root == tmp_path / "steadytorch" / "plans"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert Store().root == tmp_path / ".cache" / "steadytorch" / "plans"


def test_looking_makes_no_folder(store: Store, key: Key) -> None:
    assert miss(store, key) == Miss("no plan is stored for this workload")
    assert store.root is not None
    assert not store.root.exists()


def test_a_relative_root_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: Key
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store("plans")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.put(key, Payload(1)) == tmp_path / "plans" / key.environment_digest / (
        f"{key.digest}.json"
    )


@pytest.mark.parametrize("seconds", [-315_360_000, 315_360_000])
def test_clocks_have_no_effect(store: Store, key: Key, path: Path, seconds: int) -> None:
    moved = path.stat().st_mtime + seconds
    os.utime(path, (moved, moved))
    assert store.get(key, Payload) == Found(Payload(1), path)


def test_the_store_needs_no_pytorch() -> None:
    program = "import sys, steadytorch.plan.store; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"


@pytest.mark.parametrize("field", Key.__struct_fields__)
def test_a_change_of_any_field_is_a_miss_that_names_it(
    store: Store, key: Key, path: Path, field: str
) -> None:
    value = getattr(key, field)
    new: Any = {**value, "other": "1"} if isinstance(value, dict) else "other"
    if isinstance(value, int | float):
        new = value + 1
    found = miss(store, replace(key, **{field: new}))
    assert {d.field.partition(".")[0] for d in found.differing} == {field}
    assert "nearest plan: " in str(found)
    assert path.exists()


def test_the_nearest_key_is_of_the_same_workload(store: Store, key: Key) -> None:
    store.put(replace(key, torch="2.12.0", cuda="12.9", driver="570"), Payload(1))
    store.put(replace(key, torch="2.12.0", driver="580"), Payload(2))
    store.put(replace(key, workload="1" * 64), Payload(3))
    differing = [(d.field, d.old, d.new) for d in miss(store, key).differing]
    assert differing == [("torch", "2.12.0", "2.13.0"), ("driver", "580", "590.44")]


def test_other_workloads_are_not_offered(store: Store, key: Key) -> None:
    store.put(replace(key, workload="1" * 64, signature="other"), Payload(1))
    assert miss(store, key) == Miss("no plan is stored for this workload")


def test_the_list_gives_keys_and_payloads(store: Store, key: Key) -> None:
    other = replace(key, sm_count=16)
    store.put(key, Payload(1))
    store.put(other, Payload(2))
    listed = {entry.key.sm_count: entry for entry in store.entries(Payload) if entry.key}
    assert {count: entry.payload for count, entry in listed.items()} == {
        132: Payload(1),
        16: Payload(2),
    }
    assert all(entry.problem is None and entry.path.exists() for entry in listed.values())


def test_the_list_names_a_misplaced_file(store: Store, path: Path) -> None:
    path.rename(path.with_name("0" * 64 + ".json"))
    assert [entry.problem for entry in store.entries()] == [
        "holds a key that differs from its file name"
    ]


def test_the_list_leaves_bad_files_where_they_are(store: Store, path: Path) -> None:
    path.write_bytes(b"garbage")
    (entry,) = store.entries()
    assert "digest does not match" in str(entry.problem)
    assert path.exists()


def test_the_list_leaves_out_what_is_in_quarantine(store: Store, key: Key, path: Path) -> None:
    path.write_bytes(b"garbage")
    miss(store, key)
    assert list(store.entries()) == []


def test_a_file_can_be_removed(store: Store, key: Key, path: Path) -> None:
    assert store.remove(path) is None
    assert not path.exists()
    miss(store, key)
    assert "No such file" in str(store.remove(path))


def test_a_quarantined_file_can_be_removed(store: Store, key: Key, path: Path) -> None:
    path.write_bytes(b"garbage")
    miss(store, key)
    assert store.root is not None
    (bad,) = (store.root / QUARANTINE).iterdir()
    assert store.remove(bad) is None
    assert quarantined(store) == []


@pytest.mark.parametrize("where", ["../victim.json", "plans/victim.json", "plans/x/victim.json"])
def test_nothing_outside_the_store_is_removed(
    store: Store, path: Path, tmp_path: Path, where: str
) -> None:
    assert store.root is not None
    victim = store.root.parent / where
    victim.resolve().parent.mkdir(exist_ok=True)
    victim.resolve().write_bytes(b"")
    for name in (victim, store.root / ".." / where, path.parent / ".." / ".." / where):
        assert "is not in the store" in str(store.remove(name))
    assert victim.resolve().exists()
    victim.resolve().unlink()


def test_a_plan_file_is_read_from_anywhere(
    store: Store, key: Key, path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    assert read_file(str(copy), Payload) == (key, Payload(1))


def test_a_plan_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json does not exist"):
        read_file(tmp_path / "none.json", Payload)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 200_000, b"\0" * (MAX_BYTES + 1)])
def test_a_file_that_is_no_plan_gives_one_line_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan\x1b[31m.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read_file(path, Payload)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert path.read_bytes() == content


def test_a_plan_is_found_by_the_first_digits_of_its_id(store: Store, key: Key, path: Path) -> None:
    for digits in (key.digest[:4], key.digest[:12].upper(), key.digest):
        found = store.find(digits, Payload)
        assert (found.path, found.key, found.payload) == (path, key, Payload(1))


def test_an_id_of_no_plan_and_one_of_several_are_refused(store: Store, key: Key) -> None:
    digests: dict[str, Key] = {}
    for number in range(17):  # of 17 digests, two begin with the same digit
        other = replace(key, sm_count=number)
        store.put(other, Payload(number))
        twin = digests.setdefault(other.digest[0], other)
        if twin is not other:
            break
    with pytest.raises(PlanError, match=r"2 plans with id"):
        store.find(other.digest[0])
    for nothing in ("", "x", "0" * 64):
        with pytest.raises(PlanError, match="no plan with id"):
            store.find(nothing)


def test_a_file_that_is_no_plan_is_found_by_its_name(store: Store, path: Path) -> None:
    path.write_bytes(b"garbage")
    found = store.find(path.stem[:8])
    assert (found.path, found.key) == (path, None)
    assert "digest does not match" in str(found.problem)


def test_quarantined_files_are_listed(store: Store, key: Key, path: Path) -> None:
    assert store.quarantined() == []
    path.write_bytes(b"garbage")
    miss(store, key)
    (bad,) = store.quarantined()
    assert bad.read_bytes() == b"garbage"
    assert Store(None if store.root is None else store.root / "none").quarantined() == []


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_is_wrong_has_no_effect(
    store: Store, key: Key, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    for name in ("time", "time_ns"):
        real, unit = getattr(time, name), 10**9 if name == "time_ns" else 1
        shift = years * 365 * 86400 * unit
        monkeypatch.setattr(time, name, lambda real=real, shift=shift: real() + shift)
    path = store.put(key, Payload(1))
    monkeypatch.undo()
    assert store.get(key, Payload) == Found(Payload(1), path)
    assert store.put(key, Payload(2)) == path
    assert store.get(key, Payload) == Found(Payload(2), path)


def test_a_payload_with_a_key_of_its_own_must_name_the_same(store: Store, key: Key) -> None:
    class Keyed(msgspec.Struct):
        key: Key

    assert store.put(key, Keyed(key)) is not None
    assert store.put(replace(key, sm_count=1), Keyed(key)) is None
    assert store.get(key, Keyed) == Found(Keyed(key), store.find(key.digest).path)
