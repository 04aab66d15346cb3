from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

from steadytorch.compiled import artefact
from steadytorch.compiled.artefact import (
    EMPTY,
    Shelf,
    beside,
    held,
    lend,
    obtain,
    supplied,
    within,
)
from steadytorch.errors import UnsupportedError
from steadytorch.workload.workload import Workload

PARTS = {"weights": b"\x01\x02" * 500, "form": b"{}"}
LIBRARIES = {"engine": "1.0"}


def workload(bias: float = 0.0) -> Workload:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.bias, bias)
    return Workload(layer.eval(), torch.ones(1, 4))


class Making:
    """Converts by returning fixed parts, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, bytes]:
        self.count += 1
        return PARTS


def bytes_of(parts):
    return {name: bytes(part) for name, part in parts.items()}


def got(shelf, making, of=None, libraries=LIBRARIES, engine="openvino", **options):
    with supplied(shelf):
        return bytes_of(obtain(engine, libraries, of or workload(), making, **options))


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_without_a_shelf_it_is_made_each_time():
    making = Making()
    assert got(None, making) == got(None, making) == PARTS
    assert making.count == 2


def test_candidates_of_one_search_share_a_conversion(folder):
    making = Making()
    assert got(within(folder), making) == got(within(folder), making) == PARTS
    assert making.count == 1


def test_two_engines_have_an_artefact_each(folder):
    making = Making()
    got(within(folder), making)
    got(within(folder), making, engine="onnxruntime")
    assert making.count == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"of": workload(bias=1.0)}, "other weights or attributes"),
        ({"of": Workload(workload().model, torch.ones(2, 4))}, "other inputs"),
        ({"libraries": {"engine": "2.0"}}, "made by engine 1.0, here is 2.0"),
    ],
    ids=["weights", "shape", "version"],
)
def test_one_made_for_something_else_is_not_used(folder, changed, why, caplog):
    making = Making()
    got(within(folder), making)
    got(within(folder), making, **changed)
    assert making.count == 2
    assert why in caplog.text


def test_another_source_is_not_used(folder, monkeypatch, caplog):
    making = Making()
    got(within(folder), making)
    monkeypatch.setattr(artefact.model_digest, "changed_source", lambda sources: "models.resnet")
    got(within(folder), making)
    assert making.count == 2
    assert "another version of models.resnet" in caplog.text


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda c: c[:-3], lambda c: c + b"x", lambda c: b"", lambda c: b"\x00" * 99],
    ids=["flipped", "cut", "longer", "empty", "noise"],
)
def test_a_damaged_one_is_not_used_and_is_replaced(folder, damage, caplog):
    making = Making()
    got(within(folder), making)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert got(within(folder), making) == PARTS
    assert making.count == 2
    assert "converts again: its artefact" in caplog.text
    assert got(within(folder), making) == PARTS
    assert making.count == 2


def test_a_file_that_others_may_write_to_is_refused(folder, caplog):
    making = Making()
    got(within(folder), making)
    (path,) = folder.iterdir()
    path.chmod(0o622)
    got(Shelf(lambda engine: path, is_writable=False), making)
    assert making.count == 2
    assert "others may write to it" in caplog.text


def test_a_plan_serves_the_winners_artefact_and_never_writes_it(folder):
    making = Making()
    search, plans = folder / "search", folder / "plans"
    search.mkdir(mode=0o700)
    got(within(search), making)
    found = held(search, ("openvino",))
    assert found is not None
    for path in search.iterdir():  # the folder of a search is gone when its plan is stored
        path.unlink()
    plan = str(plans / "abc.json")
    found.keep_beside(plan)
    assert [path.name for path in plans.iterdir()] == ["abc.artefact"]
    assert got(beside(plan), making) == PARTS
    assert making.count == 1
    got(beside(plan), making, of=workload(bias=1.0))
    assert got(beside(plan), making) == PARTS
    assert making.count == 2


def test_a_lent_one_is_used_in_place_of_a_conversion(folder):
    making, plan, search = Making(), str(folder / "abc.json"), folder / "search"
    search.mkdir(mode=0o700)
    got(within(folder), making)
    (made,) = folder.glob("*.artefact")
    made.rename(folder / "abc.artefact")
    lend(plan, search, ("openvino",))
    assert got(within(search), making) == PARTS
    assert making.count == 1
    lend(None, search, ("onnxruntime",))
    lend(str(folder / "no_such.json"), search, ("onnxruntime",))
    assert [path.name for path in search.iterdir()] == ["openvino.artefact"]


def test_a_calibrated_one_is_made_by_a_search_only(folder):
    making = Making()
    assert got(within(folder), making, calibrated=True) == PARTS
    with pytest.raises(UnsupportedError, match="only a search calibrates int8"):
        got(EMPTY, making, calibrated=True)
    assert making.count == 1


def test_a_calibrated_one_with_a_flipped_bit_is_refused_and_a_search_makes_it_again(folder, caplog):
    making, (plan, path) = Making(), (str(folder / "abc.json"), folder / "abc.artefact")
    got(within(folder), making, calibrated=True)
    (made,) = folder.iterdir()
    made.write_bytes(flipped(made.read_bytes()))
    path.write_bytes(made.read_bytes())
    path.chmod(0o600)
    with pytest.raises(UnsupportedError, match=r"does not fit.*tune again"):
        got(beside(plan), making, calibrated=True)
    assert "is not served: its artefact was cut or altered" in caplog.text
    assert got(within(folder), making, calibrated=True) == PARTS
    assert making.count == 2


def test_a_winner_without_an_engine_has_none(folder):
    assert held(folder, ()) is None
    assert held(folder, ("openvino",)) is None
    assert beside(None) is None


def test_a_full_disk_costs_the_artefact_only(folder, caplog, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artefact, "write_whole", full)
    assert got(within(folder), Making()) == PARTS
    assert "No space left" in caplog.text


def test_a_model_that_cannot_be_compared_is_converted_without_one(folder, caplog):
    made = workload()
    made.model.register_forward_hook(lambda *given: None)
    with caplog.at_level(logging.DEBUG):
        assert got(within(folder), Making(), of=made) == PARTS
    assert not os.listdir(folder)
    assert "hook" in caplog.text
