"""Faults in real processes: never two outcomes, never a wait past the deadline plus 2 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fault_runs
import pytest

# A process of its own: pytest's has threads, which must not be forked.
RUN = """
import json, logging, pathlib, sys
sys.path.insert(0, sys.argv[1])
import torch
import fault_runs
logging.disable(logging.CRITICAL)
torch.set_num_threads(1)
scenario, size, seed, folder = sys.argv[2:]
found = fault_runs.run(scenario, int(size), int(seed), pathlib.Path(folder))
print(json.dumps(found))
"""


def run(scenario: str, size: int, seed: int, folder: Path) -> dict:
    scripts = Path(fault_runs.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", RUN, scripts, scenario, str(size), str(seed), folder],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CASES = [
    (name, size, seed) for size, seed in ((2, 0), (4, 1), (4, 2)) for name in fault_runs.SCENARIOS
]


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize(("scenario", "size", "seed"), CASES)
def test_a_fault_leaves_one_outcome_in_time(scenario, size, seed, tmp_path):
    found = run(scenario, size, seed, tmp_path)
    assert found["wrong"] == []
    assert len(found["outcomes"][0]) >= size - len(found["faults"])


@pytest.mark.parametrize(
    ("outcomes", "waits_s", "wrong"),
    [
        (("serve a", "untouched"), (0.1, 0.1), "several outcomes: ['serve a', 'untouched']"),
        (("serve a", "serve b"), (0.1, 0.1), "several outcomes: ['serve a', 'serve b']"),
        (("serve a", "serve a"), (0.1, 5.1), "a wait past the deadline"),
        (("serve a",), (0.1,), "no outcome of ranks [1]"),
        (("stopped", "stopped"), (0.1, 0.1), "stopped although the store was there"),
        (("untouched", "untouched"), (0.1, 0.1), "expected a plan"),
    ],
)
def test_the_check_of_a_run_sees_each_failure(outcomes, waits_s, wrong):
    setting = fault_runs.Setting(2, ("a", "a"))
    found = [
        {"rank": rank, "outcome": outcome, "waits_s": [wait]}
        for rank, (outcome, wait) in enumerate(zip(outcomes, waits_s, strict=True))
    ]
    assert wrong in fault_runs._wrong(setting, found, 0.0)
