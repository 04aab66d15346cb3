import pytest
from hypothesis import given

from steadytorch.ledger.conditions import Conditions
from steadytorch.ledger.ledger import build_ledger
from steadytorch.ledger.variability import variance_shares

from ..traces import synthetic as syn
from ..traces.generated import traces
from ..traces.published import needs_published, trace

US = 1_000


def run(*steps, conditions=()):
    """Steps given as lists of (name, offset in us, length in us) for kernels, None for a gap."""
    events, at, correlation = [], 0, 0
    for number, (length, kernels) in enumerate(steps):
        events.append(syn.step(number, at, at + length * US))
        for name, offset, lasts in kernels:
            begin = at + offset * US
            correlation += 1
            if name.startswith("cuda"):
                events.append(syn.runtime(name, begin, begin + lasts * US))
            else:
                events += syn.launch(
                    name,
                    call=(begin - US, begin),
                    gpu=(begin, begin + lasts * US),
                    correlation=correlation,
                )
        at += length * US
    read = syn.trace(events)
    return variance_shares(read, build_ledger(read), conditions)


def plain(gemm=50, length=100):
    return length, [("gemm", 10, gemm), ("add", 80 + length - 100, 10)]


def test_fewer_than_three_steps_have_no_variance():
    found = run(plain(), plain(60))
    assert found.shares is None
    assert found.kernels is None
    assert "2 steps" in found.reason


def test_one_step_is_written_as_one():
    found = run(plain())
    assert found.reason.startswith("1 step: variance shares need")


def test_equal_steps_have_no_variance():
    found = run(plain(), plain(), plain())
    assert (found.shares, found.kernels, found.slowest) == (None, None, ())
    assert "same time" in found.reason


@given(traces())
def test_shares_add_up_to_one(events):
    read = syn.trace(events)
    ledger = build_ledger(read)
    found = variance_shares(read, ledger)
    assert (found.shares is None) == (found.reason is not None)
    if found.shares is None:
        assert len(ledger.steps) < 3 or len({step.total_ns for step in ledger.steps}) == 1
        return
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-9)
    if found.kernels is not None:
        split = found.kernels.more_kernels + found.kernels.same_kernels_slower
        assert split == pytest.approx(found.shares["gpu_kernel"], abs=1e-9)


def test_the_same_kernels_taking_longer():
    found = run(plain(), plain(), plain(), plain(80, length=130))
    assert found.shares["gpu_kernel"] == pytest.approx(1)
    assert found.kernels.same_kernels_slower == pytest.approx(1)
    assert found.kernels.more_kernels == pytest.approx(0, abs=1e-12)
    slow = found.slowest[0]
    assert (slow.index, slow.name, slow.over_median_ns) == (3, "ProfilerStep#3", 30 * US)
    assert slow.what == (
        "gpu_kernel: the same kernels took 0.030 ms longer (50.0 %); mostly gemm, 0.030 ms",
    )


def test_more_kernels():
    more = (130, [("gemm", 10, 50), ("add", 60, 10), ("resize", 70, 30), ("add", 110, 10)])
    usual = (100, [("gemm", 10, 50), ("add", 60, 10), ("add", 80, 10)])
    found = run(usual, usual, usual, more)
    assert found.kernels.more_kernels == pytest.approx(1)
    assert found.slowest[0].what == (
        "gpu_kernel: +1 kernels, 0.030 ms more; mostly resize, 0.030 ms",
    )


def test_a_slow_step_names_the_event_that_held_it():
    length, kernels = plain(length=400)
    held = (length, [*kernels, ("cudaMalloc", 70, 250)])
    found = run(plain(), plain(), plain(), held)
    assert found.shares["idle_allocation"] > 0.8
    assert found.slowest[0].what[0] == (
        "idle_allocation 0.250 ms, usually 0.000 ms (mostly cudaMalloc, 0.250 ms)"
    )


def test_only_slow_steps_are_named_the_slowest_first():
    found = run(plain(), plain(), plain(), plain(60, 110), plain(80, 130), plain())
    assert [slow.index for slow in found.slowest] == [4, 3]


def test_a_slow_step_names_the_conditions_that_differ():
    usual = Conditions(sm_clock_mhz=1980.0)
    held = Conditions(sm_clock_mhz=1500.0, reasons=("power_cap",))
    found = run(plain(), plain(), plain(), plain(80, 130), conditions=(usual, usual, usual, held))
    assert found.slowest[0].what[-1] == (
        "SM clock 1,500 MHz, usually 1,980 MHz (held by power_cap)"
    )


@needs_published
def test_the_input_pipeline_makes_a_published_trace_unsteady():
    read = trace("kineto_v100_resnet50_workers0")
    found = variance_shares(read, build_ledger(read))
    assert max(found.shares, key=lambda name: found.shares[name]) == "idle_data_wait"
    assert found.slowest[0].name == "ProfilerStep#5"
    assert "DataLoader" in found.slowest[0].what[0]
