from __future__ import annotations

import gzip
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.traces.events import Category
from steadytorch.traces.reader import parse_trace, read_trace

from .every_kind import EVENTS, row_of, rows_of
from .recorded import kept, on_cpu
from .synthetic import DEVICE, ORIGIN_NS, SCHEMAS, kernel, launch, memcpy, memory, op, python, trace

OLD = {Category.ANNOTATION: Category.CPU_OP, Category.DRIVER: Category.RUNTIME}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_gives_the_same_times_and_names(schema):
    expected = sorted((event.start_ns, event.end_ns, event.name) for event in EVENTS)
    assert rows_of(trace(EVENTS, schema)) == expected


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_gives_the_same_columns(schema):
    read, today = trace(EVENTS, schema), trace(EVENTS, "2026")
    for name in ("device", "stream", "correlation", "external", "bytes"):
        assert getattr(read.events, name).tolist() == getattr(today.events, name).tolist(), name
    assert read.threads == today.threads
    assert read.inputs == today.inputs
    assert read.details == today.details


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_gives_the_same_categories(schema):
    read, today = trace(EVENTS, schema), trace(EVENTS, "2026")
    expected = [Category(code) for code in today.events.category]
    if schema == "2021":
        # That schema has one name each for operators and ranges, and for both kinds of calls.
        mine = row_of(today, "mine")
        expected = [
            OLD[c] if c == Category.DRIVER or i == mine else c for i, c in enumerate(expected)
        ]
    assert [Category(code) for code in read.events.category] == expected


def test_columns_of_each_kind_of_event():
    read = trace(EVENTS)
    events = read.events
    copy, fill, waited = (
        row_of(read, name) for name in (EVENTS[5].name, "Memset (Device)", "Stream Sync")
    )
    assert (events.bytes[copy], events.stream[copy], events.device[copy]) == (64, 8, 0)
    assert (events.bytes[fill], events.device[fill]) == (32, 1)
    assert read.threads[events.thread[waited]] == ("0", "7")
    assert read.details[read.events.details[waited]]["cuda_sync_kind"] == "Stream Sync"
    assert read.details[read.events.details[row_of(read, "sgemm")]]["grid"] == [198, 1, 1]
    assert read.inputs_of(row_of(read, "aten::mm")) == {
        "dims": [[8, 16], [16, 4]],
        "types": ["float", "float"],
        "strides": [[16, 1], [4, 1]],
        "concrete": ["", ""],
    }
    assert read.inputs_of(copy) is None
    assert read.devices == (DEVICE,)
    assert read.recorded == {"shapes", "stacks", "memory", "sync"}
    assert read.notes == ()
    assert read.irregular == {}


@pytest.mark.parametrize(
    ("schema", "origin"),
    [("list", None)] + [(schema, ORIGIN_NS) for schema in SCHEMAS if schema != "list"],
)
def test_unix_time_is_known_where_the_trace_tells_it(schema, origin):
    assert trace(EVENTS, schema).origin_ns == origin


def test_what_was_switched_on_is_also_told_by_the_top_level():
    read = trace([op("x", 0, 5)], record_shapes=1, with_stack=0, profile_memory=1)
    assert read.recorded == {"shapes", "memory"}


def test_rows_are_sorted_longer_ones_first():
    read = trace([op("c", 5, 6), op("b", 0, 3), op("a", 0, 9), op("d", 0, 3)])
    assert [read.name_of(row) for row in range(4)] == ["a", "b", "d", "c"]


def test_time_zero_is_the_earliest_event():
    read = trace([op("x", 700, 800), kernel("k", 900, 950, correlation=1)])
    assert read.events.start_ns.tolist() == [0, 200]
    assert read.origin_ns == ORIGIN_NS + 700


times = st.integers(0, 10**13)


@st.composite
def _generated(draw):
    kind = draw(st.sampled_from(["op", "launch", "copy", "memory", "python"]))
    name = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    start, longer = draw(times), draw(st.integers(0, 10**9))
    number = draw(st.integers(1, 2**40))
    if kind == "op":
        dims = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3))
        return [op(name, start, start + longer, external=number, dims=dims)]
    if kind == "launch":
        return launch(
            name, call=(start, start + 5), gpu=(start + 9, start + longer + 9), correlation=number
        )
    if kind == "copy":
        stream = draw(st.integers(0, 2**31 - 1 - 10**6))
        return [memcpy(name, start, start + longer, correlation=number, size=number, stream=stream)]
    if kind == "memory":
        return [memory(start, draw(st.integers(-(2**40), 2**40)))]
    return [python(name, start, start + longer)]


@given(
    st.lists(_generated(), min_size=1, max_size=15),
    st.sampled_from(["epoch-float", "2024", "2026"]),
)
def test_what_was_written_is_read(parts, schema):
    events = [event for part in parts for event in part]
    read = trace(events, schema)
    first = min(event.start_ns for event in events)
    expected = sorted(
        (
            event.start_ns - first,
            event.end_ns - first,
            event.name,
            event.args.get("correlation", -1),
            event.args.get("External id", -1),
            event.args.get("bytes", event.args.get("Bytes", -1)),
            event.args.get("stream", -1),
        )
        for event in events
    )
    columns = read.events
    names = [read.name_of(row) for row in range(len(columns))]
    got = sorted(
        zip(
            *(columns.start_ns.tolist(), columns.end_ns.tolist(), names),
            *(columns.correlation.tolist(), columns.external.tolist()),
            *(columns.bytes.tolist(), columns.stream.tolist()),
            strict=True,
        )
    )
    assert got == expected
    assert sorted(map(str, (read.inputs_of(row) for row in columns.of(Category.CPU_OP)))) == sorted(
        str({"dims": event.args["Input Dims"], "types": [], "strides": [], "concrete": []})
        for event in events
        if event.kind == "cpu_op"
    )
    assert (np.diff(columns.start_ns) >= 0).all()


def test_a_trace_of_this_pytorch():
    read = parse_trace(on_cpu(), "cpu")
    names = [read.name_of(row) for row in read.events.of(Category.ANNOTATION)]
    assert [name for name in names if name.startswith("ProfilerStep#")] == [
        "ProfilerStep#1",
        "ProfilerStep#2",
        "ProfilerStep#3",
    ]
    addmm = row_of(read, "aten::addmm")
    assert read.inputs_of(addmm)["dims"][:3] == [[8], [4, 8], [8, 8]]
    assert abs(read.origin_ns - time.time_ns()) < 3600 * 10**9
    assert {"shapes", "memory"} <= read.recorded
    assert not read.notes


def test_the_list_that_the_older_profiler_exports(tmp_path):
    import torch

    with torch.autograd.profiler.profile(use_kineto=False) as profiled:
        torch.ones(4, 4) @ torch.ones(4, 4)
    profiled.function_events.export_chrome_trace(str(tmp_path / "list.json"))
    read = read_trace(tmp_path / "list.json")
    assert "aten::mm" in read.names
    assert set(read.events.category.tolist()) == {Category.CPU_OP}


@pytest.mark.parametrize(
    ("name", "kernels", "rows"),
    [
        ("a100_event_sync.json.gz", 4, 32),
        ("h100_bert_small.json.gz", 60, 2295),
        ("h100_owlv2.json.gz", 4330, 117_632),
        ("kineto_v100_resnet50_workers0.json.gz", 8772, 57_503),
        ("v100_resnet_ns_resolution.json.gz", 4350, 45_419),
    ],
)
def test_real_traces_are_read_whole(name, kernels, rows):
    read = read_trace(kept(name))
    assert len(read.events.of(Category.KERNEL)) == kernels
    assert len(read.events) == rows
    assert not read.notes
    assert read.source == name
    assert 2020 < time.gmtime(read.origin_ns / 1e9).tm_year < 2030


@pytest.mark.parametrize("name", ["h100_bert_small.json.gz", "v100_resnet_ns_resolution.json.gz"])
def test_real_traces_are_read_as_the_plain_decoder_reads_them(name):
    path = kept(name)
    text = gzip.decompress(path.read_bytes())
    plain = json.loads(text, parse_float=str, parse_int=str)["traceEvents"]
    kernels = [event for event in plain if event.get("cat") == "kernel"]
    read = read_trace(path)
    events, rows = read.events, read.events.of(Category.KERNEL)
    whole = sorted(_ns(event["ts"]) for event in kernels)
    assert np.diff(events.start_ns[rows]).tolist() == np.diff(whole).tolist()
    assert sorted((events.end_ns - events.start_ns)[rows].tolist()) == sorted(
        _ns(event["dur"]) for event in kernels
    )
    assert sorted(events.correlation[rows].tolist()) == sorted(
        int(event["args"]["correlation"]) for event in kernels
    )


def _ns(us):
    whole, _, rest = us.partition(".")
    return int(whole) * 1000 + int(rest.ljust(3, "0") or 0)
