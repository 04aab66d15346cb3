import pytest

from steadytorch.ledger.idle_owners import LAUNCH_LIMIT_NS
from steadytorch.ledger.ledger import build_ledger

from ..traces import synthetic as syn

MS = 1_000_000
OTHER = syn.PROCESS + 1
FIRST = syn.launch("gemm", call=(0, 10_000), gpu=(10_000, 20_000), correlation=1)


def late(at, **where):
    """A launch that returns at this time and runs at once."""
    return syn.launch("gemm", call=(at - 10_000, at), gpu=(at, at + 10_000), correlation=2, **where)


def idle(*events):
    """Owners of the idle time between `FIRST` and the next kernel: slice to ns and owner's name."""
    read = syn.trace(list(events))
    ledger = build_ledger(read)
    owned = ledger.owned
    found = {}
    for start, end, kind, row in zip(
        owned.start_ns, owned.end_ns, owned.slice, owned.row, strict=True
    ):
        if start >= 20_000:
            name = ledger.names[kind]
            length, owners = found.get(name, (0, []))
            owners = [*owners, read.name_of(row) if row >= 0 else None]
            found[name] = (length + int(end - start), sorted(set(owners), key=str))
    return found


def test_time_in_python_between_launches_is_launching():
    assert idle(*FIRST, *late(120_000)) == {"idle_launch": (100_000, ["cudaLaunchKernel"])}


def test_a_synchronisation_costs_only_what_the_gpu_is_idle():
    wait = syn.runtime("cudaStreamSynchronize", 12_000, 25_000)
    assert idle(*FIRST, wait, *late(120_000)) == {
        "idle_synchronisation": (5_000, ["cudaStreamSynchronize"]),
        "idle_launch": (95_000, ["cudaLaunchKernel"]),
    }


def test_waiting_for_a_launched_kernel_is_no_synchronisation():
    start = syn.launch("gemm", call=(40_000, 50_000), gpu=(80_000, 90_000), correlation=2)
    wait = syn.runtime("cudaStreamSynchronize", 50_000, 95_000)
    assert idle(*FIRST, *start, wait)["idle_launch"] == (60_000, ["cudaLaunchKernel", "gemm"])


@pytest.mark.parametrize(
    ("event", "slice_"),
    [
        (syn.annotation("enumerate(DataLoader)#x.__next__", 30_000, 60_000), "idle_data_wait"),
        (syn.annotation("_compile (dynamo_timed)", 30_000, 60_000), "idle_compile"),
        (syn.overhead("Lazy Function Loading", 30_000, 60_000), "idle_compile"),
        (syn.runtime("cudaMalloc", 30_000, 60_000), "idle_allocation"),
        (syn.annotation("steadytorch.gc", 30_000, 60_000), "idle_gc"),
        (syn.overhead("Buffer Flush", 30_000, 60_000), "idle_profiler"),
        (syn.op("aten::item", 30_000, 60_000), "idle_synchronisation"),
    ],
)
def test_a_reason_owns_the_time_it_lasts(event, slice_):
    found = idle(*FIRST, event, *late(120_000))
    assert found == {
        slice_: (30_000, [event.name]),
        "idle_launch": (70_000, ["cudaLaunchKernel"]),
    }


def test_the_input_pipeline_owns_what_happens_within_it():
    found = idle(
        *FIRST,
        syn.annotation("enumerate(DataLoader)#x.__next__", 30_000, 90_000),
        syn.runtime("cudaStreamSynchronize", 40_000, 50_000),
        syn.runtime("cudaHostAlloc", 50_000, 80_000),
        *late(120_000),
    )
    assert set(found) == {"idle_data_wait", "idle_launch"}


def test_the_profiler_and_the_collector_are_taken_out_of_the_input_pipeline():
    found = idle(
        *FIRST,
        syn.annotation("enumerate(DataLoader)#x.__next__", 30_000, 90_000),
        syn.overhead("Buffer Flush", 40_000, 50_000),
        syn.annotation("steadytorch.gc", 60_000, 80_000, thread=OTHER),
        *late(120_000),
    )
    assert found["idle_data_wait"][0] == 30_000
    assert found["idle_profiler"][0] == 10_000
    assert found["idle_gc"][0] == 20_000


def test_a_thread_at_work_is_not_excused_by_another_one():
    found = idle(
        *FIRST,
        syn.op("aten::linear", 20_000, 120_000),
        syn.runtime("cudaStreamSynchronize", 30_000, 60_000, thread=OTHER),
        *late(120_000),
    )
    assert set(found) == {"idle_launch"}


def test_a_thread_that_does_nothing_waits_for_what_holds_another():
    found = idle(
        *FIRST,
        syn.annotation("enumerate(DataLoader)#x.__next__", 30_000, 60_000, thread=OTHER),
        *late(120_000),
    )
    assert found["idle_data_wait"][0] == 30_000


def test_one_long_thing_is_not_launching_and_its_owner_is_named():
    busy = syn.op("aten::sort", 100_000, 100_000 + 2 * MS)
    found = idle(*FIRST, busy, *late(3 * MS))
    assert found["unknown"] == (2 * MS, ["aten::sort"])
    assert found["idle_launch"][0] == 3 * MS - 20_000 - 2 * MS


def test_many_short_things_are_launching_however_long():
    step = LAUNCH_LIMIT_NS // 2
    ops = [syn.op("aten::view", at, at + 1_000) for at in range(step, 10 * step, step)]
    found = idle(*FIRST, *ops, *late(10 * step))
    assert set(found) == {"idle_launch"}


def test_python_frames_name_what_is_unknown():
    frames = [
        syn.python("train.py(10): main", 0, 4 * MS),
        syn.python("train.py(3): decode_images", 100_000, 2 * MS),
    ]
    found = idle(*FIRST, *frames, *late(3 * MS))
    assert found["unknown"][1] == ["train.py(3): decode_images"]


def test_an_event_kept_long_in_the_queue_is_not_launching():
    held = syn.launch("gemm", call=(20_000, 30_000), gpu=(3 * MS, 4 * MS), correlation=2)
    assert idle(*FIRST, *held) == {
        "idle_launch": (10_000, ["cudaLaunchKernel"]),
        "unknown": (3 * MS - 30_000, ["gemm"]),
    }


def test_a_stream_that_was_made_to_wait_owns_its_wait():
    found = idle(
        *FIRST,
        syn.runtime("cudaStreamWaitEvent", 12_000, 13_000),
        *syn.launch("b", call=(14_000, 16_000), gpu=(25_000, 30_000), correlation=2, stream=20),
        *syn.launch("c", call=(17_000, 18_000), gpu=(33_000, 40_000), correlation=3),
    )
    assert found == {"idle_cross_stream": (5_000, ["b"]), "idle_launch": (3_000, ["c"])}


def _in_turn(start, *, device, correlation):
    """A kernel of 200 us that was launched long before it starts."""
    at = 1_000 * correlation
    return syn.launch(
        "gemm",
        call=(at, at + 500),
        gpu=(start, start + 200_000),
        correlation=correlation,
        device=device,
    )


def test_a_gpu_whose_work_is_queued_waits_for_the_gpu_that_works():
    turns = [_in_turn(20_000 + 200_000 * at, device=at % 2, correlation=at + 1) for at in range(5)]
    ledger = build_ledger(syn.trace([event for turn in turns for event in turn]), device=0)
    assert ledger.total("idle_cross_stream") == 400_000
    assert ledger.total("unknown") == 0


def test_a_gpu_whose_work_is_queued_waits_for_no_gpu_that_is_idle():
    events = [
        *_in_turn(20_000, device=0, correlation=1),
        *_in_turn(20_000, device=1, correlation=2),
        *_in_turn(320_000, device=0, correlation=3),
    ]
    ledger = build_ledger(syn.trace(events), device=0)
    assert ledger.total("idle_cross_stream") == 0


def test_the_start_of_the_next_kernel_is_no_wait_for_a_gpu_that_works_beside():
    events = [
        *_in_turn(20_000, device=0, correlation=1),
        *_in_turn(120_000, device=1, correlation=2),
        *_in_turn(222_000, device=0, correlation=3),
    ]
    ledger = build_ledger(syn.trace(events), device=0)
    assert ledger.total("idle_cross_stream") == 0


def test_a_gpu_without_launched_work_waits_for_the_host_while_another_works():
    events = [
        *_in_turn(20_000, device=0, correlation=1),
        *_in_turn(220_000, device=1, correlation=2),
        *syn.launch("gemm", call=(400_000, 419_000), gpu=(420_000, 620_000), correlation=3),
    ]
    ledger = build_ledger(syn.trace(events), device=0)
    assert ledger.total("idle_cross_stream") == 0


def test_gaps_within_a_graph_are_launching():
    graph = [syn.kernel("node", at, at + 8_000, correlation=1) for at in (22_000, 32_000)]
    assert idle(*FIRST, *graph)["idle_launch"] == (4_000, ["node"])


def test_without_anything_of_the_host_idle_time_is_unknown():
    kernels = [syn.kernel("a", 0, 20_000), syn.kernel("b", 50_000, 60_000)]
    assert idle(*kernels) == {"unknown": (30_000, [None])}


def test_without_recorded_calls_idle_time_under_an_operator_is_unknown():
    kernels = [syn.kernel("a", 0, 20_000), syn.kernel("b", 50_000, 60_000)]
    assert set(idle(*kernels, syn.op("aten::mm", 0, 60_000))) == {"unknown"}


def test_the_thread_of_the_next_launch_is_asked():
    found = idle(
        *FIRST,
        syn.op("forward", 20_000, 100_000),
        syn.runtime("cudaMalloc", 30_000, 60_000, thread=OTHER),
        *late(120_000, thread=OTHER),
    )
    assert found["idle_allocation"] == (30_000, ["cudaMalloc"])
