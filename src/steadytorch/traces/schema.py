"""Map event names that PyTorch's profiler has used since 2020 to categories."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from steadytorch.traces.events import Category

CATEGORIES = {
    # 2020 and 2021
    "Operator": Category.CPU_OP,
    "Kernel": Category.KERNEL,
    "Memcpy": Category.MEMCPY,
    "Memset": Category.MEMSET,
    "Runtime": Category.RUNTIME,
    "Python": Category.PYTHON,
    # since 2022
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.DRIVER,
    "cuda_sync": Category.SYNC,
    "overhead": Category.OVERHEAD,
    "python_function": Category.PYTHON,
    # other accelerators: the same roles
    "hip_runtime": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.DRIVER,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.DRIVER,
    "xpu_sync": Category.SYNC,
}
"""Category by the `cat` of an event."""

PROCESSES = {"CPU functions": Category.CPU_OP, "CUDA functions": Category.KERNEL}
"""Category by the `pid` of events without `cat`: `EventList.export_chrome_trace`."""

MEMORY_NAME = "[memory]"
SPAN_CATEGORY = "Trace"
"""Spans of the profiler itself, with arbitrary ends; they are not events of the program."""

ANNOTATIONS = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.|DistributedDataParallel\.|\[pl\]\[|## "
)
"""Name prefixes of annotations, which traces of 2020 and 2021 list in category `Operator`."""

SYNC_THREADS = 1_000_000
"""Since 2026, synchronisations are on thread = stream + this."""

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class RawEvent(msgspec.Struct, gc=False):
    """One element of `traceEvents`, decoded lazily: times and arguments stay JSON text."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()


class CallArguments(msgspec.Struct, gc=False):
    """Arguments of CUDA runtime and driver calls in a trace."""

    correlation: Int64 = -1
    external: Int64 = msgspec.field(name="External id", default=-1)
    external_old: Int64 = msgspec.field(name="external id", default=-1)


class OperatorArguments(CallArguments, gc=False):
    """Arguments of operators and annotations in a trace."""

    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    dims_old: msgspec.Raw = msgspec.field(name="Input dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw())
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())
    stack: msgspec.Raw = msgspec.field(name="Call stack", default=msgspec.Raw())


class MemoryArguments(msgspec.Struct, gc=False):
    """Arguments of memory allocation events; device type 0 is the host."""

    bytes: Int64 = msgspec.field(name="Bytes", default=-1)
    device: Int32 = msgspec.field(name="Device Id", default=-1)
    device_type: Int32 = msgspec.field(name="Device Type", default=0)


INPUTS = ("dims", "types", "strides", "concrete")
"""Keys of each dictionary in `Trace.inputs`, in the order of the texts that `columns` interns."""

COLUMNS = {"device", "stream", "correlation", "External id", "external id", "external ts", "bytes"}
"""Arguments of GPU events that have a column, or duplicate one that has."""


def category_of(event: RawEvent) -> Category | None:
    """Return the category of an event; None for flow events, markers and metadata."""
    if event.ph == "X":
        cat = event.cat
        if cat == SPAN_CATEGORY:
            return None
        if not cat and isinstance(event.pid, str):
            return PROCESSES.get(event.pid, Category.OTHER)
        if cat == "Operator" and ANNOTATIONS.match(event.name):
            return Category.ANNOTATION
        return CATEGORIES.get(cat, Category.OTHER)
    if event.ph == "i" and event.name == MEMORY_NAME:
        return Category.MEMORY
    return None


def number_in(value: Any) -> int:
    """Return the number in a pid or tid: 7 for `7`, `"7"` and `"stream 7"`; else -1."""
    if isinstance(value, str):
        digits = value.removeprefix("stream ").strip()
        value = int(digits) if digits.isdecimal() and len(digits) < 10 else -1
    return integer(value, 31)


def integer(value: Any, bits: int = 63) -> int:
    """Return the value, or -1 for a non-integer or overflow (2**32 - 1 means no value)."""
    return value if type(value) is int and -(2**bits) <= value < 2**bits else -1
