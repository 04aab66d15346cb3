import msgspec
import numpy as np

from steadytorch.traces.columns import DTYPES, EventTableBuilder
from steadytorch.traces.events import Category
from steadytorch.traces.schema import RawEvent


def _gathered(*events):
    builder = EventTableBuilder()
    builder.add([msgspec.convert(_raw(event), RawEvent) for event in events])
    return builder


def _raw(event):
    texts = {
        key: msgspec.Raw(msgspec.json.encode(event[key]))
        for key in ("ts", "dur", "args")
        if key in event
    }
    return {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 2} | event | texts


def _kernel(**args):
    return {"cat": "kernel", "pid": 0, "tid": 7, "ts": 1, "dur": 1, "args": args}


def test_columns_have_their_types_and_one_length():
    builder = _gathered({"ts": 1, "dur": 2}, _kernel(stream=7))
    builder.add([])
    columns = builder.finish()
    assert {name: column.dtype for name, column in columns.items()} == {
        name: np.dtype(dtype) for name, dtype in DTYPES.items()
    }
    assert {len(column) for column in columns.values()} == {2}


def test_nothing_gathered_is_empty_columns():
    assert {len(column) for column in EventTableBuilder().finish().values()} == {0}


def test_equal_shapes_are_kept_once():
    args = {"Input Dims": [[8, 16], []], "Input type": ["float", "Scalar"], "Ev Idx": 1}
    other = args | {"Input Dims": [[8, 17], []]}
    builder = _gathered(
        *({"ts": 1, "args": one | {"External id": i}} for i, one in enumerate((args, other, args)))
    )
    columns = builder.finish()
    assert columns["inputs"].tolist() == [0, 1, 0]
    assert columns["external"].tolist() == [0, 1, 2]
    assert builder.inputs.values[0] == {
        "dims": [[8, 16], []],
        "types": ["float", "Scalar"],
        "strides": [],
        "concrete": [],
    }


def test_equal_details_are_kept_once_without_what_has_a_column():
    builder = _gathered(
        *(_kernel(stream=7, device=1, correlation=i, grid=[i // 2, 1, 1]) for i in range(4))
    )
    columns = builder.finish()
    assert columns["details"].tolist() == [0, 0, 1, 1]
    assert builder.details.values == [{"grid": [0, 1, 1]}, {"grid": [1, 1, 1]}]
    assert columns["correlation"].tolist() == [0, 1, 2, 3]
    assert columns["device"].tolist() == [1] * 4


def test_threads_are_text_and_streams_numbers():
    builder = _gathered(
        {"ts": 1, "tid": "25"},
        {"ts": 1, "tid": 25},
        {"ts": 1, "cat": "Kernel", "pid": 0, "tid": "stream 7"},
        {"ts": 1, "cat": "cuda_sync", "pid": 0, "tid": 1_000_007, "args": {"stream": 7}},
        {"ts": 1, "cat": "cuda_sync", "pid": 0, "tid": 999_999, "args": {"stream": 2**32 - 1}},
    )
    columns = builder.finish()
    assert columns["thread"].tolist() == [0, 0, 1, 1, 2]
    assert builder.threads.values == [("1", "25"), ("0", "7"), ("0", "999999")]
    assert columns["stream"].tolist() == [-1, -1, 7, 7, -1]
    assert columns["device"].tolist() == [-1, -1, 0, 0, 0]


def test_memory_of_the_host_has_no_device():
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1}
    on_host = {"Bytes": -64, "Device Id": -1, "Device Type": 0}
    on_gpu = {"Bytes": 512, "Device Id": 2, "Device Type": 1}
    builder = _gathered(memory | {"args": on_host}, memory | {"args": on_gpu})
    columns = builder.finish()
    assert columns["bytes"].tolist() == [-64, 512]
    assert columns["device"].tolist() == [-1, 2]
    assert builder.recorded == {"memory"}


def test_events_without_a_time_are_left_out_and_counted():
    builder = _gathered({"ts": 1}, {"dur": 1}, {"ts": "soon"}, {"ts": -1e18})
    assert builder.rows == 1
    assert builder.irregular == {"malformed": 3}


def test_absurd_durations_are_nothing_and_counted():
    builder = _gathered(
        {"ts": 5, "dur": -1},
        {"ts": 5, "dur": 1e300},
        {"ts": 5, "dur": 18446744073709551},
        {"ts": 5},
    )
    assert builder.irregular == {"duration": 3}
    assert builder.finish()["end_ns"].tolist() == [5000] * 4


def test_arguments_of_odd_types_are_ignored_and_counted():
    builder = _gathered(
        {"ts": 1, "cat": "cuda_runtime", "args": {"correlation": "seven"}},
        {"ts": 1, "cat": "cuda_runtime", "args": [1]},
        _kernel(stream="x", correlation=2**70, bytes=None),
        {"ts": 1, "cat": "kernel", "args": 5},
    )
    columns = builder.finish()
    assert builder.irregular == {"arguments": 3}
    assert columns["correlation"].tolist() == [-1] * 4
    assert (columns["category"] == Category.KERNEL).sum() == 2


def test_what_was_recorded_shows_in_the_events():
    sync = {"cat": "cuda_sync", "ts": 1, "args": {"stream": 7}}
    assert _gathered({"cat": "python_function", "ts": 1}, sync).recorded == {"stacks", "sync"}
    assert _gathered({"ts": 1, "args": {"Call stack": "a;b"}}).recorded == {"stacks"}
