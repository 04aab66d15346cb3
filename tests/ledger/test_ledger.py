import numpy as np
import pytest
from hypothesis import given

from steadytorch.ledger.ledger import SLICES, build_ledger, gpu_totals
from steadytorch.ledger.operator_slices import CPU_SLICES
from steadytorch.traces.events import Category
from steadytorch.traces.intervals import Spans, covered_ns, joined, subtract, union
from steadytorch.traces.steps import gpu_rows, launch_rows, step_marks

from ..traces import synthetic as syn
from ..traces.generated import traces
from ..traces.published import needs_published, oracle, trace

NAMES = (
    "kineto_v100_resnet50_workers0",
    "h100_bert_small",
    "h100_owlv2",
    "v100_resnet_ns_resolution",
    "a100_event_sync",
)


def check(read, ledger):
    """Slices add up to each step, and every idle ns has one owner."""
    for step in ledger.steps:
        assert list(step.slices) == list(ledger.names)
        assert sum(step.slices.values()) == step.total_ns
        assert min(step.slices.values()) >= 0
    owned = ledger.owned
    assert (owned.end_ns > owned.start_ns).all()
    assert (owned.start_ns[1:] >= owned.end_ns[:-1]).all()
    assert (owned.row >= -1).all()
    assert (owned.row < len(read.events)).all()
    start = np.array([step.start_ns for step in ledger.steps])
    end = np.array([step.end_ns for step in ledger.steps])
    assert (start[1:] >= end[:-1]).all()
    rows = gpu_rows(read, ledger.device)
    busy = union(read.events.start_ns[rows], read.events.end_ns[rows])
    idle = subtract(union(start, end), busy)
    mine = joined(Spans(owned.start_ns, owned.end_ns))
    assert mine.start.tolist() == idle.start.tolist()
    assert mine.end.tolist() == idle.end.tolist()
    assert int((owned.end_ns - owned.start_ns).sum()) == idle.total_ns
    on_gpu = [sum(n for s, n in step.slices.items() if s[:4] == "gpu_") for step in ledger.steps]
    assert on_gpu == covered_ns(busy, start, end).tolist()


@given(traces())
def test_slices_add_up_and_every_idle_ns_has_one_owner(events):
    read = syn.trace(events)
    ledger = build_ledger(read)
    check(read, ledger)
    assert ledger.names == (SLICES if len(read.on_gpu) else CPU_SLICES)


@given(traces(gpu=False))
def test_slices_of_a_trace_without_gpu_events_add_up(events):
    read = syn.trace(events)
    ledger = build_ledger(read)
    check(read, ledger)
    assert (ledger.kind, ledger.gpu, ledger.device) == ("cpu", None, -1)


def one_step(*events):
    ledger = build_ledger(syn.trace([syn.step(0, 0, 1_000), *events]))
    return {name: ns for name, ns in ledger.steps[0].slices.items() if ns}


def test_what_a_kernel_hides_counts_as_the_kernel():
    assert one_step(
        syn.kernel("gemm", 0, 400),
        syn.memcpy("Memcpy DtoH", 300, 600, stream=8),
        syn.memset(550, 700, stream=9),
        syn.kernel("ncclDevKernel_AllReduce", 100, 1_000, stream=10),
    ) == {"gpu_kernel": 400, "gpu_memcpy": 200, "gpu_memset": 100, "gpu_communication": 300}


def test_time_before_and_after_the_step_does_not_count():
    slices = one_step(syn.kernel("before", 0, 100), syn.kernel("after", 1_500, 9_000))
    assert slices["gpu_kernel"] == 100


def test_a_truncated_last_step_is_left_out():
    events, at = [], 0
    for index, count in enumerate([10, 10, 3]):
        start = at
        for _ in range(count):
            events += syn.launch("k", call=(at, at + 10), gpu=(at + 20, at + 90), correlation=at)
            at += 100
        events.append(syn.step(index, start, at))
    assert [step.index for step in build_ledger(syn.trace(events)).steps] == [0, 1]


def test_the_ledger_is_of_the_gpu_that_works_most_and_says_so():
    read = syn.trace(
        [
            syn.step(0, 0, 1_000),
            syn.kernel("a", 0, 100, device=0),
            syn.kernel("b", 0, 400, device=3),
        ]
    )
    ledger = build_ledger(read)
    assert ledger.device == 3
    assert ledger.total("gpu_kernel") == 400
    assert any("GPU 3" in note for note in ledger.notes)
    assert build_ledger(read, device=0).total("gpu_kernel") == 100


def test_a_trace_without_steps_is_one_and_says_so():
    ledger = build_ledger(syn.trace([syn.kernel("a", 0, 100), syn.op("aten::add", 50, 300)]))
    assert not ledger.marked
    assert [step.name for step in ledger.steps] == ["whole trace"]
    assert any("no step" in note for note in ledger.notes)


def test_a_trace_of_the_cpu_says_so():
    ledger = build_ledger(syn.trace([syn.step(0, 0, 100)]))
    assert any("no GPU events" in note for note in ledger.notes)


def test_owners_are_listed_by_what_they_cost():
    read = syn.trace(
        [
            syn.step(0, 0, 1_000),
            *syn.launch("a", call=(0, 10), gpu=(10, 20), correlation=1),
            syn.runtime("cudaMalloc", 100, 200),
            syn.runtime("cudaFree", 300, 600),
            *syn.launch("b", call=(700, 710), gpu=(710, 720), correlation=2),
        ]
    )
    ledger = build_ledger(read)
    rows, time = ledger.idle_of("idle_allocation")
    assert [read.name_of(row) for row in rows] == ["cudaFree", "cudaMalloc"]
    assert time.tolist() == [300, 100]
    assert ledger.total("idle_allocation") == 400
    assert ledger.mean("idle_allocation") == 400
    assert ledger.share("idle_allocation", "idle_launch") == 0.98
    assert ledger.idle_of("idle_gc")[0].tolist() == []


@needs_published
@pytest.mark.parametrize("name", NAMES)
def test_published_traces_add_up(name):
    check(trace(name), build_ledger(trace(name)))


@needs_published
@pytest.mark.parametrize("name", ["h100_bert_small", "h100_owlv2"])
def test_published_busy_idle_and_total(name):
    gpu = build_ledger(trace(name)).gpu
    ms = oracle(name)["ms"]
    found = (gpu.busy_ns / 1e6, gpu.idle_ns / 1e6, gpu.total_ns / 1e6)
    assert found == pytest.approx((ms["busy"], ms["idle"], ms["total"]), rel=1e-5)


@needs_published
@pytest.mark.parametrize("name", ["h100_bert_small", "h100_owlv2"])
def test_published_computation_and_exposed_copies(name):
    ledger, ms = build_ledger(trace(name)), oracle(name)["ms"]
    # The published computation time includes fills; ours keeps them apart.
    computed = ledger.total("gpu_kernel", "gpu_memset") / 1e6
    assert computed == pytest.approx(ms["computation"], rel=1e-5)
    assert ledger.total("gpu_memcpy") / 1e6 == pytest.approx(ms["exposed_memcpy"], rel=1e-5)


@needs_published
def test_published_totals_without_the_last_step():
    name = "v100_resnet_ns_resolution"
    read, wanted = trace(name), oracle(name)["hta_us"]
    rows = gpu_rows(read, 0)
    calls = launch_rows(read, rows)
    last = read.events.start_ns[step_marks(read)[-1]]
    rows = rows[(calls >= 0) & (read.events.start_ns[calls] <= last)]
    totals = gpu_totals(read, rows)
    assert totals.total_ns // 1000 == wanted["total"]
    # Those figures store microseconds since 1970 as floats, to a quarter of one, and round every
    # event inwards. Exactly, the GPU is idle for 6,453 us and not for 10,113.
    exactly = (read.events.start_ns[rows] + read.origin_ns).astype(np.longdouble) / 1000
    start = exactly.astype(np.float64)
    end = np.floor(start + (read.events.end_ns[rows] - read.events.start_ns[rows]) / 1000)
    start = np.ceil(start)
    kernels = read.events.category[rows] == Category.KERNEL
    busy, computing = _rounded(start, end), _rounded(start[kernels], end[kernels])
    assert totals.total_ns // 1000 - busy == wanted["idle"]
    assert (computing, busy - computing) == (wanted["compute"], wanted["non_compute"])
    assert totals.idle_ns == pytest.approx(6_453_000, rel=1e-3)


def _rounded(start, end):
    return union(start.astype(np.int64), end.astype(np.int64)).total_ns


@needs_published
def test_the_input_pipeline_owns_the_idle_time_that_calls_seem_to_own():
    read = trace("h100_owlv2")
    ledger = build_ledger(read)
    gpu = ledger.gpu
    first = read.events.start_ns[gpu_rows(read, 0)[0]]
    within = np.clip(ledger.owned.start_ns, first, first + gpu.total_ns)
    length = np.clip(ledger.owned.end_ns, first, first + gpu.total_ns) - within
    of = {name: int(length[ledger.owned.slice == i].sum()) for i, name in enumerate(SLICES)}
    assert of["idle_data_wait"] / 1e6 == pytest.approx(491, rel=1e-3)
    assert of["idle_synchronisation"] / 1e6 < 7.5
    assert ledger.share("idle_synchronisation") < 0.01


@needs_published
def test_a_small_model_waits_for_launches():
    ledger = build_ledger(trace("h100_bert_small"))
    assert ledger.share("idle_launch") > 0.9


@needs_published
def test_a_full_launch_queue_leaves_hardly_any_idle_time():
    ledger = build_ledger(trace("v100_resnet_ns_resolution"))
    assert len(ledger.steps) == 5
    assert ledger.share("gpu_kernel", "gpu_memcpy", "gpu_memset") > 0.97
