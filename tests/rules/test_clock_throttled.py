from __future__ import annotations

import numpy as np
import pytest

from steadytorch.device.recording import REASON_BITS
from steadytorch.findings.finding import Abstention, Case
from steadytorch.findings.samples import samples_of
from steadytorch.rules.clock_throttled import NAME, followed, rule

from ..findings.cases import MS, TICK, noise, op, the, timed, traced

CAPPED, HOT = REASON_BITS["power_cap"], REASON_BITS["hardware_thermal_slowdown"]
FAST, SLOW = 1900, 1710


def _capped(at):
    """Whether the clock is held: half a second in every two."""
    return (at // (500 * MS)) % 4 == 3


def _following(count=3000):
    """Samples that take as long as the clock of their time makes them."""
    times, at = noise(count, 6 * MS), 0.0
    for place in range(count):
        if _capped(int(at)):
            times[place] *= FAST / SLOW
        at += times[place]
    return times


@pytest.mark.parametrize("bit", [CAPPED, HOT])
def test_samples_that_follow_a_held_clock_are_found(bit):
    case = timed(
        _following(),
        sm_clock_mhz=lambda at: np.where(_capped(at), SLOW, FAST),
        clock_event_mask=lambda at: np.where(_capped(at), bit, 0),
    )
    found = the(rule(case))
    assert found.id == NAME
    assert found.variance_share > 0.8
    assert found.confidence == "high"
    assert ("heat" in found.title) == (bit == HOT)


def test_a_limit_that_holds_all_along_costs_time_and_makes_no_variance():
    case = timed(
        noise(1000),
        sm_clock_mhz=lambda at: np.where(at < 2 * TICK, FAST, SLOW),
        clock_event_mask=lambda at: np.full_like(at, CAPPED),
    )
    found = the(rule(case))
    assert found.confidence == "medium"
    assert found.cost_ns == pytest.approx(3 * MS * (1 - SLOW / FAST), rel=0.02)


@pytest.mark.parametrize("reason", ["gpu_idle", "clocks_setting", "sync_boost"])
def test_what_is_no_limit_of_power_or_heat_is_no_throttling(reason):
    case = timed(
        _following(),
        sm_clock_mhz=lambda at: np.where(_capped(at), SLOW, FAST),
        clock_event_mask=lambda at: np.full_like(at, REASON_BITS[reason]),
    )
    assert rule(case) == ()


def test_a_cap_that_samples_do_not_follow_is_not_blamed():
    case = timed(
        noise(3000, 6 * MS, 0.05),
        sm_clock_mhz=lambda at: np.where(_capped(at), SLOW, FAST),
        clock_event_mask=lambda at: np.where(_capped(at), CAPPED, 0),
    )
    assert rule(case) == ()


def _steps(count, seed=3):
    """A clock that a limit moves every 20 ms, as samples of 4 ms see it: MHz, shape (count,)."""
    rng = np.random.default_rng(seed)
    return np.repeat(rng.integers(1650, 1750, -(-count // 5)), 5)[:count].astype(float)


def _held(times, **known):
    return timed(
        times,
        clock_event_mask=lambda at: np.full_like(at, CAPPED),
        sm_clock_mhz=lambda at: np.full_like(at, 1700),
        **known,
    )


def test_a_clock_that_moves_between_readings_of_nvml_is_found_where_it_was_counted():
    clocks = _steps(700)
    times = noise(700, 4 * MS) * 1700 / clocks
    assert the(rule(_held(times))).variance_share is None
    found = the(rule(_held(times, clocks_mhz=clocks)))
    assert found.variance_share > 0.9
    assert found.confidence == "high"
    assert "the clock (counted over each sample) explains 9" in " ".join(found.evidence)
    # A few unknown clocks do not matter; with many unknown, no share is claimed.
    clocks[::15] = np.nan
    assert the(rule(_held(times, clocks_mhz=clocks))).variance_share > 0.9
    clocks[::5] = np.nan
    assert the(rule(_held(times, clocks_mhz=clocks))).variance_share is None


def test_a_counted_clock_that_moves_is_told_though_nvml_names_no_limit():
    clocks = _steps(700)
    times = noise(700, 4 * MS) * 1700 / clocks
    silent = {
        "clock_event_mask": lambda at: np.zeros_like(at),
        "sm_clock_mhz": lambda at: np.full_like(at, 1700),
    }
    found = the(rule(timed(times, clocks_mhz=clocks, **silent)))
    assert found.variance_share > 0.9
    assert found.confidence == "medium"
    assert found.title.startswith("the GPU clock moves, causing 9")
    assert "NVML reported no reason" in found.evidence[0]
    # A constant clock explains no variance.
    assert rule(timed(times, clocks_mhz=np.full(700, 1700.0), **silent)) == ()


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (None, "NVML's reason was not recorded"),
        (REASON_BITS["gpu_idle"], "NVML reported gpu_idle"),
        (REASON_BITS["clocks_setting"], "NVML reported clocks_setting"),
    ],
)
def test_a_counted_clock_that_moves_is_told_with_what_nvml_says_of_it(mask, said):
    clocks = _steps(700)
    times = noise(700, 4 * MS) * 1700 / clocks
    known = {"unknown": {"clock_event_mask": "not supported"}}
    if mask is not None:
        known = {"clock_event_mask": lambda at: np.full_like(at, mask)}
    found = the(rule(timed(times, clocks_mhz=clocks, **known)))
    assert found.variance_share > 0.9
    assert found.evidence[0].startswith(said)
    assert "cooling" not in found.fix.lower()


def test_a_limit_that_was_hardly_ever_seen_is_not_what_makes_the_variance():
    clocks = _steps(700)
    times = noise(700, 4 * MS) * 1700 / clocks
    once = {"clock_event_mask": lambda at: np.where(at < at[0] + 2 * TICK, CAPPED, 0)}
    found = the(rule(timed(times, clocks_mhz=clocks, **once)))
    assert found.title.startswith("the GPU clock moves")
    assert found.confidence == "medium"
    assert "NVML reported power_cap" in found.evidence[0]


def test_growth_at_a_clock_that_was_counted_and_rests_is_not_heat():
    times = noise(300) * np.geomspace(1, 4, 300)
    still = np.full(300, 1700.0)
    assert rule(timed(times, clocks_mhz=still, unknown={"clock_event_mask": "no"})) == ()


def test_clocks_stay_with_their_samples_where_a_warm_up_is_left_out():
    clocks = np.concatenate([np.full(200, 1200.0), _steps(700)])
    times = noise(900, 4 * MS) * 1700 / clocks
    times[:200] *= 3
    samples = samples_of(_held(times, clocks_mhz=clocks))
    assert 0 < len(samples.durations_ns) <= 700
    assert samples.clocks_mhz.tolist() == clocks[-len(samples.durations_ns) :].tolist()


def test_an_outlier_is_put_down_to_the_clock_that_was_counted_over_it():
    clocks = np.full(700, 1700.0)
    clocks[300:330] = 1400.0
    times = noise(700, 4 * MS) * 1700 / clocks
    found = the(rule(_held(times, clocks_mhz=clocks)))
    assert "30 outliers at a lower clock" in found.evidence


def test_where_too_little_was_counted_the_readings_of_nvml_stand_in():
    known = {
        "sm_clock_mhz": lambda at: np.where(_capped(at), SLOW, FAST),
        "clock_event_mask": lambda at: np.where(_capped(at), CAPPED, 0),
    }
    clocks = np.full(3000, float(FAST))
    clocks[::5] = np.nan
    found = the(rule(timed(_following(), clocks_mhz=clocks, **known)))
    assert found.variance_share > 0.8
    assert "(read periodically)" in " ".join(found.evidence)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "clock_at",
    [
        lambda t: 1980 - 18 * t,
        lambda t: 1800 + 180 * np.exp(-t / 3),
        lambda t: 1890 + 90 * np.sin(2 * np.pi * t / 3),
    ],
    ids=["ramp", "warming up", "slow wave"],
)
def test_a_clock_that_moves_slowly_is_found_too(clock_at, counted):
    rng = np.random.default_rng(0)
    begun = 4e-3 * np.arange(2500)
    clocks = clock_at(begun) * rng.normal(1, 3e-4, 2500)
    case = _held(noise(2500, 4 * MS, 0.003) * 1900 / clocks, clocks_mhz=clocks if counted else None)
    if not counted:
        case = timed(
            case.series.durations_ns,
            clock_event_mask=lambda at: np.full_like(at, CAPPED),
            sm_clock_mhz=lambda at: clock_at(at * 1e-9),
        )
    assert the(rule(case)).variance_share > 0.9


def test_a_clock_that_falls_seldom_and_far_is_found_and_one_that_hardly_moves_is_not():
    """Half compute-bound: an 8 % lower clock for 3 % of the samples gives a CV of 0.7 %."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        clocks = 1815 * rng.normal(1, 0.002, 600)
        clocks[500:518] *= 0.92
        quiet = noise(600, 1.6 * MS, 0.002)
        times = quiet * (1815 / clocks) ** 0.5
        assert followed(times, clocks) > 0.7
        assert followed(times[:500], clocks[:500]) == 0.0


@pytest.mark.parametrize("count", [120, 700])
def test_a_long_sample_that_met_a_lower_clock_is_not_put_down_to_it(count):
    """A clock that is 1 % lower cannot make a sample half as long again."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        clocks = 1700 * rng.normal(1, 2e-4, count)
        times = noise(count, 4 * MS, 0.001)
        times[count // 2] *= 1.5
        clocks[count // 2] *= 0.99
        # Other samples vary a little, so that the effect exceeds the minimum.
        times[::7] *= 1.02
        clocks[::7] *= 0.999
        assert followed(times, clocks) == 0.0


def test_clocks_or_samples_that_stand_still_follow_nothing():
    even, rising = np.full(100, 4.0 * MS), np.linspace(1600, 1900, 100)
    assert followed(even, rising) == followed(even, np.full(100, 1700.0)) == 0.0
    assert followed(4 * MS * 1700 / rising, rising) == pytest.approx(1.0)


def test_the_part_of_the_variance_that_the_clock_does_not_explain_is_not_given_to_it():
    clocks = _steps(2000)
    rest = noise(2000, 4 * MS, np.std(1700 / clocks))
    assert the(rule(_held(rest * 1700 / clocks, clocks_mhz=clocks))).variance_share == (
        pytest.approx(0.5, abs=0.1)
    )


def test_samples_and_clocks_that_wander_by_themselves_are_not_put_together():
    def wandering(seed):
        rng = np.random.default_rng(seed)
        walk = np.convolve(rng.standard_normal(900), np.ones(200) / 200, "valid")[:700]
        return (walk - walk.mean()) / walk.std()

    shares = [
        the(
            rule(
                _held(
                    4 * MS * (1 + 0.01 * wandering(seed)) * noise(700, 1, 0.001),
                    clocks_mhz=1700 * (1 - 0.01 * wandering(seed + 100)),
                )
            )
        ).variance_share
        for seed in range(40)
    ]
    assert sum(share is not None for share in shares) <= 1


def test_growth_without_a_known_clock_is_named_with_low_confidence():
    times = noise(300) * np.geomspace(1, 4, 300)
    found = the(rule(timed(times, unknown={"clock_event_mask": "not supported"})))
    assert found.confidence == "low"


def test_growth_on_a_cpu_is_growing_work_and_never_a_gpus_clock():
    times = noise(300) * np.geomspace(1, 4, 300)
    found = the(rule(timed(times, device="cpu", unknown={"clock_event_mask": "not a GPU"})))
    assert found.title.endswith(": the work may grow")
    assert found.fix.startswith("Look for work that grows")
    assert found.slices == ()
    told = " ".join((found.title, *found.evidence, found.fix, found.check, found.false_alarm))
    assert not {"nvidia-smi", "heat", "clock"} & set(told.replace("`", " ").split())


def test_growth_on_a_gpu_names_growing_work_before_the_clock():
    times = noise(300) * np.geomspace(1, 4, 300)
    found = the(rule(timed(times, unknown={"clock_event_mask": "not supported"})))
    assert "heat" not in found.title
    assert found.fix.startswith("Look for work that grows")
    assert "nvidia-smi" in found.check
    assert found.slices == ("gpu_kernel",)


def test_growth_at_an_even_clock_is_not_heat():
    case = timed(
        noise(300) * np.geomspace(1, 4, 300),
        sm_clock_mhz=lambda at: np.full_like(at, FAST),
        clock_event_mask=lambda at: np.zeros_like(at),
    )
    assert rule(case) == ()


def test_without_the_reasons_it_abstains():
    said = rule(timed(noise(100), unknown={"clock_event_mask": "no permission"}))
    assert isinstance(said, Abstention)
    assert "no permission" in said.why
    assert isinstance(rule(Case()), Abstention)
    assert isinstance(rule(traced([op("aten::mm", 0, 9)])), Abstention)
