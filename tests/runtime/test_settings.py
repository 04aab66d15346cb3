from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from steadytorch import transforms
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import settings
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms.tf32 import Tf32
from steadytorch.transforms.threads import Threads

from .conftest import always

DETERMINISTIC = (TransformSpec("cudnn_deterministic"),)
LIMITED = (TransformSpec("cudnn_benchmark", (("limit", 10),)),)
LOGS = WeakKeyDictionary()  # not searched: a log would count as state of the models


class Meeting(nn.Module):
    """Records the flags before and after the other thread could run."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        LOGS[self.layer] = []

    def forward(self, x):
        flags = torch.backends.cudnn
        before = flags.deterministic, flags.benchmark
        time.sleep(0.05)
        LOGS[self.layer].append((before, (flags.deterministic, flags.benchmark)))
        return self.layer(x)


def _served(candidate):
    model = Meeting().eval()
    log = LOGS[model.layer]
    tuned = TunedModule(model, always(candidate))
    tuned(torch.ones(1, 4))
    log.clear()
    return tuned, log


@pytest.fixture
def ambient():
    before = transforms.ambient()
    yield
    assert transforms.ambient() == before
    assert settings.needed.alive == 0


def test_calls_that_set_flags_differently_do_not_see_each_others(ambient):
    served = [_served(DETERMINISTIC), _served(LIMITED), _served((TransformSpec("inference_mode"),))]
    faults = []

    def work(tuned):
        try:
            for _ in range(3):
                tuned(torch.ones(1, 4))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(tuned,)) for tuned, _ in served]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    expected = [(True, False), (False, True), (False, False)]
    for (tuned, log), flags in zip(served, expected, strict=True):
        assert tuned.report().calls == {"tuned": 4}
        assert log == [(flags, flags)] * 3
        tuned.close()


def test_untouched_calls_take_their_turn_too(ambient):
    flagged, _ = _served(DETERMINISTIC)
    plain, log = _served(())
    thread = threading.Thread(target=flagged, args=(torch.ones(1, 4),))
    thread.start()
    plain(torch.ones(1, 4))
    thread.join()
    flagged.close()
    assert log == [((False, False), (False, False))]


def test_a_model_that_holds_a_tuned_one_does_not_wait_for_itself(ambient):
    inner = TunedModule(nn.Linear(4, 4).eval(), always(DETERMINISTIC))

    class Outer(nn.Module):
        def forward(self, x):
            return inner(x)

    outer = TunedModule(Outer().eval(), always(LIMITED))
    for _ in range(2):
        outer(torch.ones(1, 4))
    assert outer.report().calls == inner.report().calls == {"tuned": 2}
    outer.close()
    inner.close()


@pytest.mark.parametrize(
    ("candidate", "alive"),
    [(DETERMINISTIC, 1), ((TransformSpec("inference_mode"),), 0), (LIMITED * 1, 1)],
)
def test_only_flags_of_the_process_need_turns(ambient, candidate, alive):
    tuned, _ = _served(candidate)
    assert settings.needed.alive == alive
    tuned.close()


def test_threads_are_a_setting_of_the_thread():
    assert not Threads.process_wide
    assert Tf32.process_wide
