"""Kineto-like traces from simple event lists, in every schema PyTorch has written.

    from .synthetic import build, kernel, launch, op, runtime, step, trace

    events = [
        step(0, 0, 1_000_000),
        op("aten::mm", 10_000, 60_000, external=1, dims=[[8, 16], [16, 4]]),
        *launch("sgemm", call=(20_000, 30_000), gpu=(50_000, 90_000), correlation=7, external=1),
    ]
    read = trace(events)                 # a steadytorch.traces.events.Trace
    data = build(events, schema="2021")  # the bytes of the file

All times are int ns. `trace` keeps them as they are when the earliest event is at 0 (time zero of
a trace is its earliest event). Schemas "2021" and "2022" hold whole microseconds, as those did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

SCHEMAS = ("list", "2021", "2022", "epoch-float", "2024", "2026")
PROCESS = 4242
ORIGIN_NS = 1_752_830_083_333_000_000
BASE_NS = 1_751_410_836_000_000_000
"""`baseTimeNanoseconds` of the newer schemas."""

DEVICE = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85_174_583_296,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
    "warpSize": 32,
}
GRID = {
    "registers per thread": 32,
    "shared memory": 0,
    "blocks per SM": 1.5,
    "warps per SM": 6.0,
    "grid": [198, 1, 1],
    "block": [128, 1, 1],
    "est. achieved occupancy %": 9,
}


@dataclass(frozen=True)
class Event:
    """One event, independent of the schema; `kind` is a current category."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    process: Any = PROCESS
    thread: Any = PROCESS
    args: dict[str, Any] = field(default_factory=dict)


def op(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    thread: int = PROCESS,
    external: int | None = None,
    dims: list | None = None,
    types: list | None = None,
    strides: list | None = None,
    concrete: list | None = None,
    **args: Any,
) -> Event:
    """An operator on the CPU; inputs as the profiler records them."""
    shapes = {
        "Input Dims": dims,
        "Input type": types,
        "Input Strides": strides,
        "Concrete Inputs": concrete,
    }
    given = {key: value for key, value in shapes.items() if value is not None}
    return Event(
        "cpu_op", name, start_ns, end_ns, thread=thread, args=_external(external) | given | args
    )


def annotation(
    name: str, start_ns: int, end_ns: int, *, thread: int = PROCESS, external: int | None = None
) -> Event:
    """A `record_function` range on the CPU."""
    return Event("user_annotation", name, start_ns, end_ns, thread=thread, args=_external(external))


def step(index: int, start_ns: int, end_ns: int, *, thread: int = PROCESS) -> Event:
    """The mark of one profiled step."""
    return annotation(f"ProfilerStep#{index}", start_ns, end_ns, thread=thread)


def python(name: str, start_ns: int, end_ns: int, *, thread: int = PROCESS) -> Event:
    """A Python function (`with_stack=True`)."""
    return Event("python_function", name, start_ns, end_ns, thread=thread)


def runtime(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    correlation: int | None = None,
    external: int | None = None,
    thread: int = PROCESS,
    driver: bool = False,
) -> Event:
    """A CUDA call on the CPU."""
    kind = "cuda_driver" if driver else "cuda_runtime"
    args = {"cbid": 211} | _given("correlation", correlation) | _external(external)
    return Event(kind, name, start_ns, end_ns, thread=thread, args=args)


def kernel(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    correlation: int | None = None,
    external: int | None = None,
    stream: int = 7,
    device: int = 0,
    details: dict[str, Any] | None = None,
    kind: str = "kernel",
) -> Event:
    """A kernel on the GPU; `details` are the format's own keys and replace those of `GRID`."""
    where = {"device": device, "context": 1, "stream": stream}
    args = _external(external) | where | _given("correlation", correlation)
    args |= (GRID if kind == "kernel" else {}) | (details or {})
    return Event(kind, name, start_ns, end_ns, device, stream, args)


def memcpy(name: str, start_ns: int, end_ns: int, *, size: int = 4096, **where: Any) -> Event:
    """A copy on the GPU, as `Memcpy HtoD (Pageable -> Device)`; `where` as for `kernel`."""
    rate = {"bytes": size, "memory bandwidth (GB/s)": size / max(1, end_ns - start_ns)}
    return kernel(name, start_ns, end_ns, kind="gpu_memcpy", details=rate, **where)


def memset(start_ns: int, end_ns: int, *, size: int = 4096, **where: Any) -> Event:
    """A fill on the GPU; `where` as for `kernel`."""
    details = {"bytes": size}
    return kernel("Memset (Device)", start_ns, end_ns, kind="gpu_memset", details=details, **where)


def launch(
    name: str,
    *,
    call: tuple[int, int],
    gpu: tuple[int, int],
    correlation: int,
    external: int | None = None,
    api: str = "cudaLaunchKernel",
    thread: int = PROCESS,
    **where: Any,
) -> tuple[Event, Event]:
    """A kernel and the call that launched it; `where` as for `kernel`."""
    joined: dict[str, Any] = {"correlation": correlation, "external": external}
    return (
        runtime(api, *call, thread=thread, **joined),
        kernel(name, *gpu, **joined, **where),
    )


def sync(
    name: str, start_ns: int, end_ns: int, *, details: dict[str, Any] | None = None, **where: Any
) -> Event:
    """An opt-in record, as "Stream Sync" or "Event Sync"; `where` as for `kernel`."""
    details = {"cuda_sync_kind": name} | (details or {})
    return kernel(name, start_ns, end_ns, kind="cuda_sync", details=details, **where)


def gpu_annotation(name: str, start_ns: int, end_ns: int, *, stream: int = 7) -> Event:
    """The range on the GPU that belongs to an annotation on the CPU."""
    return Event("gpu_user_annotation", name, start_ns, end_ns, 0, stream, _external(1))


def overhead(name: str, start_ns: int, end_ns: int) -> Event:
    """Overhead of the profiler, such as `Buffer Flush`."""
    return Event("overhead", name, start_ns, end_ns, -1, 0)


def memory(at_ns: int, size: int, *, device: int = 0, thread: int = PROCESS) -> Event:
    """An allocation (`profile_memory=True`), negative when freed; device -1 is the host."""
    args = {"Device Type": 0 if device < 0 else 1, "Device Id": device, "Addr": 1, "Bytes": size}
    return Event("cpu_instant_event", "[memory]", at_ns, at_ns, thread=thread, args=args)


def build(
    events: list[Event] | tuple[Event, ...],
    schema: str = "2026",
    *,
    devices: list[dict[str, Any]] | None = None,
    flows: bool = True,
    **top: Any,
) -> bytes:
    """The file of these events; `top` are further keys of the top level."""
    rows: list[dict[str, Any]] = [_meta(schema)]
    for event in events:
        rows.append(_row(event, schema))
        if flows and "correlation" in event.args and schema != "list":
            rows.append(_flow(event, rows[-1], schema))
    if schema == "list":
        return msgspec.json.encode(rows)
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [DEVICE] if devices is None else devices,
    }
    tail: dict[str, Any] = {"traceName": "/tmp/trace.json", "displayTimeUnit": "ms"}
    if schema in ("2024", "2026"):
        tail["baseTimeNanoseconds"] = BASE_NS
    return msgspec.json.encode(head | {"traceEvents": rows} | tail | top)


def trace(events: list[Event] | tuple[Event, ...], schema: str = "2026", **top: Any) -> Any:
    """The events as read."""
    from steadytorch.traces.reader import parse_trace

    return parse_trace(build(events, schema, **top), "synthetic")


OLD_NAMES = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "cuda_runtime": "Runtime",
    "cuda_driver": "Runtime",
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync", "gpu_user_annotation")


def _given(key: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {key: value}


def _external(external: int | None) -> dict[str, Any]:
    return _given("External id", external)


def microseconds(ns: int, schema: str) -> msgspec.Raw:
    """How a schema writes this many ns."""
    if schema in ("2021", "2022"):
        return msgspec.Raw(b"%d" % (ns // 1000))
    sign = b"-" if ns < 0 else b""
    return msgspec.Raw(sign + b"%d.%03d" % divmod(abs(ns), 1000))


def _start(event: Event, schema: str) -> msgspec.Raw:
    base = {"2024": BASE_NS, "2026": BASE_NS, "list": ORIGIN_NS}.get(schema, 0)
    return microseconds(event.start_ns + ORIGIN_NS - base, schema)


def _row(event: Event, schema: str) -> dict[str, Any]:
    old = schema == "2021"
    row: dict[str, Any] = {"ph": "X", "cat": event.kind, "name": event.name}
    if event.kind == "cpu_instant_event":
        row = {"ph": "i", "cat": event.kind, "s": "t", "name": event.name}
    if old:
        row |= {"cat": OLD_NAMES.get(event.kind, event.kind)}
        if row["cat"] == "cpu_instant_event":
            del row["cat"]
    row |= {"pid": event.process, "tid": _thread(event, schema), "ts": _start(event, schema)}
    if row["ph"] == "X":
        row["dur"] = microseconds(event.end_ns - event.start_ns, schema)
    args = dict(event.args)
    if old and event.kind not in ("cpu_op", "user_annotation") and "External id" in args:
        args["external id"] = args.pop("External id")
    return row if event.kind == "overhead" else row | {"args": args}


def _thread(event: Event, schema: str) -> Any:
    if schema == "2021":
        return f"stream {event.thread}" if event.kind in ON_GPU else str(event.thread)
    if schema == "2026" and event.kind == "cuda_sync" and event.thread >= 0:
        return event.thread + 1_000_000
    return event.thread


def _flow(event: Event, row: dict[str, Any], schema: str) -> dict[str, Any]:
    name = {"2021": ("async", "launch")}.get(schema, ("ac2g", "ac2g"))
    ends = {"ph": "f", "bp": "e"} if event.kind in ON_GPU else {"ph": "s"}
    where = {key: row[key] for key in ("pid", "tid", "ts")}
    return ends | {"id": event.args["correlation"], "cat": name[0], "name": name[1]} | where


def _meta(schema: str) -> dict[str, Any]:
    at = _start(Event("", "", 0, 0), schema)
    name = {"name": "process_name", "ph": "M", "ts": at, "pid": PROCESS, "tid": 0}
    return name | {"args": {"name": "python"}}
