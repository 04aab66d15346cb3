import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import TraceError
from steadytorch.traces import json_stream
from steadytorch.traces.json_stream import EventStream

EVENT = b'{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2}'


def _stream(text, size=1 << 20, most=1 << 24):
    return EventStream((text[at : at + size] for at in range(0, len(text), size)), most)


def _names(stream):
    return [event.name for events in stream for event in events]


def _events(number, **more):
    return [{"ph": "X", "cat": "cpu_op", "name": f"op{i}", "ts": i, **more} for i in range(number)]


def _error(text, **options):
    with pytest.raises(TraceError) as raised:
        _names(_stream(text, **options))
    return raised.value


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK", 512)
    monkeypatch.setattr(json_stream, "_REACH", 128)


nested = {
    "list": [{"name": "no event"}, {"ph": "X"}, {"ts": [{"ph": 1}, {"ph": 2}]}],
    "s": '}, {"ph"',
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("args", [{}, {"args": nested}, {"args": {"long": "x" * 3000}}])
@pytest.mark.parametrize("indent", [None, 1])
def test_events_come_whole_however_the_blocks_fall(args, indent):
    top = {"a": [{"ph": 1}], "traceEvents": _events(100, **args), "baseTimeNanoseconds": 5}
    text = json.dumps(top, indent=indent).encode()
    for size in (100, 333, 512, 4000):
        stream = _stream(text, size)
        assert _names(stream) == [f"op{i}" for i in range(100)]
        assert {key: json.loads(bytes(raw)) for key, raw in stream.top.items()} == {
            "a": [{"ph": 1}],
            "baseTimeNanoseconds": 5,
        }


@pytest.mark.usefixtures("small_blocks")
@given(st.lists(st.dictionaries(st.text(max_size=3), st.text() | st.integers(0, 9)), max_size=20))
def test_any_arguments_are_passed_over(several):
    events = [{"name": str(i), "args": args} for i, args in enumerate(several)]
    text = json.dumps({"traceEvents": events}, indent=1).encode()
    stream = _stream(text, 100)
    read = [(event.name, json.loads(bytes(event.args))) for part in stream for event in part]
    assert read == [(event["name"], event["args"]) for event in events]


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", b" \n"])
def test_a_list_without_an_object_around_it(head):
    assert _names(_stream(head + json.dumps(_events(3)).encode() + b"\n")) == ["op0", "op1", "op2"]


def test_an_empty_list():
    assert _names(_stream(b'{"traceEvents": []}')) == []


def test_a_nested_key_of_the_same_name_is_not_mistaken():
    text = b'{"metadata": {"traceEvents": [1, 2]}, "traceEvents": [' + EVENT + b"]}"
    assert _names(_stream(text)) == ["aten::mm"]


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        (b"", 0),
        (b"  hello", 2),
        (b"\x80\x04pickle", 0),
        (b'{"traceEvents": [' + EVENT + b", oops]}", 19 + len(EVENT)),
        (b'{"traceEvents": [' + EVENT + b"]} more", 20 + len(EVENT)),
        (b'{"a": tru, "traceEvents": [' + EVENT + b"]}", 6),
        (b"[" + EVENT + b"]]", 2 + len(EVENT)),
        (b"[" + EVENT + b",]", 1 + len(EVENT)),
        (b'{"a": 1', 7),
        (b'{"traceEvents": [' + EVENT, 17 + len(EVENT)),
        (b'{"traceEvents": [' + EVENT + b'], "a":', 24 + len(EVENT)),
    ],
)
def test_broken_text_is_an_error_with_its_byte(text, offset):
    error = _error(text)
    assert error.offset is not None
    assert abs(error.offset - offset) <= 1, error
    assert f"{error.offset}" in str(error)


def test_quotes_within_a_name_are_an_error_with_their_byte():
    broken = EVENT.replace(b"aten::mm", b'step "one" of two')
    text = b'{"traceEvents": [' + b", ".join([EVENT] * 1000 + [broken] + [EVENT] * 1000) + b"]}"
    error = _error(text)
    assert abs(error.offset - (text.index(b"one"))) <= 1
    assert "not JSON" in str(error)


def test_json_without_events_is_no_trace():
    assert "not a trace" in str(_error(b'{"name": "package", "version": 1}'))
    assert "not a trace" in str(_error(b'{"traceEvents": {"a": 1}}'))


@pytest.mark.parametrize("head", [b"", b'{"a":', b'{"traceEvents":', b'{"traceEvents":[{"args":'])
def test_deep_nesting_is_an_error(head):
    assert "nested too deeply" in str(_error(head + b"[" * 200_000 + b"]" * 200_000))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" + b" " * 50_000, "no event ends"),
        (b'[{"name": "' + b"x" * 50_000, "no event ends"),
        (b'[{"args": [' + b'{"ph": 1}, ' * 5000, "no event ends"),
        (b'{"a": "' + b"x" * 50_000, "bytes without events"),
        (b'{"traceEvents": [' + EVENT + b'], "a": "' + b"x" * 50_000, "bytes without events"),
        (b"[" + b'"' * 50_000, "not JSON at byte"),
    ],
)
def test_what_never_ends_is_refused_before_it_is_all_read(monkeypatch, text, said):
    monkeypatch.setattr(json_stream, "_LONGEST", 2048)
    taken = []

    def blocks():
        for at in range(0, len(text), 500):
            taken.append(at)
            yield text[at : at + 500]

    with pytest.raises(TraceError, match=said) as raised:
        _names(EventStream(blocks(), 4096))
    assert raised.value.offset is not None
    assert taken[-1] < 10_000


def test_many_elements_that_are_no_events_are_another_format(monkeypatch):
    monkeypatch.setattr(json_stream, "_MALFORMED", 10)
    with pytest.raises(TraceError, match="11 elements are not events"):
        _names(_stream(b"[" + b",".join([EVENT] + [b"1"] * 20) + b"]"))


def test_keys_of_that_name_elsewhere_cost_no_decoding_each():
    text = b'{"a": [' + b'{"traceEvents": []}, ' * 200_000 + b"1]}"
    assert "not a trace" in str(_error(text))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (EVENT.replace(b"mm", b"m\x01m"), "aten::m m"),
        (EVENT.replace(b"mm", b"m\xffm"), "aten::m?m"),
        (EVENT.replace(b"mm", rb"\m"), "aten::/m"),
        (EVENT.replace(b"1.5", b"NaN"), "aten::mm"),
    ],
)
def test_known_faults_are_mended_and_counted(text, name):
    stream = _stream(b'{"traceEvents": [' + EVENT + b", " + text + b'], "a": 1}')
    assert _names(stream) == ["aten::mm", name]
    assert sum(stream.mended.values()) >= 1
    assert "a" in stream.top


@pytest.mark.parametrize(
    "odd", [b"1", b"null", b'{"name": 5}', b'{"pid": [1]}', b"[]", b'{"ph": null}']
)
def test_what_is_no_event_is_left_out_and_counted(odd):
    stream = _stream(b'{"traceEvents": [' + EVENT + b", " + odd + b", " + EVENT + b"]}")
    assert _names(stream) == ["aten::mm", "aten::mm"]
    assert stream.malformed == 1
