"""Random traces: every kind of event, nested or not, on several threads, streams and GPUs."""

from __future__ import annotations

from hypothesis import strategies as st

from . import synthetic as syn

HOST_NAMES = (
    "aten::add",
    "aten::item",
    "aten::convolution",
    "aten::empty",
    "aten::copy_",
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "compile_inner (dynamo_timed)",
    "steadytorch.gc",
    "custom::op",
)
CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaMalloc",
    "cudaFree",
    "cudaStreamWaitEvent",
    "cudaEventRecord",
    "cuModuleLoadData",
    "cudaMemcpy",
)
OVERHEADS = ("Buffer Flush", "Lazy Function Loading", "Command Buffer Full")
FRAMES = ("train.py(3): main", "<built-in function sleep>", "torch/nn/modules/module.py(1): call")
LATEST_NS = 6_000_000
THREADS = (syn.PROCESS, syn.PROCESS + 1)


@st.composite
def spans(draw: st.DrawFn, length: int = 2_000_000) -> tuple[int, int]:
    """A time span; many are empty or touch others."""
    grid = draw(st.sampled_from((1, 1_000, 250_000)))
    start = draw(st.integers(0, LATEST_NS // grid)) * grid
    return start, start + draw(st.integers(0, length // grid)) * grid


@st.composite
def host_events(draw: st.DrawFn) -> syn.Event:
    """An event on a host thread."""
    kind = draw(st.sampled_from(("op", "annotation", "call", "python", "overhead", "memory")))
    start, end = draw(spans())
    thread = draw(st.sampled_from(THREADS))
    if kind == "call":
        return syn.runtime(draw(st.sampled_from(CALLS)), start, end, thread=thread)
    if kind == "python":
        return syn.python(draw(st.sampled_from(FRAMES)), start, end, thread=thread)
    if kind == "overhead":
        return syn.overhead(draw(st.sampled_from(OVERHEADS)), start, end)
    if kind == "memory":
        return syn.memory(start, end - start)
    make = syn.op if kind == "op" else syn.annotation
    return make(draw(st.sampled_from(HOST_NAMES)), start, end, thread=thread)


@st.composite
def gpu_events(draw: st.DrawFn, correlation: int) -> list[syn.Event]:
    """A GPU event with its launch call, with another event's, or with none."""
    start, end = draw(spans())
    shared = draw(st.integers(0, 3))
    where = {
        "correlation": shared or correlation,
        "stream": draw(st.sampled_from((7, 20))),
        "device": draw(st.sampled_from((0, 0, 0, 1))),
    }
    name = draw(st.sampled_from(("gemm", "add", "ncclDevKernel_AllReduce", "copy", "fill", "sync")))
    if name == "copy":
        event = syn.memcpy("Memcpy HtoD (Pageable -> Device)", start, end, **where)
    elif name == "fill":
        event = syn.memset(start, end, **where)
    elif name == "sync":
        event = syn.sync("Stream Sync", start, end, **where)
    else:
        event = syn.kernel(name, start, end, **where)
    if draw(st.booleans()):
        return [event]
    call = draw(spans(100_000))
    thread = draw(st.sampled_from(THREADS))
    return [syn.runtime("cudaLaunchKernel", *call, correlation=correlation, thread=thread), event]


@st.composite
def traces(draw: st.DrawFn, *, gpu: bool = True) -> list[syn.Event]:
    """The events of a trace; with `gpu` there may be some on GPUs."""
    found = [syn.step(n, *draw(spans())) for n in range(draw(st.integers(0, 4)))]
    found += draw(st.lists(host_events(), max_size=25))
    for number in range(draw(st.integers(0, 20)) if gpu else 0):
        found += draw(gpu_events(100 + number))
    return [*found, syn.op("aten::mul", *draw(spans()))]
