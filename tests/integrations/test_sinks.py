from __future__ import annotations

import struct
import subprocess
import sys

import pytest
from msgspec.structs import replace

import steadytorch as steady
from steadytorch.errors import UsageError
from steadytorch.integrations.sinks import (
    figures,
    findings_text,
    to_mlflow,
    to_tensorboard,
    to_wandb,
)
from steadytorch.results.explain import Finding

MEASURED = steady.summarize([1_000_000 + 1000 * (i % 7) for i in range(1200)], "period")
FINDING = Finding(
    id="input-pipeline",
    source="host",
    title="Steps wait for data",
    evidence=("0.4 ms a step",),
    fix="Use more workers.",
    check="steady run",
    false_alarm="never",
)


def wandb_records(content):
    """The records of an offline run: a header, then a LevelDB log of blocks of 32 KiB."""
    whole, first, last = 1, 2, 4
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        part = content[at + 7 : at + 7 + length]
        parts = part if kind in (whole, first) else parts + part
        if kind in (whole, last):
            yield parts
        at += 7 + length


@pytest.fixture(scope="module")
def watched():
    with steady.watch(live=False) as seen:
        pass
    return replace(
        seen.result,
        measured=MEASURED,
        slices_ns={"forward": (600_000,) * 3, "input_wait": (400_000,) * 3},
        variance_shares={"forward": 0.25, "input_wait": 0.75},
        findings=(FINDING, replace(FINDING, id="gc-pause")),
    )


@pytest.fixture
def expected(watched):
    found = figures(watched)
    assert found["steady/median_ms"] == pytest.approx(1.003)
    assert found["steady/p99_over_median"] == pytest.approx(MEASURED.p99_over_median)
    assert found["steady/time_share/input_wait"] == pytest.approx(0.4)
    assert found["steady/variance_share/input_wait"] == 0.75
    return found


def test_figures_of_a_measurement_leave_out_what_samples_do_not_support():
    short = figures(steady.summarize([1_000_000, 1_100_000, 1_050_000]))
    assert "steady/p99_ms" not in short
    assert "steady/median_low_ms" not in short
    assert short["steady/samples"] == 3
    assert "steady/p99_ms" in figures(MEASURED)
    assert findings_text(MEASURED) == "no findings"


def test_findings_are_a_line_each_with_the_fix(watched):
    first, second = findings_text(watched).splitlines()
    assert first == "input-pipeline: Steps wait for data. Fix: Use more workers."
    assert second.startswith("gc-pause: ")


@pytest.mark.parametrize("wrong", [None, "result", 3.0])
def test_what_is_no_result_is_refused(wrong, watched):
    with pytest.raises(UsageError):
        figures(wrong)
    with pytest.raises(UsageError, match="no steps"):
        figures(replace(watched, measured=None))


def test_sinks_import_none_of_their_packages():
    code = "import steadytorch.integrations.sinks, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"tensorboard", "wandb", "mlflow", "torch"}.isdisjoint(run.stdout.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_files_hold_them(watched, expected, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed here")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(watched, writer, 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name, value in expected.items():
        (event,) = events.Scalars(name)
        assert (event.step, event.value) == (7, pytest.approx(value))
    (event,) = events.Tensors("steady/findings/text_summary")
    (text,) = event.tensor_proto.string_val
    assert text.decode().splitlines()[0] == f"- {findings_text(watched).splitlines()[0]}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_files_of_an_offline_run_of_wandb_hold_them(watched, expected, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed here")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="steady") as run:
        to_wandb(watched, run)
    wandb.teardown()  # waits until the file is written
    (file,) = tmp_path.rglob("*.wandb")
    logged, summary = {}, {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for items, found in ((record.history.item, logged), (record.summary.update, summary)):
            found |= {item.key or "/".join(item.nested_key): item.value_json for item in items}
    assert {name: float(logged[name]) for name in expected} == pytest.approx(expected)
    assert "Steps wait for data" in summary["steady/findings"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_files_of_mlflow_hold_them(watched, expected, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed here")

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    run_id = client.create_run(client.create_experiment("steady")).info.run_id
    to_mlflow(watched, client, run_id, 7)
    (folder,) = (path for path in tmp_path.rglob(run_id) if path.is_dir())
    for name, value in expected.items():
        _, written, step = (folder / "metrics" / name).read_text().split()[:3]
        assert (float(written), step) == (pytest.approx(value), "7")
    (text,) = folder.rglob("findings.txt")
    assert text.read_text() == findings_text(watched)
