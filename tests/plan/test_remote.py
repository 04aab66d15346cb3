"""The second store: read behind the local one, never believed, never waited for, never written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from msgspec.structs import replace

from steadytorch.plan.files import MAX_BYTES, BrokenError, encoded
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.remote import RemoteStore
from steadytorch.plan.store import QUARANTINE, SECOND_STORE, Found, Miss, Store


class Payload(msgspec.Struct):
    number: int
    text: str = ""


@pytest.fixture
def others(tmp_path: Path, key: Key) -> Store:
    """A store that others keep, with one payload."""
    made = Store(tmp_path / "others", second="")
    made.put(key, Payload(1))
    return made


def file_in(store: Store, key: Key) -> Path:
    assert store.root is not None
    return store.root / key.environment_digest / f"{key.digest}.json"


def behind(tmp_path: Path, url: object) -> Store:
    return Store(tmp_path / "mine", second=str(url))


def listing(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def miss(store: Store, key: Key) -> str:
    found = store.get(key, Payload)
    assert isinstance(found, Miss)
    assert found.reason.isprintable()
    return found.reason


# --- what it is for


@pytest.mark.parametrize("prefix", ["", "file://", "local://"])
def test_plans_of_the_second_store_are_found_and_copied(
    tmp_path: Path, key: Key, others: Store, prefix: str
) -> None:
    mine = behind(tmp_path, f"{prefix}{others.root}/")
    assert mine.get(key, Payload) == Found(Payload(1), file_in(mine, key))
    assert Store(mine.root, second="").get(key, Payload) == Found(Payload(1), file_in(mine, key))
    assert file_in(mine, key).read_bytes() == file_in(others, key).read_bytes()


def test_any_place_that_fsspec_can_open_will_do(tmp_path: Path, key: Key, others: Store) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/plans/{key.environment_digest}/{key.digest}.json", encoded(key, Payload(5)))
    try:
        found = behind(tmp_path, "memory://plans").get(key, Payload)
        assert isinstance(found, Found)
        assert found.payload == Payload(5)
    finally:
        memory.rm("/plans", recursive=True)


def test_the_environment_names_it(
    tmp_path: Path, key: Key, others: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECOND_STORE, str(others.root))
    assert isinstance(Store(tmp_path / "without", second="").get(key, Payload), Miss)
    assert isinstance(Store(tmp_path / "mine").get(key, Payload), Found)


def test_the_local_store_comes_first(tmp_path: Path, key: Key, others: Store) -> None:
    mine = behind(tmp_path, others.root)
    path = mine.put(key, Payload(2))
    assert mine.get(key, Payload) == Found(Payload(2), path)


def test_a_bad_local_file_is_replaced_by_a_good_one(
    tmp_path: Path, key: Key, others: Store
) -> None:
    mine = behind(tmp_path, others.root)
    path = mine.put(key, Payload(2))
    assert path is not None
    path.write_bytes(b"garbage")
    assert mine.get(key, Payload) == Found(Payload(1), path)
    assert [each.read_bytes() for each in mine.quarantined()] == [b"garbage"]


def test_where_nothing_can_be_written_it_still_serves(
    tmp_path: Path, key: Key, others: Store
) -> None:
    (tmp_path / "mine").write_bytes(b"in the way")
    mine = behind(tmp_path, others.root)
    assert mine.get(key, Payload) == Found(Payload(1), None)
    assert mine.get(key, Payload) == Found(Payload(1), None)


def test_a_miss_in_both_names_both_and_keeps_the_fields_that_differ(
    tmp_path: Path, key: Key, others: Store
) -> None:
    mine = behind(tmp_path, others.root)
    mine.put(replace(key, torch="2.12.0"), Payload(2))
    found = mine.get(replace(key, sm_count=7), Payload)
    assert isinstance(found, Miss)
    assert {d.field for d in found.differing} == {"torch", "sm_count"}
    assert found.reason.endswith(f"; {others.root} has no plan for this key")


def test_it_is_imported_only_where_it_is_asked() -> None:
    program = (
        "import sys; from steadytorch.plan.store import Store; Store('/nowhere', second='');"
        "print('fsspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"


# --- what it may hold


BAD = {
    "garbage": (b"garbage", "digest does not match"),
    "empty": (b"", "digest does not match"),
    "large": (b"0" * (MAX_BYTES + 1), "larger than"),
    "deep": (b"[" * 200_000, "digest does not match"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_file_is_a_miss_and_stays(
    tmp_path: Path, key: Key, others: Store, name: str
) -> None:
    content, said = BAD[name]
    file_in(others, key).write_bytes(content)
    before = listing(others.root)
    mine = behind(tmp_path, others.root)
    reason = miss(mine, key)
    assert said in reason
    assert f"; {others.root} " in reason
    assert listing(others.root) == before
    assert QUARANTINE not in os.listdir(others.root or "")
    assert not (tmp_path / "mine").exists()


def test_a_file_cut_anywhere_is_a_miss(tmp_path: Path, key: Key, others: Store) -> None:
    path, mine = file_in(others, key), RemoteStore(str(others.root))
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(BrokenError, match="digest does not match"):
            mine.get(key, Payload)


def test_a_plan_of_another_key_or_type_is_a_miss(tmp_path: Path, key: Key, others: Store) -> None:
    class Other(msgspec.Struct):
        words: list[str]

    mine = behind(tmp_path, others.root)
    file_in(others, key).write_bytes(encoded(replace(key, driver="1"), Payload(1)))
    assert "holds another key: driver was 1, is 590.44" in miss(mine, key)
    file_in(others, key).write_bytes(encoded(key, Other(["a"])))
    assert "does not fit the schema" in miss(mine, key)


# --- what it may do


class Faulty(fsspec.AbstractFileSystem):
    """Misbehaves as its path says, and records requests."""

    protocol = "faulty"
    cachable = False
    asked: list[str] = []  # noqa: RUF012 - of all instances

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        Faulty.asked.append(mode)
        kind = path.strip("/").split("/")[0]
        if kind == "endless":
            return Endless()
        raise RAISED[kind]


class Endless:
    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def read(self, most: int) -> bytes:
        return b"0" * most


RAISED: dict[str, BaseException] = {
    "refuses": PermissionError(13, "Permission denied"),
    "breaks": RuntimeError("boo \x1b[2J\nat https://me:secret@host/plans?sig=secret"),
    "exits": SystemExit(3),
    "interrupts": KeyboardInterrupt(),
    "silent": ValueError(),
    "times": TimeoutError("timed out"),
    "library": ImportError("install the library for it"),
}


@pytest.fixture
def faulty() -> type[Faulty]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.asked.clear()
    return Faulty


@pytest.mark.parametrize("kind", RAISED)
def test_any_exception_is_a_miss_with_the_reason(
    tmp_path: Path, key: Key, faulty: type[Faulty], kind: str
) -> None:
    reason = miss(behind(tmp_path, f"faulty://{kind}"), key)
    assert f"faulty://{kind} cannot be read: {type(RAISED[kind]).__name__}" in reason
    assert "secret" not in reason
    assert faulty.asked == ["rb"]


def test_content_without_end_is_cut_off(tmp_path: Path, key: Key, faulty: type[Faulty]) -> None:
    assert "is larger than" in miss(behind(tmp_path, "faulty://endless"), key)


@pytest.mark.parametrize(
    "url", ["nothing://x", "::", "zip://a::nothing://b", "file://\0", "\udcff"]
)
def test_a_url_without_a_store_is_a_miss(tmp_path: Path, key: Key, url: str) -> None:
    reason = miss(behind(tmp_path, url), key)
    assert "cannot be read: " in reason or "has no plan for this key" in reason


def test_secrets_in_a_url_are_not_shown(tmp_path: Path, key: Key) -> None:
    reason = miss(behind(tmp_path, "nothing://me:secret@host/plans?sig=secret"), key)
    assert "nothing://host/plans cannot be read" in reason
    assert "secret" not in reason


@pytest.mark.timeout(60)
def test_a_hanging_store_is_not_asked_again(key: Key, others: Store, tmp_path: Path) -> None:
    path = file_in(others, key)
    path.unlink()
    os.mkfifo(path)
    mine = RemoteStore(str(others.root), timeout_s=0.2)
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(BrokenError, match=r"did not answer within 0\.2 s and is not asked"):
            mine.get(key, Payload)
    assert threading.active_count() == before + 1
    with path.open("wb"):  # lets the thread go
        pass
    assert mine.name == str(others.root)


def test_without_a_thread_it_is_a_miss(
    tmp_path: Path, key: Key, others: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert "can't start new thread" in miss(behind(tmp_path, others.root), key)


@pytest.mark.timeout(60)
def test_a_hanging_store_does_not_block_the_exit(key: Key, others: Store) -> None:
    path = file_in(others, key)
    path.unlink()
    os.mkfifo(path)
    program = (
        "import sys, msgspec\nfrom steadytorch.plan.fingerprint import Key\n"
        "from steadytorch.plan.remote import RemoteStore\n"
        "from steadytorch.plan.files import BrokenError\n"
        "key = msgspec.json.decode(sys.argv[2], type=Key)\n"
        "try:\n    RemoteStore(sys.argv[1], timeout_s=0.2).get(key, msgspec.Raw)\n"
        "except BrokenError as fault:\n    print(fault)\n"
    )
    arguments = [str(others.root), msgspec.json.encode(key).decode()]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("did not answer")
    assert done.stderr == ""


# --- the writing role


def test_a_pushed_entry_is_found_by_readers(tmp_path: Path, key: Key) -> None:
    remote = RemoteStore(f"file://{tmp_path}/shared")
    assert remote.push(key, encoded(key, Payload(1)))
    assert behind(tmp_path, tmp_path / "shared").get(key, Payload).payload == Payload(1)


def test_an_entry_is_never_replaced(tmp_path: Path, key: Key, others: Store) -> None:
    before = listing(others.root)
    assert not RemoteStore(str(others.root)).push(key, encoded(key, Payload(2)))
    assert listing(others.root) == before


def test_an_unusable_entry_is_named_and_stays(tmp_path: Path, key: Key, others: Store) -> None:
    file_in(others, key).write_bytes(b"{}")
    with pytest.raises(BrokenError, match=rf"has an entry that .*: remove .*{key.digest}.json"):
        RemoteStore(str(others.root)).push(key, encoded(key, Payload(2)))
    assert file_in(others, key).read_bytes() == b"{}"


def test_of_many_writers_one_wins(tmp_path: Path, key: Key) -> None:
    with ThreadPoolExecutor(8) as pool:
        url = f"file://{tmp_path}/shared"
        added = pool.map(lambda n: RemoteStore(url).push(key, encoded(key, Payload(n))), range(8))
        assert sum(added) == 1


def test_an_entry_that_another_writer_has_not_finished_is_waited_for(
    key: Key, others: Store
) -> None:
    there = file_in(others, key)
    whole = there.read_bytes()
    there.write_bytes(whole[:10])
    finishing = threading.Timer(0.2, there.write_bytes, (whole,))
    finishing.start()
    assert not RemoteStore(str(others.root)).push(key, encoded(key, Payload(2)))
    finishing.join()
    assert there.read_bytes() == whole


def test_a_store_that_cannot_be_written_says_why(tmp_path: Path, key: Key) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokenError, match="cannot be written: "):
        RemoteStore(str(tmp_path / "file")).push(key, encoded(key, Payload(1)))
