"""Files that are damaged, or not traces."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytorch.errors import TraceError, UsageError
from steadytorch.traces.byte_blocks import Limits
from steadytorch.traces.reader import parse_trace, read_trace

from .every_kind import EVENTS, row_of, rows_of
from .recorded import on_cpu
from .synthetic import ORIGIN_NS, build, kernel, op, trace


def test_the_error_is_misuse_and_names_the_file(tmp_path):
    (tmp_path / "x.json").write_text("no")
    with pytest.raises(UsageError, match=r"^x\.json: not JSON: .* at byte 0$") as raised:
        read_trace(tmp_path / "x.json")
    assert raised.value.exit_code == 2
    assert raised.value.offset == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON: no content from byte 0 on"),
        (b" \n", "not JSON: no content from byte 2 on"),
        (b"garbage", "not JSON: it starts with 'g' at byte 0"),
        (b"\xff", r"not JSON: it starts with byte 0xff at byte 0"),
    ],
)
def test_what_is_no_json_is_said_in_words(text, said):
    with pytest.raises(TraceError) as raised:
        parse_trace(text, "x")
    assert str(raised.value).endswith(said)


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


def test_a_gzip_bomb_around_a_trace_is_refused():
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (66 << 20))
    with pytest.raises(TraceError, match=r"300-fold|no event ends"):
        parse_trace(bomb, "bomb")


def test_too_many_events_are_refused():
    with pytest.raises(TraceError, match="more than 5 events"):
        parse_trace(build(EVENTS), "many", Limits(events=5))


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


def test_mended_files_say_so():
    read = parse_trace(build(EVENTS).replace(b"sgemm", b"sg\x02mm"), "mended")
    assert "sg mm" in read.names
    assert read.notes == ("the file was not valid JSON; repaired: control characters",)


def test_odd_values_of_the_top_level_are_ignored():
    read = parse_trace(
        build(EVENTS, deviceProperties="none", baseTimeNanoseconds="x", with_stack=[1]), "odd"
    )
    assert read.devices == ()
    assert read.origin_ns is None


@pytest.mark.parametrize("kind", ["directory", "missing", "pipe"])
def test_what_is_no_file_is_an_error(tmp_path, kind):
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(TraceError):
        read_trace(path)


SMALL = (build(EVENTS), build(EVENTS, "2021"), gzip.compress(build(EVENTS), mtime=0))


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
