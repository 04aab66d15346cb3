from __future__ import annotations

import msgspec
import pytest

from steadytorch.report.measure import headline, render_measure

from .conftest import HOSTILE, Screen
from .measured import DEVICE, HOST, MS, measured, process, series

COLLECTED = {100: "garbage collection", 200: "garbage collection"}
SLOW = {100: 9 * MS, 200: 9 * MS, 300: 5 * MS}
STATES = series(slow={i: 4 * MS for i in range(1000) if i // 100 % 2})


def _printed(result, name="resnet50", **options):
    screen = Screen(**options)
    render_measure(screen.console, name, result)
    screen.check_width()
    return screen


# -- the headline -------------------------------------------------------------------------------


def test_a_steady_series_reads_as_one_line():
    result = measured(median_ns=12.414e6, median_ci_ns=(12.382e6, 12.447e6))
    assert headline(result) == (
        "12.41 ms, 95 % within 12.38 to 12.45; no drift; p99 +0.2 %; no outliers in 1,000"
    )


def test_outliers_are_counted_by_their_cause_the_most_frequent_first():
    result = measured(process(series(slow=SLOW, causes=COLLECTED)))
    assert headline(result).endswith("3 outliers in 1,000: 2 garbage collection, 1 unattributed")


def test_one_outlier_is_singular():
    assert headline(measured(process(series(slow={5: 9 * MS})))).endswith(
        "1 outlier in 1,000: 1 unattributed"
    )


def test_few_samples_show_the_90th_percentile_and_why_there_is_no_interval():
    line = headline(measured(process(series(count=60))))
    assert "p90 +" in line
    assert "p99" not in line
    short = headline(measured(process(series(count=30))))
    assert short.count("too few samples (30 effective of 50 needed)") == 1


def test_what_is_not_steady_says_why_once():
    line = headline(measured(process(STATES)))
    assert "no interval; drift not excluded: " in line
    assert line.count("no steady state") == 1


def test_two_processes_say_what_an_interval_needs():
    line = headline(measured(process(), process(), median_ci_ns=None))
    assert "no interval: an interval over processes needs three of them" in line


def test_figures_share_the_unit_of_the_median():
    line = headline(measured(median_ns=0.9996e6, median_ci_ns=(0.9987e6, 1.0012e6)))
    assert line.startswith("999.6 us, 95 % within 998.7 to 1001.2;")


def test_too_few_samples_are_told_once():
    line = headline(measured(process(series(count=12))))
    assert line.count("too few samples") == 1
    assert "no interval: too few samples (12 effective of 50 needed)" in line
    assert "drift" not in line


def test_the_representative_is_the_process_in_the_middle():
    levels = (12.6e6, 12.1e6, 12.4e6)
    result = measured(*[process(series(level)) for level in levels])
    assert result.representative is result.processes[2]


# -- the whole ----------------------------------------------------------------------------------


def test_the_whole_fits_80_columns_with_its_pictures():
    screen = _printed(measured(process(series(slow=SLOW, causes=COLLECTED))))
    assert "over time, medians from" in screen.text
    assert "distribution" in screen.text
    assert "above █" not in screen.text
    rows = [line for line in screen.text.splitlines() if "█" in line]
    assert len(rows) >= 5
    assert "the probe adds 0.21 us (0.00%)" in screen.flat
    assert "3 garbage collections (7.00 ms), involuntary switches: 1,234" in screen.flat
    assert "set-up 1.3 s, 41 warm-up calls, peak memory 1.15 GiB" in screen.flat
    assert "claim: process" in screen.text
    assert "raise --budget" not in screen.text


def test_nothing_is_padded_where_output_is_kept_in_a_file():
    lines = _printed(measured()).text.splitlines()
    assert [line for line in lines if line.endswith("   ")] == []


def test_several_processes_are_listed_with_their_spread():
    three = [process(series(level)) for level in (12.1e6, 12.4e6, 12.6e6)]
    flat = _printed(measured(*three)).flat
    assert "3 processes: 12.10 ms, 12.40 ms, 12.60 ms; standard deviation 0.31 %" in flat
    assert "claim: machine" in flat


def test_a_process_that_ended_early_is_told_and_not_counted():
    cut = process(series(9e6, 30), complete=False)
    flat = _printed(measured(process(), cut)).flat
    assert "2 processes: 12.41 ms; 1 ended early, not counted" in flat
    assert "12.41 ms, " in flat.partition(";")[0]


def test_a_gpu_shows_latency_clock_and_power():
    shown = process(latency=series(15e6), device=DEVICE)
    flat = _printed(measured(shown)).flat
    assert "latency 15.00 ms, call to finished result" in flat
    assert "device: clock 1755 MHz, power 412 W, clock held by: power_cap" in flat


@pytest.mark.parametrize(("apart", "told"), [(-0.0009, False), (0.0012, True), (None, False)])
def test_clocks_that_disagree_are_told(apart, told):
    device = msgspec.structs.replace(DEVICE, clock_difference=apart)
    assert (
        "differ by +0.12 %: mistrust periods" in _printed(measured(process(device=device))).flat
    ) == told


def test_what_is_unknown_is_called_so():
    blind = type(DEVICE)(None, None, None, None)
    host = type(HOST)(1.0, 1.0, 0, 0, None, None, None, 0.0)
    flat = _printed(measured(process(device=blind, host=host))).flat
    assert "clock unknown, power unknown, clock held by: unknown" in flat
    assert "host: 0 garbage collections, involuntary switches: unknown" in flat


def test_warm_up_that_was_left_out_is_told():
    rising = series(slow={i: 6 * MS for i in range(60)})
    assert rising.warmup_dropped >= 60
    flat = _printed(measured(process(rising))).flat
    assert f"warm-up: the first {rising.warmup_dropped} samples, kept but not counted" in flat


def test_too_little_time_asks_for_more():
    assert "raise --budget" in _printed(measured(process(resolved=False))).flat


@pytest.mark.parametrize("how", [{"failed": "ValueError: no"}, {"interrupted": True}])
def test_what_was_cut_short_does_not_blame_the_budget(how):
    flat = _printed(measured(process(resolved=False), **how)).flat
    assert "raise --budget" not in flat
    assert ("ended early: ValueError: no" in flat) == ("failed" in how)


@pytest.mark.parametrize("width", [40, 80, 100])
def test_names_and_errors_of_others_are_neutralised(screen, width):
    shown = process(series(slow=SLOW, causes=dict.fromkeys(SLOW, HOSTILE)))
    printed = _printed(measured(shown, failed=HOSTILE), HOSTILE, width=width)
    assert "\x1b" not in printed.text
    assert "\x07" not in printed.text
    assert "[red]boo[/red]" in printed.text
    render_measure(screen.console, HOSTILE, measured(shown, failed=HOSTILE))


def test_a_quiet_console_shows_nothing():
    assert _printed(measured(), quiet=True).text == ""
