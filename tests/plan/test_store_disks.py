from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from steadytorch.plan.files import MAX_BYTES
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import Found, Miss, Store


class Payload(msgspec.Struct):
    number: int
    text: str = ""


def miss(store: Store, key: Key) -> Miss:
    found = store.get(key, Payload)
    assert isinstance(found, Miss)
    return found


def in_the_way(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "plans"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB without room; skipped where nothing can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    with open(tmp_path / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while filler.write(b"0" * 4096):
            pass
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def read_only_disk(tmp_path: Path, key: Key) -> Iterator[Path]:
    Store(tmp_path / "plans").put(key, Payload(1))
    bind = ["mount", "--bind", str(tmp_path), str(tmp_path)]
    try:
        subprocess.run(bind, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
    yield tmp_path / "plans"
    subprocess.run(["umount", str(tmp_path)], check=True)


def check_memory_only(store: Store, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(key, sm_count=16)
    with caplog.at_level(logging.WARNING):
        assert store.put(key, Payload(1)) is None
        assert store.put(key, Payload(2)) is None
        assert store.put(other, Payload(3)) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("plans are kept in memory only: ")
    assert store.get(key, Payload) == Found(Payload(2), None)
    assert store.get(other, Payload) == Found(Payload(3), None)


def test_a_file_in_the_way(tmp_path: Path, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(in_the_way(tmp_path))
    assert "refused" in miss(store, key).reason
    check_memory_only(store, key, caplog)


@pytest.mark.parametrize("kind", ["file", "read-only", "homeless"])
def test_a_check_warns_early_and_once(kind, tmp_path, key, caplog, monkeypatch, request) -> None:
    if kind == "read-only":
        store = Store(request.getfixturevalue("read_only_disk"))
    elif kind == "file":
        store = Store(in_the_way(tmp_path))
    else:
        monkeypatch.setattr("steadytorch.plan.store.cache_folder", lambda name: None)
        store = Store()
    with caplog.at_level(logging.WARNING):
        store.check(key)
        (said,) = caplog.messages
        assert store.put(key, Payload(2)) is None
    assert said == f"plans are kept in memory only: {store.trouble}"
    assert len(caplog.messages) == 1
    assert store.get(key, Payload) == Found(Payload(2), None)


def test_a_check_leaves_nothing_where_a_plan_can_be_kept(
    tmp_path: Path, key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "plans")
    with caplog.at_level(logging.WARNING):
        store.check(key)
    assert caplog.messages == []
    assert [path for path in store.root.rglob("*") if not path.is_dir()] == []
    assert isinstance(store.get(key, Payload), Miss)
    assert store.put(key, Payload(1)) is not None


def test_a_store_mended_after_the_check_keeps_the_plan(tmp_path: Path, key: Key) -> None:
    store = Store(in_the_way(tmp_path))
    store.check(key)
    assert store.root is not None
    store.root.parent.unlink()
    assert store.put(key, Payload(1)) is not None


def test_a_check_notices_a_full_disk(
    full_disk: Path, key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Store(full_disk / "plans").check(key)
    assert "No space left on device" in caplog.text


def test_a_full_disk(full_disk: Path, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    check_memory_only(Store(full_disk / "plans"), key, caplog)


def test_a_read_only_disk(read_only_disk: Path, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(read_only_disk)
    assert isinstance(store.get(key, Payload), Found)
    check_memory_only(store, key, caplog)


def test_a_file_size_limit(store: Store, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        check_memory_only(store, key, caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.root is not None
    assert [each.name for each in store.root.rglob("*") if each.is_file()] == []


# Folders are made at the first write only.
CALLS = [(each, first) for each in ("open", "write", "fsync", "rename") for first in (True, False)]
TROUBLES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)


@pytest.mark.parametrize("number", TROUBLES, ids=errno.errorcode.get)
@pytest.mark.parametrize(("call", "first"), [("mkdir", True), *CALLS])
def test_trouble_at_any_call_leaves_the_plan_in_memory_and_the_old_file_alone(
    store: Store,
    key: Key,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    call: str,
    first: bool,
) -> None:
    assert store.root is not None
    path = None if first else store.put(key, Payload(7))
    real = getattr(os, call)

    def failing(*arguments: Any, **options: Any) -> Any:
        if call == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        check_memory_only(store, key, caplog)
    assert os.strerror(number) in store.trouble
    fresh = Store(store.root)
    if path is not None:
        assert fresh.get(key, Payload) == Found(Payload(7), path)
    assert [each.problem for each in fresh.entries() if each.problem] == []
    assert not [each for each in store.root.rglob("*.tmp")]


def test_no_home(
    key: Key, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    store = Store()
    assert "no home directory" in miss(store, key).reason
    assert list(store.entries()) == []
    check_memory_only(store, key, caplog)


def test_a_root_that_no_file_system_can_have(key: Key, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("\0", "a" * 5000, "\ud800"):
        caplog.clear()
        store = Store(f"/{name}")
        miss(store, key)
        list(store.entries())
        check_memory_only(store, key, caplog)


WITHOUT_RIGHTS = """
import os, sys, msgspec
from pathlib import Path
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.files import read_file
from steadytorch.plan.store import Miss, Store

class Payload(msgspec.Struct):
    number: int

key = msgspec.json.decode(sys.argv[2], type=Key)
os.chmod(sys.argv[1], 0)
if os.geteuid() == 0:
    os.setuid(65534)
store = Store(Path(sys.argv[1]))
found = store.get(key, Payload)
assert isinstance(found, Miss), found
print(found.reason)
print(store.put(key, Payload(1)))
print(store.get(key, Payload).payload.number)
print([entry.problem for entry in store.entries()])
"""


def test_a_store_without_the_right_to_read_it(tmp_path: Path, key: Key) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, str(folder), msgspec.json.encode(key).decode()],
        capture_output=True,
        text=True,
        check=True,
    )
    folder.chmod(0o700)
    reason, put, number, problems = done.stdout.splitlines()
    assert "Permission denied" in reason
    assert (put, number) == ("None", "1")
    assert "Permission denied" in problems
    assert "memory only" in done.stderr


READ_ONLY = """
import os, shutil, sys, tempfile, msgspec
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import Store

class Payload(msgspec.Struct):
    number: int

key = msgspec.json.decode(sys.argv[1], type=Key)
if os.geteuid() == 0:  # who may write anywhere
    os.setuid(65534)
folder = tempfile.mkdtemp()
try:
    path = Store(folder, second="").put(key, Payload(1))
    path.parent.chmod(0o500)
    store = Store(folder, second="")
    print(store.get(key, Payload).payload.number, store.put(key, Payload(2)))
    print(store.get(key, Payload).payload.number, Store(folder).get(key, Payload).payload.number)
finally:
    path.parent.chmod(0o700)
    shutil.rmtree(folder)
"""


def test_a_folder_without_the_right_to_write(key: Key) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, msgspec.json.encode(key).decode()],
        env={**os.environ, "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["1 None", "2 1"]
    assert done.stderr.count("plans are kept in memory only") == 1
    assert "Permission denied" in done.stderr


HOMELESS = """
import os, sys, msgspec
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import Store

class Payload(msgspec.Struct):
    number: int

os.setuid(54321)  # a user whom no data base knows
key, store = msgspec.json.decode(sys.argv[1], type=Key), Store()
print(store.root, store.get(key, Payload).reason, sep="; ")
print(store.put(key, Payload(1)), store.get(key, Payload).payload.number)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a home")
def test_a_user_without_a_home(key: Key) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, msgspec.json.encode(key).decode()],
        env={k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("None; no plan is in memory")
    assert "no home directory" in first
    assert second == "None 1"
    assert done.stderr.count("plans are kept in memory only") == 1


def test_a_payload_too_large_is_kept_in_memory(
    store: Store, key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.put(key, Payload(1, "a" * MAX_BYTES)) is None
    assert "too large" in caplog.text
    found = store.get(key, Payload)
    assert isinstance(found, Found)
    assert found.path is None
    assert store.put(key, Payload(2)) is not None
    found = store.get(key, Payload)
    assert isinstance(found, Found)
    assert found.payload == Payload(2)


def test_a_payload_without_json_form_is_a_warning(
    store: Store, key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(msgspec.Struct):
        value: Any

    for value in (object(), "\ud800"):
        caplog.clear()
        assert store.put(key, Odd(value)) is None
        assert "no JSON form" in caplog.text
