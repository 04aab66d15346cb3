import gzip
import os
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import TraceError
from steadytorch.traces.byte_blocks import Limits, blocks_of, json_blocks, opened

TEXT = b'{"traceEvents": []}' * 1000


def _all(data, limits=None, size=1000):
    blocks = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(json_blocks(blocks, limits or Limits()))


@given(st.binary(max_size=3000), st.integers(2, 500))
def test_what_was_gzipped_comes_back(data, size):
    assert _all(gzip.compress(data), size=size) == data


def test_plain_bytes_pass():
    assert _all(TEXT) == TEXT


def test_members_one_after_the_other_and_padding_are_read():
    assert _all(gzip.compress(b"one ") + gzip.compress(b"two") + b"\0" * 500) == b"one two"


@pytest.mark.parametrize("cut", [3, 12, 60, -1])
def test_a_file_cut_short_is_an_error(cut):
    with pytest.raises(TraceError, match="cut short after"):
        _all(gzip.compress(os.urandom(500))[:cut])


def test_a_damaged_file_is_an_error_with_its_place():
    data = bytearray(gzip.compress(os.urandom(5000)))
    data[2000:2100] = bytes(100)
    with pytest.raises(TraceError, match="damaged") as raised:
        _all(bytes(data))
    assert raised.value.offset is not None


def test_a_bomb_is_refused_before_it_fills_the_memory():
    deflate = zlib.compressobj(9, wbits=31)
    bomb = b"".join(deflate.compress(bytes(1 << 20)) for _ in range(70)) + deflate.flush()
    seen: list[int] = []
    with pytest.raises(TraceError, match="300-fold"):
        seen.extend(len(block) for block in json_blocks(iter([bomb]), Limits()))
    assert sum(seen) <= 64 << 20


def test_more_bytes_than_allowed_are_refused():
    with pytest.raises(TraceError, match="more than 5,000 bytes") as raised:
        _all(TEXT, Limits(json_bytes=5000))
    assert raised.value.offset == 5000


def test_the_thread_that_inflates_ends_with_its_reader():
    before = threading.active_count()
    blocks = json_blocks(iter([gzip.compress(TEXT)]), Limits())
    next(blocks)
    blocks.close()
    assert threading.active_count() == before


def test_a_file_is_read_in_blocks(tmp_path):
    (tmp_path / "t").write_bytes(TEXT)
    with opened(tmp_path / "t") as file:
        assert b"".join(blocks_of(file)) == TEXT


@pytest.mark.parametrize("name", ["", "missing.json", "a\0b"])
def test_what_is_not_there_is_an_error(tmp_path, name):
    with pytest.raises(TraceError, match=r"cannot open|not a file"), opened(f"{tmp_path}/{name}"):
        pass


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="not a file"), opened(tmp_path / "pipe"):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device here")
def test_a_device_is_refused():
    with pytest.raises(TraceError, match="not a file"), opened("/dev/zero"):
        pass
