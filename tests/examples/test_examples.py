"""Every finding has an example that provokes it and it alone, and its fix makes it go away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest
import torch

from steadytorch.rules import REGISTRY

from . import provoked

pytestmark = pytest.mark.alone

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


def test_examples_are_of_the_findings_and_of_nothing_else():
    assert {path.stem.replace("_", "-") for path in provoked.EXAMPLES.glob("*.py")} == set(REGISTRY)
    assert sorted(provoked.ON_CPU + provoked.ON_GPU) == sorted(REGISTRY)


@pytest.mark.parametrize("finding", REGISTRY)
def test_every_example_makes_a_slow_and_a_mended_workload(finding):
    module = provoked.module_of(finding)
    assert callable(module.slow)
    assert callable(module.mended)
    assert module.__doc__.startswith(f"Provokes {finding}")
    assert f"steady explain examples/{provoked.path_of(finding).name}:slow" in module.__doc__


@pytest.mark.parametrize("finding", REGISTRY)
def test_every_finding_has_a_section_that_names_its_example(finding):
    _, found, rest = DOCUMENT.read_text().partition(f"\n### {finding}\n")
    assert found
    section = rest.partition("\n### ")[0]
    assert f"examples/{provoked.path_of(finding).name}" in section


# -- what they show -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explained(of_one_thread):
    """Explains an example; those of code were, two at a time, before any whose times count."""
    with ThreadPoolExecutor(2) as pool:
        done = {
            (finding, factory): pool.submit(provoked.explained, finding, factory, "cpu")
            for finding in sorted(provoked.OF_CODE)
            for factory in ("slow", "mended")
        }
        wait(done.values())

        def explain(finding, factory):
            if (finding, factory) in done:
                return done[finding, factory].result()
            return provoked.explained(finding, factory, "cpu")

        yield explain


@pytest.fixture
def counted_s():
    """Tells the seconds of all cores that Linux counts as stolen since the test began."""
    began = psutil.cpu_times()
    return lambda: getattr(psutil.cpu_times(), "steal", 0.0) - getattr(began, "steal", 0.0)


def as_expected(finding, result, expected):
    """Skips where others had the cores, and the outcome is one that this brings about."""
    sensitive = finding in provoked.OF_RATIOS or finding == "cpu-contention"
    if (finding in provoked.ids(result)) != expected and sensitive and provoked.contended(result):
        pytest.skip("other programs keep this machine busy, and `cpu-contention` says so")
    return (finding in provoked.ids(result)) == expected


@pytest.mark.parametrize("finding", provoked.ON_CPU)
def test_the_slow_workload_provokes_its_finding_alone(explained, finding):
    if finding == "allocation-in-loop" and huge_pages_by_itself():
        pytest.skip("huge pages back all memory here, so that there are few faults to find")
    result = explained(finding, "slow")
    assert as_expected(finding, result, True), provoked.told(result)
    assert not provoked.unexpected(finding, result), provoked.told(result)


@pytest.mark.parametrize("finding", provoked.ON_CPU)
def test_the_mended_workload_does_not_have_it(explained, counted_s, finding):
    result = explained(finding, "mended")
    if finding == "cpu-contention":
        stolen_s = provoked.stolen_s(result, result.environment.cores_logical)
        if stolen_s is not None and stolen_s <= counted_s():
            pytest.skip("other virtual machines took as much of the cores as it says")
    assert as_expected(finding, result, False), provoked.told(result)
