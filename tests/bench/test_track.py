"""Series of saved results, and changes in them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from steadytorch.bench.track import track, track_files
from steadytorch.errors import UsageError
from steadytorch.results.compare import Interval
from steadytorch.results.gate import GateResult, GateRow, Revision
from steadytorch.results.machine import DeviceFacts
from steadytorch.results.saved import to_json

FACTS = DeviceFacts(device="cpu", name="AMD EPYC", cores_logical=2)
STEP = [0.0] * 30 + [0.02] * 8


def gated(number, effect, base="b" * 40, time=1e6, status="judged", changed=0):
    row = GateRow(
        workload="net",
        status=status,
        verdict="tie" if status == "judged" else None,
        interval=Interval(effect, effect - 0.005, effect + 0.005) if status == "judged" else None,
        head_median_ns=time,
    )
    return GateResult(
        base=Revision("main", base),
        head=Revision("working tree", f"{number:040x}", changed),
        threshold=0.01,
        familywise_alpha=0.01,
        metric="latency",
        rows=(row,),
        gate_failed=False,
    )


@pytest.fixture
def save(tmp_path):
    """Writes results one day apart."""

    def save(*results, facts=FACTS, prefix="r"):
        for number, result in enumerate(results):
            document = json.loads(to_json(result, "net", facts))
            document["created"] = f"2026-{1 + number // 28:02d}-{1 + number % 28:02d}T00:00:00"
            # Names in another order than the times.
            (tmp_path / f"{prefix}{99 - number}.json").write_text(json.dumps(document))
        return tmp_path

    return save


def noise(count, seed=0):
    return 0.002 * np.random.default_rng(seed).standard_normal(count)


def test_gates_against_one_base_make_a_series_of_ratios(save):
    effects = STEP + noise(len(STEP))
    # The machine slows down by half meanwhile.
    times = np.linspace(1e6, 1.5e6, len(STEP))
    pairs = enumerate(zip(effects.tolist(), times.tolist(), strict=True))
    folder = save(*[gated(i, effect, time=time) for i, (effect, time) in pairs])
    (series,) = track([folder]).series
    assert (series.unit, series.base) == ("ratio", "b" * 12)
    assert series.machine == "cpu, AMD EPYC, 2 logical cores"
    assert [point.value for point in series.points] == pytest.approx(1 + effects)
    assert series.points[0].low == pytest.approx(series.points[0].value - 0.005)
    (change,) = series.changes
    assert abs(change.index - 30) <= 1
    assert change.found <= 34
    assert change.effect.low < 0.02 < change.effect.high


def test_gates_against_several_bases_make_a_series_of_times(save):
    times = 1e6 * np.exp(STEP + noise(len(STEP)))
    folder = save(*[gated(i, 0.0, f"{i:040x}", float(t)) for i, t in enumerate(times)])
    (series,) = track([folder]).series
    assert (series.unit, series.base) == ("ns", "")
    assert len(series.changes) == 1


def test_points_are_named_by_commit_with_a_mark_for_changes(save):
    folder = save(gated(0xABC << 148, 0.0), gated(1, 0.0, changed=3))
    labels = [point.label for point in track([folder]).series[0].points]
    assert labels == ["abc00000", "00000000+"]


def test_workloads_without_a_verdict_make_no_point(save):
    folder = save(gated(0, 0.0), gated(1, 0.0, status="failed"))
    assert len(track([folder]).series[0].points) == 1


def test_machines_are_kept_apart(save):
    save(gated(0, 0.0))
    folder = save(gated(1, 0.0), facts=DeviceFacts(device="cuda", name="NVIDIA H200"), prefix="g")
    found, facts = track_files([folder])
    assert [series.machine[:4] for series in found.series] == ["cpu,", "cuda"]
    assert facts.name in ("AMD EPYC", "NVIDIA H200")


def test_a_file_that_is_given_twice_counts_once(save):
    folder = save(gated(0, 0.0))
    assert len(track([folder, folder / "r99.json"]).series[0].points) == 1


def test_other_files_of_a_folder_are_left_out_and_told(save, tmp_path):
    folder = save(gated(0, 0.0))
    (tmp_path / "other.json").write_text("{}")
    (note,) = track([folder]).notes
    assert note.startswith(f"left out: {tmp_path}/other.json is not a saved result")


@pytest.mark.parametrize("text", ["{}", "no", '{"schema": 1, "kind": "tune"}', None])
def test_a_named_file_must_be_a_result(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"x\.json"):
        track([path])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no result of steady gate or steady measure found"):
        track([tmp_path])
