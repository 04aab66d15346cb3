from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from steadytorch.errors import PlanError
from steadytorch.plan.files import MAX_BYTES, encoded, read_file
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


# --- files that are wrong


def test_a_file_cut_anywhere_is_moved_aside(store: Store, key: Key, path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert "digest does not match" in miss(store, key).reason
        assert not path.exists()
    assert quarantined(store) == [data[:-1]]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize("bits", [[0], pytest.param(range(8), marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_is_noticed(store: Store, key: Key, path: Path, bits) -> None:
    data = path.read_bytes()
    for at in range(len(data)):
        for bit in bits:
            path.write_bytes(flipped(data, at, bit))
            assert "digest does not match" in miss(store, key).reason
            assert not path.exists()
    assert quarantined(store) == [flipped(data, len(data) - 1, bits[-1])]


@pytest.mark.parametrize("byte", [b"\0", b"\xff", b'"', b"}", b"\n"])
@pytest.mark.sampled(every=5)
def test_a_byte_overwritten_or_inserted_anywhere_is_noticed(
    store: Store, key: Key, path: Path, byte: bytes
) -> None:
    data = path.read_bytes()
    for at in range(len(data)):
        for after in (at, at + 1):
            content = data[:at] + byte + data[after:]
            path.write_bytes(content)
            if content != data:
                assert "digest does not match" in miss(store, key).reason
                assert not path.exists()


@given(st.binary(max_size=2000))
def test_garbage_is_noticed(key: Key, garbage: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        path = store.put(key, Payload(1))
        assert path is not None
        path.write_bytes(garbage)
        miss(store, key)
        assert quarantined(store) == [garbage]


def test_after_a_bad_file_a_good_one_can_be_put(store: Store, key: Key, path: Path) -> None:
    path.write_bytes(b"garbage")
    miss(store, key)
    assert store.put(key, Payload(2)) == path
    assert store.get(key, Payload) == Found(Payload(2), path)


def test_a_file_of_another_key_is_moved_aside(store: Store, key: Key, path: Path) -> None:
    path.write_bytes(encoded(replace(key, sm_count=16), Payload(1)))
    found = miss(store, key)
    assert "holds another key: sm_count was 16, is 132; " in found.reason
    assert not path.exists()


def test_a_payload_of_another_type_is_moved_aside(store: Store, key: Key, path: Path) -> None:
    class Other(msgspec.Struct):
        words: list[str]

    path.write_bytes(encoded(key, Other(["a"])))
    assert "does not fit the schema" in miss(store, key).reason
    assert len(quarantined(store)) == 1


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 1 << 40])
def test_a_file_too_large_is_moved_aside_unread(
    store: Store, key: Key, path: Path, size: int
) -> None:
    os.truncate(path, size)
    assert "larger than" in miss(store, key).reason
    assert not path.exists()


def test_where_a_bad_file_cannot_be_moved_it_is_still_a_miss(
    store: Store, key: Key, path: Path
) -> None:
    assert store.root is not None
    (store.root / QUARANTINE).write_bytes(b"in the way")
    path.write_bytes(b"garbage")
    assert "it could not be moved" in miss(store, key).reason
    assert path.read_bytes() == b"garbage"


def test_a_quarantine_that_is_a_link_is_not_followed(
    store: Store, key: Key, path: Path, tmp_path: Path
) -> None:
    assert store.root is not None
    (tmp_path / "elsewhere").mkdir()
    (store.root / QUARANTINE).symlink_to(tmp_path / "elsewhere")
    path.write_bytes(b"garbage")
    assert "it could not be moved" in miss(store, key).reason
    assert os.listdir(tmp_path / "elsewhere") == []


# --- things that are no files of ours: refused, not touched, and no waiting


def plant_symlink(path: Path) -> None:
    target = path.with_suffix(".target")
    path.rename(target)
    path.symlink_to(target)


def plant_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def plant_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def plant_socket(path: Path) -> None:
    path.unlink()
    # A socket's own path is limited to about a hundred bytes.
    with socket.socket(socket.AF_UNIX) as end, tempfile.TemporaryDirectory() as short:
        end.bind(f"{short}/s")
        os.rename(f"{short}/s", path)


def plant_device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("device nodes cannot be made without privileges")


def plant_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("files of other users cannot be made without privileges")
    os.chown(path, 65534, 65534)


PLANTS = {
    plant_symlink: "symbolic link",
    plant_fifo: "not a regular file",
    plant_folder: "not a regular file",
    plant_socket: "No such device or address",
    plant_device: "not a regular file",
    plant_foreign: "belongs to user 65534",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.timeout(30)
def test_planted_files_are_refused_and_not_touched(
    store: Store, key: Key, path: Path, plant: Any
) -> None:
    plant(path)
    before = os.lstat(path)
    assert PLANTS[plant] in miss(store, key).reason
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode, before.st_uid) == (
        after.st_ino,
        after.st_mode,
        after.st_uid,
    )


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.timeout(30)
def test_planted_files_are_listed_with_their_problem(store: Store, path: Path, plant: Any) -> None:
    plant(path)
    (entry,) = store.entries()
    assert (entry.path, entry.key) == (path, None)
    assert PLANTS[plant] in str(entry.problem)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.timeout(30)
def test_planted_files_are_not_plan_files(path: Path, plant: Any) -> None:
    plant(path)
    with pytest.raises(PlanError, match=PLANTS[plant]) as caught:
        read_file(path, Payload)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "plant", [p for p in PLANTS if p is not plant_folder], ids=lambda plant: plant.__name__
)
def test_put_replaces_planted_files(store: Store, key: Key, path: Path, plant: Any) -> None:
    plant(path)
    assert store.put(key, Payload(2)) == path
    assert store.get(key, Payload) == Found(Payload(2), path)


def test_an_environment_folder_that_is_a_link_is_not_followed(
    store: Store, key: Key, path: Path, tmp_path: Path
) -> None:
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert "refused" in miss(store, key).reason
    assert store.put(key, Payload(2)) is None
    assert len(os.listdir(tmp_path / "elsewhere")) == 1


def test_a_link_is_removed_not_its_target(store: Store, path: Path) -> None:
    plant_symlink(path)
    assert store.remove(path) is None
    assert not path.is_symlink()
    assert path.with_suffix(".target").exists()


def test_writing_does_not_follow_a_hard_link(
    store: Store, key: Key, path: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    path.rename(victim)
    os.link(victim, path)
    before = victim.read_bytes()
    assert store.get(key, Payload) == Found(Payload(1), path)
    assert store.put(key, Payload(2)) == path
    assert victim.read_bytes() == before
    assert store.get(key, Payload) == Found(Payload(2), path)


def test_a_hard_link_to_something_else_is_moved_aside_and_what_it_links_to_stays(
    store: Store, key: Key, path: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"a diary")
    path.unlink()
    os.link(victim, path)
    miss(store, key)
    assert not path.exists()
    assert victim.read_bytes() == b"a diary"


HOSTILE = ("\x1b[2J\x1b]0;title\x07.json", "two\nlines.json", "\u202egnp.json", "\udcff.json")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_in_the_store_is_listed_and_can_be_removed(
    store: Store, key: Key, path: Path, name: str
) -> None:
    bad = path.with_name(name)
    bad.write_bytes(b"garbage")
    (entry,) = [each for each in store.entries() if each.problem]
    assert entry.path == bad
    assert store.get(key, Payload) == Found(Payload(1), path)
    assert store.remove(bad) is None
    assert not bad.exists()


def test_a_folder_with_a_hostile_name_is_no_part_of_the_store(store: Store, path: Path) -> None:
    (path.parent.with_name("\x1b[2J")).mkdir()
    (path.parent.with_name("\x1b[2J") / path.name).write_bytes(path.read_bytes())
    assert [entry.path for entry in store.entries()] == [path]
