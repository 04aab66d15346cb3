from __future__ import annotations

import os

import msgspec
import pytest
import torch

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.rates import device_rates
from steadytorch.rates.device_rates import measure_rates


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replace measurements by recorded ones; files go to the test's folder."""
    made = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def copy(device):
        made.append("copy")
        return 1e11

    def product(device, dtype):
        made.append(dtype)
        if dtype == "float64":
            raise UnsupportedError("cannot multiply torch.float64 matrices")
        return 1e12

    monkeypatch.setattr(device_rates, "copy_bandwidth", copy)
    monkeypatch.setattr(device_rates, "matrix_rate", product)
    return made


def _files(tmp_path):
    return sorted((tmp_path / "steadytorch" / "rates").iterdir())


def test_rates_are_measured(calls):
    found = measure_rates("cpu", ["float32", "bfloat16"])
    assert found.copy_bandwidth_bytes_per_s == 1e11
    assert found.matrix_flops_per_s == {"float32": 1e12, "bfloat16": 1e12}
    assert found.unknown == {}


@pytest.fixture
def thrice(monkeypatch):
    """Use fewer runs, so that tests are shorter."""
    monkeypatch.setattr(device_rates, "OCCASIONS", 3)


def test_they_are_measured_on_so_many_occasions(calls):
    found = [measure_rates("cpu", ["float32"]) for _ in range(device_rates.OCCASIONS + 2)]
    assert calls == ["copy", "float32"] * device_rates.OCCASIONS
    assert found[0] == found[-1]


def test_the_best_is_kept(calls, thrice, monkeypatch):
    measure_rates("cpu", ["float32"])
    for rate in (9e11, 3e12, 8e12):
        monkeypatch.setattr(device_rates, "matrix_rate", lambda device, dtype, rate=rate: rate)
        found = measure_rates("cpu", ["float32"])
    assert found.matrix_flops_per_s == {"float32": 3e12}


def test_another_type_is_measured_when_it_is_asked_for(calls, thrice):
    for _ in range(3):
        measure_rates("cpu", ["float32"])
    calls.clear()
    found = measure_rates("cpu", ["bfloat16"])
    assert calls == ["bfloat16"]
    assert found.matrix_flops_per_s.keys() == {"float32", "bfloat16"}


def test_what_cannot_be_measured_is_told_and_tried_again(calls):
    for _ in range(4):
        found = measure_rates("cpu", ["float64"])
    assert "cannot multiply" in found.unknown["float64"]
    assert calls.count("float64") == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"rates": {"device": 3}}',
        b'{"rates": {"device": "x", "copy_bandwidth_bytes_per_s": -1}}',
        b'{"rates": {"device": "x", "matrix_flops_per_s": {"float32": 1e300}}}',
        b"[" * 5000,
        b"x" * 200_000,
    ],
)
def test_a_broken_file_is_measured_anew(calls, tmp_path, content):
    first = measure_rates("cpu", ["float32"])
    (path,) = _files(tmp_path)
    path.write_bytes(content)
    assert measure_rates("cpu", ["float32"]) == first
    assert msgspec.json.decode(path.read_bytes())["rates"] == msgspec.to_builtins(first)


def test_a_link_is_not_followed(calls, tmp_path):
    measure_rates("cpu", ["float32"])
    (path,) = _files(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    measure_rates("cpu", ["float32"])
    assert not path.is_symlink()
    assert msgspec.json.decode(path.read_bytes())["occasions"]["copy"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_done_without(calls, tmp_path):
    tmp_path.chmod(0o500)
    assert measure_rates("cpu", ["float32"]).matrix_flops_per_s == {"float32": 1e12}


def test_a_file_in_place_of_the_folder_is_done_without(calls, tmp_path):
    (tmp_path / "steadytorch").write_text("")
    assert measure_rates("cpu", ["float32"]).matrix_flops_per_s == {"float32": 1e12}


def test_nothing_temporary_is_left_behind(calls, tmp_path):
    measure_rates("cpu", ["float32"])
    measure_rates("cpu", ["bfloat16"])
    assert [path.suffix for path in _files(tmp_path)] == [".json"]


def test_another_number_of_threads_is_another_file(calls, tmp_path, monkeypatch):
    measure_rates("cpu", ["float32"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    measure_rates("cpu", ["float32"])
    assert len(_files(tmp_path)) == 2


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [("9.0", ["float32", "tf32"]), ("7.0", ["float32"]), (None, ["float32"])],
)
def test_single_precision_brings_tf32_where_there_is_tf32(capability, wanted):
    facts = DeviceFacts(device="cuda", compute_capability=capability)
    assert device_rates.types_to_measure(facts, ["float32"]) == wanted


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("tf32", "tf32")])
def test_single_precision_is_measured_with_and_without_tf32(monkeypatch, dtype, precision):
    matmul = torch.backends.cuda.matmul
    before, seen = matmul.fp32_precision, []
    monkeypatch.setattr(
        device_rates,
        "matrix_rate",
        lambda device, dtype: seen.append((dtype, matmul.fp32_precision)) or 1,
    )
    device_rates.rate_of("cuda", dtype)
    assert seen == [("float32", precision)]
    assert matmul.fp32_precision == before


def test_a_wrong_type_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_rates, "copy_bandwidth", lambda device: 1e11)
    with pytest.raises(UsageError):
        measure_rates("cpu", ["int8"])
