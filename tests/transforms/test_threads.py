from __future__ import annotations

import pytest
import torch

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.threads import Threads
from steadytorch.workload.workload import Workload


@pytest.fixture
def two_threads():
    found = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(found)


def variant(count: int) -> Threads:
    return Threads(Threads.Parameters(count))


@pytest.mark.usefixtures("two_threads")
def test_the_count_holds_during_a_call_only():
    with variant(1).applied(Workload(torch.get_num_threads, ())) as changed:
        assert changed.model() == 1
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_count_is_put_back_after_a_call_that_raises():
    def fails():
        raise ZeroDivisionError

    with variant(1).applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_variants_are_the_cores_half_of_them_and_one():
    facts = DeviceFacts(device="cpu", cores_physical=8, cores_logical=16)
    assert [p.count for p in Threads.variants(facts)] == [8, 4, 1]


@pytest.mark.usefixtures("two_threads")
def test_the_present_count_is_no_variant():
    facts = DeviceFacts(device="cpu", cores_physical=4, cores_logical=4)
    assert [p.count for p in Threads.variants(facts)] == [4, 1]


@pytest.mark.usefixtures("two_threads")
def test_it_applies_on_a_cpu_up_to_its_cores(cpu, conv_workload):
    assert variant(4).applies_to(conv_workload, cpu) == Applicable()
    assert variant(5).applies_to(conv_workload, cpu).reason == "5 threads exceed 4 logical cores"
    assert variant(2).applies_to(conv_workload, cpu).reason == "already on"


def test_a_workload_that_runs_on_a_gpu_is_refused(gpu, conv_workload):
    answer = variant(1).applies_to(conv_workload, gpu)
    assert answer.reason == "the workload does not run on the CPU"
