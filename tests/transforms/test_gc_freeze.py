from __future__ import annotations

import gc

import pytest

from steadytorch.transforms.gc_freeze import GcFreeze


@pytest.fixture(autouse=True)
def unfrozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_alive_is_frozen_until_leaving(conv_workload):
    with GcFreeze().applied(conv_workload) as changed:
        assert changed is conv_workload
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_it_is_undone_when_the_body_raises(conv_workload):
    with pytest.raises(ZeroDivisionError), GcFreeze().applied(conv_workload):
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_what_the_caller_had_frozen_stays_frozen(cpu, conv_workload):
    gc.freeze()
    assert GcFreeze().applies_to(conv_workload, cpu).reason == "already on"
    with GcFreeze().applied(conv_workload):
        pass
    assert gc.get_freeze_count() > 0
