"""Files that are damaged, or not traces."""

from __future__ import annotations

import gzip
import json
import os
import re
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytorch.errors import TraceError, UsageError
from steadytorch.traces import trace_text
from steadytorch.traces.reader import parse_trace, read_trace
from steadytorch.traces.trace_text import read_text

from .every_kind import EVENTS, row_of, rows_of
from .recorded import on_cpu
from .synthetic import ORIGIN_NS, build, kernel, op, trace


def test_the_error_is_misuse_and_names_the_file(tmp_path):
    (tmp_path / "x.json").write_text("no")
    with pytest.raises(UsageError, match=r"^x\.json: not JSON: the file starts with") as raised:
        read_trace(tmp_path / "x.json")
    assert raised.value.exit_code == 2


EVENT = b'{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON: the file is empty"),
        (b" \n", "not JSON: the file is empty"),
        (b"garbage", "not JSON: the file starts with b'g'"),
        (b"\xff", "not JSON: the file starts with b'\\xff'"),
        (b'{"traceEvents": [' + EVENT + b", oops]}", "not JSON at byte 88"),
        (b'{"traceEvents": [' + EVENT + b"]} more", "not JSON at byte 90"),
        (b"[" + EVENT + b",]", f"not JSON at byte {2 + len(EVENT)}"),
        (b"[" + EVENT.replace(b"mm", b'"mm"') + b"]", "not JSON at byte 46"),
        (
            b'{"traceEvents": [' + EVENT,
            f"its JSON ends early, at byte {17 + len(EVENT)}",
        ),
        (b'{"a": "\xff", "\xff": 1, "traceEvents": []}', "not JSON: invalid start byte of UTF-8"),
        (b'{"name": "package", "version": 1}', 'it has no "traceEvents" list'),
        (b'{"traceEvents": {"a": 1}}', 'it has no "traceEvents" list'),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
        (b'{"traceEvents":[{"args":' + b"[" * 200_000, "nested too deeply"),
    ],
)
def test_what_is_no_trace_is_said_in_words(text, said):
    with pytest.raises(TraceError, match=re.escape(said)):
        parse_trace(text, "x")


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", b" \n"])
def test_a_list_without_an_object_around_it(head):
    assert parse_trace(head + b"[" + EVENT + b"]\n", "list").names == ("aten::mm",)


@pytest.mark.parametrize(
    "odd",
    [b"1", b"null", b'{"name": 5}', b'{"pid": [1]}', b"[]", b'{"ph": null}', b'{"name": "\xff"}'],
)
def test_what_is_no_event_is_left_out_and_counted(odd):
    read = parse_trace(b'{"traceEvents": [' + EVENT + b", " + odd + b", " + EVENT + b"]}", "odd")
    assert [read.name_of(row) for row in range(2)] == ["aten::mm", "aten::mm"]
    assert read.irregular == {"malformed": 1}


def test_chunks_are_put_together(monkeypatch):
    whole = rows_of(trace(EVENTS))
    monkeypatch.setattr(trace_text, "CHUNK", 2)
    assert rows_of(trace(EVENTS)) == whole


@pytest.mark.parametrize("text", [b"[]", b'{"traceEvents": []}', b'{"traceEvents": [{}]}'])
def test_a_trace_without_events_is_an_error(text):
    with pytest.raises(TraceError, match="holds no events"):
        parse_trace(text, "empty")


def test_a_trace_of_another_tool_is_an_error():
    other = [{"ph": "X", "cat": "browser", "name": "paint", "ts": i, "dur": 1} for i in range(9)]
    with pytest.raises(TraceError, match="9 events come from another tool"):
        parse_trace(msgspec.json.encode({"traceEvents": other}), "chrome")


def test_gzip_is_told_by_content(tmp_path):
    (tmp_path / "trace.json").write_bytes(gzip.compress(build(EVENTS)))
    (tmp_path / "trace.json.gz").write_bytes(build(EVENTS))
    zipped, plain = read_trace(tmp_path / "trace.json"), read_trace(tmp_path / "trace.json.gz")
    assert rows_of(zipped) == rows_of(plain)


def test_gzip_members_one_after_the_other_are_read(tmp_path):
    text = build(EVENTS)
    (tmp_path / "t").write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]))
    assert rows_of(read_trace(tmp_path / "t")) == rows_of(trace(EVENTS))


@pytest.mark.parametrize("zipped", [True, False])
def test_more_bytes_than_allowed_are_refused(tmp_path, zipped):
    text = b'{"traceEvents": [' + b" " * 10_000_000
    (tmp_path / "bomb").write_bytes(gzip.compress(text) if zipped else text)
    with pytest.raises(TraceError, match="more than 5,000 bytes"):
        read_text(tmp_path / "bomb", 5000)


@pytest.mark.parametrize("cut", [3, 12, 60, -1])
def test_a_gzip_file_cut_short_is_an_error(tmp_path, cut):
    (tmp_path / "t").write_bytes(gzip.compress(os.urandom(500))[:cut])
    with pytest.raises(TraceError, match="gzip file is cut short"):
        read_trace(tmp_path / "t")


def test_a_damaged_gzip_file_is_an_error(tmp_path):
    data = bytearray(gzip.compress(os.urandom(5000)))
    data[2000:2100] = bytes(100)
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match="gzip file is damaged"):
        read_trace(tmp_path / "t")


def test_events_without_a_time_are_left_out():
    zero = kernel("lost", -ORIGIN_NS, -ORIGIN_NS + 5, correlation=1)
    read = trace([*EVENTS, zero, zero], "epoch-float")
    assert rows_of(read) == rows_of(trace(EVENTS))
    assert read.irregular == {"zero_timestamp": 2}
    assert read.notes == ("omitted 2 events without a time (zero)",)


def test_a_first_event_at_zero_is_no_missing_time():
    assert rows_of(trace(EVENTS, "list"))[0][0] == 0
    assert trace(EVENTS, "list").irregular == {}


def test_negative_durations_are_noted():
    read = trace([*EVENTS, op("backwards", 5000, 2000)])
    row = row_of(read, "backwards")
    assert read.events.end_ns[row] == read.events.start_ns[row]
    assert read.irregular == {"duration": 1}
    assert "1 negative" in read.notes[0]


def test_absurd_times_leave_the_rest_alone():
    rows = msgspec.json.decode(build(EVENTS, "2022"))["traceEvents"]
    rows += [
        {"ph": "X", "cat": "kernel", "name": "far", "ts": ts, "dur": 1} for ts in (-1e300, 1e300)
    ]
    rows += [{"ph": "X", "cat": "kernel", "name": "far", "ts": 10**400, "dur": 10**400}]
    text = json.dumps({"traceEvents": rows}).encode()
    read = parse_trace(text, "far")
    assert rows_of(read) == rows_of(trace(EVENTS))
    assert read.irregular == {"malformed": 3}


def test_the_longest_times_do_not_overflow():
    far = {"ph": "X", "cat": "kernel", "name": "far", "dur": 1e15}
    rows = [far | {"ts": -1e15}, far | {"ts": 4.6e15}]
    read = parse_trace(json.dumps(rows).encode(), "far")
    assert (read.events.end_ns >= read.events.start_ns).all()
    assert (read.events.start_ns >= 0).all()


def test_odd_values_of_the_top_level_are_ignored():
    read = parse_trace(
        build(EVENTS, deviceProperties="none", baseTimeNanoseconds="x", with_stack=[1]), "odd"
    )
    assert read.devices == ()
    assert read.origin_ns is None


@pytest.mark.parametrize("kind", ["directory", "missing", "pipe", "null\0byte"])
def test_what_is_no_file_is_an_error(tmp_path, kind):
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(TraceError, match=r"cannot open|not a file"):
        read_trace(path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device here")
def test_a_device_is_refused():
    with pytest.raises(TraceError, match="not a file"):
        read_trace("/dev/zero")


SMALL = (build(EVENTS), build(EVENTS, "2021"))


@st.composite
def _mutated(draw):
    """A valid trace with parts replaced, removed or repeated."""
    text = bytearray(
        draw(st.sampled_from((*SMALL, on_cpu()[:60_000] + on_cpu()[-3000:], on_cpu())))
    )
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 30))
        new = draw(
            st.binary(max_size=8)
            | st.sampled_from([b'"', b"}", b"]", b"{", b"[", b",", b"-", b"NaN", b"1e999", b"\\"])
            | st.just(bytes(text[at : at + 200]))
        )
        text[at : at + length] = new
    return bytes(text)


@settings(max_examples=3 * settings.default.max_examples)
@given(_mutated())
def test_damage_never_raises_anything_else(text):
    with suppress(TraceError):
        read = parse_trace(text, "damaged")
        columns = vars(read.events).values()
        assert len({len(column) for column in columns}) == 1
        assert (read.events.end_ns >= read.events.start_ns).all()


@given(st.binary(max_size=300))
def test_any_bytes_never_raise_anything_else(data):
    with pytest.raises(TraceError):
        parse_trace(data, "bytes")
