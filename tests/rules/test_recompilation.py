from __future__ import annotations

import numpy as np

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.recompilation import NAME, rule

from ..findings.cases import MS, US, launch, never, noise, op, step, the, timed, traced


def _steps(compiling=(), regions=("0/0",) * 4, marked=True):
    events = []
    for k, region in enumerate(regions):
        at = 100 * k * MS
        if marked:
            events.append(step(k + 3, at, at + 100 * MS))
        if k in compiling:
            events.append(op("_compile.compile_inner (dynamo_timed)", at + US, at + 80 * MS))
            events.append(op("build_guards (dynamo_timed)", at + 50 * MS, at + 60 * MS))
        events.append(op(f"Torch-Compiled Region: {region}", at + 81 * MS, at + 99 * MS))
        call = (at + 90 * MS, at + 90 * MS + 5 * US)
        gpu = (at + 90 * MS + 9 * US, at + 100 * MS)
        events += launch("triton_k", call=call, gpu=gpu, correlation=k + 1)
    return events


def test_compiling_in_steady_steps_is_found():
    found = the(rule(traced(_steps(compiling=(1, 2)))))
    assert found.id == NAME
    assert abs(found.cost_ns - 2 / 3 * 80 * MS) < MS
    assert 0.9 * found.cost_ns < found.recoverable_ns[1] <= found.cost_ns
    assert found.slices == ("idle_compile",)


def test_a_region_compiled_anew_is_named():
    found = the(rule(traced(_steps(compiling=(2,), regions=("0/0", "0/0", "0/1", "0/1")))))
    assert any("0/1" in line for line in found.evidence)


def test_regions_compiled_beforehand_may_take_turns():
    """As with buckets: several compiled sizes, and no further compilation."""
    assert rule(traced(_steps(regions=("0/0", "0/1", "0/0", "0/1")))) == ()


def test_timing_of_tritons_configurations_is_another_finding():
    timing = op("CachingAutotuner.benchmark_all_configs (dynamo_timed)", 150 * MS, 160 * MS)
    assert rule(traced([*_steps(), timing])) == ()


def test_another_function_that_runs_later_is_no_recompilation():
    assert rule(traced(_steps(regions=("0/0", "0/0", "1/0", "1/0")))) == ()


def test_compiling_in_the_first_step_alone_is_warming_up():
    assert rule(traced(_steps(compiling=(0,)))) == ()


def test_without_marks_early_compiling_may_be_the_warm_up():
    assert isinstance(rule(traced(_steps(compiling=(0,), marked=False))), Abstention)


def test_frames_compiled_while_samples_are_taken_are_found():
    times = noise(600)
    places = [200, 300, 400, 500]
    times[places] += 50 * MS
    ends = np.cumsum(times)[places]
    case = timed(times, compilations=lambda at: np.searchsorted(ends, at, side="right"))
    found = the(rule(case))
    assert found.variance_share > 0.9
    assert abs(found.recoverable_ns[1] - 4 * 50 * MS / 600) < 0.1 * MS
    assert found.slices == ()


def test_a_compiled_program_that_keeps_its_code_is_left_alone():
    assert rule(traced(_steps())) == ()
    assert rule(timed(noise(300), compilations=never)) == ()


def test_with_nothing_recorded_it_abstains():
    assert isinstance(rule(Case()), Abstention)
    assert isinstance(rule(timed(noise(50))), Abstention)
