"""Every finding has an example that provokes it and it alone, and its fix makes it go away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import steadytorch as steady
from steadytorch.rules import REGISTRY

from . import provoked

CROWDED = 0.05
"""Share of all cores' time. A quiet machine's own programs take less than one percent."""
SAMPLE = ("input-pipeline",)
DOCUMENT = Path(__file__).parents[2] / "docs" / "diagnosis.md"


@pytest.fixture(scope="module", autouse=True)
def of_one_thread(tmp_path_factory):
    """One thread, so that others on the machine change little; and rates are measured once."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


def huge_pages_by_itself() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[always]" in setting.read_text()


# -- completeness -------------------------------------------------------------------------------


def test_examples_are_of_the_findings_and_of_training():
    names = {path.stem.replace("_", "-") for path in provoked.EXAMPLES.glob("*.py")}
    assert {name for name in names if not name.startswith("train-")} == set(REGISTRY)
    shown = provoked.ON_CPU + provoked.ON_GPU + provoked.IN_SCRIPT + provoked.OF_RANKS
    assert sorted(shown) == sorted(REGISTRY)


@pytest.mark.parametrize("finding", REGISTRY)
def test_every_example_makes_a_slow_and_a_mended_workload(finding):
    module = provoked.module_of(finding)
    assert callable(module.slow)
    assert callable(module.mended)
    assert module.__doc__.startswith(f"Provokes {finding}")
    name = provoked.path_of(finding).name
    in_script = finding in provoked.IN_SCRIPT + provoked.OF_RANKS
    told = (
        f"steady run examples/{name} slow" if in_script else f"steady explain examples/{name}:slow"
    )
    assert told in module.__doc__


@pytest.mark.parametrize("finding", REGISTRY)
def test_every_finding_has_a_section_that_names_its_example(finding):
    _, found, rest = DOCUMENT.read_text().partition(f"\n### {finding}\n")
    assert found
    section = rest.partition("\n### ")[0]
    assert f"examples/{provoked.path_of(finding).name}" in section


# -- what they show -----------------------------------------------------------------------------


def _marked(finding):
    marks = [] if finding in provoked.OF_CODE else [pytest.mark.alone]
    marks += [] if finding in SAMPLE else [pytest.mark.slow]
    return pytest.param(finding, marks=marks)


each = pytest.mark.parametrize("finding", [_marked(finding) for finding in provoked.ON_CPU])


@pytest.fixture
def others():
    """Tells the share of all cores' time that others have had since the test began.

    Others are the system's other programs and, where Linux counts it, other virtual machines.
    """
    began, began_s = time.monotonic(), _of_others_s()

    def share():
        elapsed_s = psutil.cpu_count() * (time.monotonic() - began)
        return (_of_others_s() - began_s) / elapsed_s

    return share


def _of_others_s():
    of_all = psutil.cpu_times()
    busy_s = sum(getattr(of_all, name, 0.0) for name in ("user", "nice", "system", "steal"))
    return busy_s - sum(os.times()[:4])  # of this process, and of the workers that it has ended


def disturbed(finding, others):
    """Whether the machine itself, not the code under test, says that others had its cores."""
    return finding not in provoked.OF_CODE and others() > CROWDED


@each
def test_the_slow_workload_provokes_its_finding_alone(others, finding):
    if finding == "allocation-in-loop" and huge_pages_by_itself():
        pytest.skip("huge pages back all memory here, so that there are few faults to find")
    result = provoked.explained(finding, "slow", "cpu")
    as_expected = finding in provoked.ids(result) and not provoked.unexpected(finding, result)
    if not as_expected and finding != "cpu-contention" and disturbed(finding, others):
        pytest.skip(f"other programs had {others():.0%} of the cores")
    assert as_expected, provoked.format_findings(result)


@each
def test_the_mended_workload_does_not_have_it(others, finding):
    result = provoked.explained(finding, "mended", "cpu")
    as_expected = finding not in provoked.ids(result)
    if not as_expected and disturbed(finding, others):
        pytest.skip(f"other programs had {others():.0%} of the cores")
    assert as_expected, provoked.format_findings(result)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("finding", provoked.IN_SCRIPT)
def test_the_slow_script_provokes_its_finding_and_the_mended_does_not(others, finding):
    module, found = provoked.module_of(finding), []
    for which in (module.slow, module.mended):
        with steady.watch() as seen:
            which()
        found.append(finding in [each.id for each in seen.result.findings])
    if found != [True, False] and others() > CROWDED:
        pytest.skip(f"other programs had {others():.0%} of the cores")
    assert found == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("finding", provoked.OF_RANKS)
def test_the_slow_job_provokes_its_finding_and_the_mended_does_not(finding, tmp_path):
    found = []
    for which in ("slow", "mended"):
        result = tmp_path / f"{which}.json"
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        steady_run = (sys.executable, "-m", "steadytorch", "run", "--quiet", "--json", result)
        subprocess.run(
            [*torchrun, "--no-python", "--nproc-per-node=2", *steady_run,
             provoked.path_of(finding), which],
            check=True, timeout=240,
        )  # fmt: skip
        document = json.loads(result.read_bytes())
        assert sorted(document["ranks"]) == ["0", "1"]
        found.append([each["title"] for each in document["findings"] if each["id"] == finding])
    assert found[0][0].startswith("rank 1 is late by ")
    assert found[1] == []
