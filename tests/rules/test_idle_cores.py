from __future__ import annotations

import pytest

from steadytorch.findings.watched_steps import Setting
from steadytorch.rules.idle_cores import rule

from ..findings.cases import MS, the, watched


def test_half_of_the_cores_or_less_is_reported_with_the_bound_of_the_gain():
    found = the(rule(watched(backward=10 * MS, setting=Setting(threads=1, cores=4))))
    assert found.title == "PyTorch runs 1 thread on 4 cores"
    assert found.recoverable_ns == (0, 15 * MS)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(threads=2, cores=3),
        Setting(threads=1, cores=1),
        Setting(device="cuda", threads=1, cores=16),
    ],
)
def test_more_is_not_and_neither_is_a_gpu(setting):
    assert rule(watched(setting=setting)) == ()
