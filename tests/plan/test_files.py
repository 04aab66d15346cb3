from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.caches import make_private
from steadytorch.plan.files import (
    BrokenError,
    bounded,
    clean,
    create,
    decoded,
    encoded,
    open_folder,
    read,
    read_bytes,
    why,
    write_whole,
)
from steadytorch.plan.fingerprint import Key


class Payload(msgspec.Struct):
    number: float
    words: list[str] = []


class Loose(msgspec.Struct):
    anything: Any


def sealed(body: bytes) -> bytes:
    """A file with a valid digest for any content, as an attacker would write it."""
    return body[:-1] + b',"sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()


@given(st.floats(allow_nan=False, allow_infinity=False), st.lists(st.text()))
def test_a_payload_survives(key: Key, number: float, words: list[str]) -> None:
    payload = Payload(number, words)
    entry = decoded(encoded(key, payload), Payload)
    assert (entry.key, entry.payload) == (key, payload)


def test_a_file_is_canonical_json_of_four_fields(key: Key) -> None:
    data = encoded(key, Payload(0.5))
    content = msgspec.json.decode(data)
    assert list(content) == ["key", "payload", "schema", "sha256"]
    assert msgspec.json.encode(content, order="sorted") == data


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_cannot_hold_are_refused(key: Key, number: float) -> None:
    with pytest.raises(BrokenError):
        encoded(key, Payload(number))


def test_a_payload_that_reads_back_as_something_else_is_refused(key: Key) -> None:
    class Rounded(msgspec.Struct):
        number: float

        def __post_init__(self) -> None:
            self.number = self.number + 1

    with pytest.raises(BrokenError, match="something else"):
        encoded(key, Rounded(1.0))


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for content in (data, sealed(data)):
        with pytest.raises(BrokenError):
            decoded(content, Payload)


HOSTILE = {
    "deep array": b"[" * 200_000 + b"]" * 200_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open array": b"[" * 200_000,
    "nan": b"NaN",
    "infinity": b"-Infinity",
    "beyond float": b"1e999",
    "long number": b"1" * 10_000,
    "text": b'"1.0"',
    "not utf-8": b'"\xff"',
    "lone surrogate": b'"\\ud800"',
    "null": b"null",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("payload_type", [Payload, Loose, msgspec.Raw])
def test_hostile_values_with_a_valid_digest_are_refused(
    key: Key, name: str, payload_type: Any
) -> None:
    shape = b'{"key":%s,"payload":{"number":%s},"schema":1}'
    data = sealed(shape % (msgspec.json.encode(key), HOSTILE[name]))
    if payload_type is msgspec.Raw:
        # Nothing decodes the payload, but the fields around it must be valid.
        try:
            entry = decoded(data, msgspec.Raw)
        except BrokenError:
            return
        assert HOSTILE[name] in bytes(entry.payload)
    else:
        with pytest.raises(BrokenError, match="schema"):
            decoded(data, payload_type)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"schema":1}', b'"schema":2}'),
        (b'"schema":1}', b'"schema":"1"}'),
        (b'"schema":1}', b'"schema":1,"more":1}'),
        (b'{"key":{', b'{"key":{"more":1,'),
        (b'"payload":{', b'"paylod":{'),
        (b'"sm_count":132,', b""),
        (b'"number":', b'"numbr":'),
    ],
)
def test_another_schema_is_refused_though_its_digest_holds(
    key: Key, old: bytes, new: bytes
) -> None:
    data = encoded(key, Payload(1.0))
    body = data[: data.rindex(b',"sha256"')] + b"}"
    assert sealed(body) == data
    assert body.count(old) == 1
    with pytest.raises(BrokenError):
        decoded(sealed(body.replace(old, new)), Payload)


def test_the_other_schema_is_named(key: Key) -> None:
    data = sealed(b'{"schema":2}')
    with pytest.raises(BrokenError, match="has schema 2; this version reads schema 1"):
        decoded(data, Payload)


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    for data in (b"old", b"new"):
        write_whole(path, data)
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["file.json"]


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two" / "file.json"
    write_whole(path, b"data")
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path.parent.parent, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_an_interrupted_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_whole(path, b"old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link"), open_folder(tmp_path / "link"):
        pass


@pytest.fixture
def stored(tmp_path: Path, key: Key) -> Path:
    """A file in a folder of a store."""
    path = tmp_path / "plans" / "environment" / "file.json"
    write_whole(path, encoded(key, Payload(1.0)))
    return path


def _read_twice(path: Path) -> None:
    for _ in range(2):
        with open_folder(path.parent) as folder:
            assert read(path.name, Payload, folder)[0].payload == Payload(1.0)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
@pytest.mark.parametrize("level", [0, 1], ids=["folder", "store"])
def test_a_store_that_others_may_write_to_is_read_with_one_warning(
    stored: Path, mode: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    open_to_others = stored.parents[level]
    open_to_others.chmod(mode)
    _read_twice(stored)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "others may write to" in record.getMessage()
    assert str(open_to_others) in record.getMessage()


def test_a_store_of_another_user_is_read_with_one_warning(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("folders of other users cannot be made without privileges")
    os.chown(stored.parents[1], 65534, 65534)
    _read_twice(stored)
    (record,) = caplog.records
    assert "belongs to user 65534" in record.getMessage()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_private_store_gives_no_warning(
    stored: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored.parents[1].chmod(mode)
    stored.parents[2].chmod(0o777)  # around the store
    _read_twice(stored)
    assert caplog.records == []


def test_descriptors_are_closed(tmp_path: Path, key: Key) -> None:
    path = tmp_path / "file.json"
    before = len(os.listdir("/proc/self/fd"))
    for data in (b"broken", encoded(key, Payload(1.0))):
        write_whole(path, data)
        with suppress(BrokenError):
            read(path, Payload)
    assert len(os.listdir("/proc/self/fd")) == before


def test_private_folders_may_exist(tmp_path: Path) -> None:
    make_private(tmp_path)
    assert tmp_path.is_dir()


def test_text_to_show_is_one_short_printable_line() -> None:
    assert clean("a\x1b[31m\nb\u202e") == "a?[31m?b?"
    assert len(clean("a" * 10_000)) < 400


def test_reasons_are_words() -> None:
    assert why(OSError(28, "No space left on device")) == "No space left on device"
    assert why(ValueError("embedded null byte")) == "embedded null byte"


def test_a_payload_that_names_another_key_is_refused(key: Key) -> None:
    class Keyed(msgspec.Struct):
        key: Key

    assert decoded(encoded(key, Keyed(key)), Keyed).payload.key == key
    with pytest.raises(BrokenError, match="another key"):
        encoded(key, Keyed(msgspec.structs.replace(key, torch="9.9")))


def test_any_file_of_our_own_is_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(BrokenError, match="larger than 4 bytes"):
        read_bytes(path, 4)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="link"):
        read_bytes(tmp_path / "link", 5)


def test_a_reader_without_end_is_cut_off() -> None:
    with pytest.raises(BrokenError, match="larger than 100 bytes"):
        bounded(lambda most: b"0" * min(most, 7), 100)


def test_a_file_is_created_once(tmp_path):
    create(tmp_path / "lease", b"first")
    with pytest.raises(FileExistsError):
        create(tmp_path / "lease", b"second")
    assert (tmp_path / "lease").read_bytes() == b"first"


def test_a_created_file_that_cannot_be_written_is_removed(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        create(tmp_path / "lease", b"first")
    assert not (tmp_path / "lease").exists()
