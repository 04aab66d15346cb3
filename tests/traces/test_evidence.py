import pytest

from steadytorch.traces.events import Category
from steadytorch.traces.evidence import Evidence, by_name, evidence

from . import synthetic as syn

OP, RANGE, CALL, FRAME = syn.op, syn.annotation, syn.runtime, syn.python


@pytest.mark.parametrize(
    ("make", "name", "expected"),
    [
        (RANGE, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "DATA_WAIT"),
        (OP, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "DATA_WAIT"),
        (RANGE, "enumerate(DataPipe)#ShufflerIterDataPipe", "DATA_WAIT"),
        (RANGE, "[pl][profile][_TrainingEpochLoop].train_dataloader_next", "DATA_WAIT"),
        (FRAME, "torch/utils/data/dataloader.py(703): __next__", "DATA_WAIT"),
        (FRAME, "torch/utils/data/dataloader.py(120): __init__", "NONE"),
        (CALL, "cudaStreamSynchronize", "SYNCHRONISATION"),
        (CALL, "hipDeviceSynchronize", "SYNCHRONISATION"),
        (CALL, "cuCtxSynchronize", "SYNCHRONISATION"),
        (CALL, "cudaMemcpy", "SYNCHRONISATION"),
        (CALL, "cudaMemcpy2D", "SYNCHRONISATION"),
        (CALL, "cudaMemcpyAsync", "NONE"),
        (CALL, "cudaMemcpy2DAsync", "NONE"),
        (CALL, "cuMemcpyDtoH_v2", "SYNCHRONISATION"),
        (CALL, "cuMemcpyHtoDAsync_v2", "NONE"),
        (CALL, "cudaStreamWaitEvent", "NONE"),
        (OP, "aten::_local_scalar_dense", "SYNCHRONISATION"),
        (OP, "aten::nonzero", "NONE"),
        (CALL, "cudaMalloc", "ALLOCATION"),
        (CALL, "cudaFreeHost", "ALLOCATION"),
        (CALL, "cudaFuncGetAttributes", "NONE"),
        (CALL, "cuMemCreate", "ALLOCATION"),
        (CALL, "cuMemsetD8Async", "NONE"),
        (CALL, "cuMemGetInfo_v2", "NONE"),
        (CALL, "cuModuleLoadData", "COMPILE"),
        (CALL, "cudaLaunchKernel", "NONE"),
        (RANGE, "entire_frame_compile (dynamo_timed)", "COMPILE"),
        (RANGE, "Torch-Compiled Region: 0/1", "NONE"),
        (OP, "TorchDynamo Cache Lookup", "NONE"),
        (FRAME, "torch/_dynamo/convert_frame.py(588): __call__", "COMPILE"),
        (FRAME, "torch/_dynamo/eval_frame.py(700): _fn", "NONE"),
        (FRAME, "<built-in function collect>", "GC"),
        (RANGE, "steadytorch.gc", "GC"),
        (OP, "Python GC", "GC"),
        (FRAME, "torch/profiler/profiler.py(811): step", "PROFILER"),
    ],
)
def test_what_an_event_tells(make, name, expected):
    read = syn.trace([make(name, 0, 100)])
    assert Evidence(evidence(read)[0]).name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Buffer Flush", "PROFILER"),
        ("Activity Buffer Request", "PROFILER"),
        ("Lazy Function Loading", "COMPILE"),
        ("Runtime Triggered Module Loading", "COMPILE"),
        ("Command Buffer Full", "NONE"),
    ],
)
def test_what_overhead_tells(name, expected):
    read = syn.trace([syn.overhead(name, 0, 100)])
    assert Evidence(evidence(read)[0]).name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Stream Sync", "SYNCHRONISATION"),
        ("Context Sync", "SYNCHRONISATION"),
        ("Stream Wait Event", "NONE"),
    ],
)
def test_only_synchronisations_that_hold_the_host_count(name, expected):
    read = syn.trace([syn.sync(name, 0, 100)])
    assert Evidence(evidence(read)[0]).name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Memcpy DtoH (Device -> Pageable)", "SYNCHRONISATION"),
        ("Memcpy HtoD (Pageable -> Device)", "SYNCHRONISATION"),
        ("Memcpy DtoH (Device -> Pinned)", "NONE"),
    ],
)
def test_a_call_that_copies_pageable_memory_waits(name, expected):
    read = syn.trace(
        [
            syn.runtime("cudaMemcpyAsync", 0, 100, correlation=1),
            syn.memcpy(name, 20, 90, correlation=1, size=1 << 20),
        ]
    )
    assert Evidence(evidence(read)[0]).name == expected


@pytest.mark.parametrize(
    ("direction", "size", "expected"),
    [
        ("HtoD (Pageable -> Device)", 64 << 10, "NONE"),
        ("HtoD (Pageable -> Device)", (64 << 10) + 1, "SYNCHRONISATION"),
        ("DtoH (Device -> Pageable)", 4, "SYNCHRONISATION"),
    ],
)
def test_small_pageable_copies_to_the_device_are_staged(direction, size, expected):
    read = syn.trace(
        [
            syn.runtime("cudaMemcpyAsync", 0, 100, correlation=1),
            syn.memcpy(f"Memcpy {direction}", 20, 90, correlation=1, size=size),
        ]
    )
    assert Evidence(evidence(read)[0]).name == expected


def test_a_name_counts_only_in_its_categories():
    read = syn.trace([syn.kernel("cudaMalloc", 0, 10), syn.op("cudaMalloc", 20, 30)])
    assert not evidence(read).any()
    assert by_name(read, (Category.CPU_OP,), "cudaM.*").tolist() == [1]
