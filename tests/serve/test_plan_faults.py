from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from steadytorch.errors import PlanError
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import load_plan

from .plans import reason_untouched, sealed, write

# -- what is no path ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [5, None, "", b"plan.json"])
def test_invalid_paths_are_refused_in_one_line(path):
    with pytest.raises(PlanError, match=r"^load_plan takes the path of a plan file, got .*$"):
        load_plan(path)


# -- files that lie -----------------------------------------------------------------------------

UNKNOWN = [
    ({"name": "run_a_command", "parameters": []}, "unknown transform"),
    ({"name": "__import__", "parameters": [["name", "os"]]}, "unknown transform"),
    ({"name": "channels_last", "parameters": [["command", "rm"]]}, "command"),
    ({"name": "compile", "parameters": [["mode", "worst"]]}, "worst"),
    ({"name": "compile", "parameters": [["backend", "os:system"]]}, "backend"),
    ({"name": "cast_weights", "parameters": [["dtype", 16]]}, "dtype"),
    ({"name": "threads", "parameters": [["count", 10**9]]}, "count"),
    ({"name": "threads", "parameters": [["count", True]]}, "count"),
]


@pytest.mark.parametrize("spec", [s for s, _ in UNKNOWN], ids=lambda s: str(s)[:60])
def test_a_transform_from_nowhere_loads_as_data_and_leaves_the_model_untouched(
    plan, model, x, spec, tmp_path, caplog
):
    liar = replace(plan, candidate=(msgspec.convert(spec, TransformSpec),))
    tuned = load_plan(write(tmp_path, liar)).apply(model)
    said = reason_untouched(tuned, model, x)
    assert said.startswith("a plan could not be checked against this environment: ")
    assert dict((str(s), h) for s, h in UNKNOWN)[str(spec)] in said
    assert said in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidate", "channels_last"),
        ("candidate", [{"name": 3}]),
        ("candidate", [{"name": "threads", "parameters": [["count", 1.5]]}]),
        ("candidate", [{"name": "threads", "parameters": [["count", [1]]]}]),
        ("candidate", [{"name": "threads", "parameters": {"count": 1}}]),
        ("candidate", None),
        ("signature", None),
        ("signature", {"leaves": [{"path": 0}], "structure": ""}),
        ("evidence", {}),
        ("key", {}),
        ("name", None),
    ],
    ids=str,
)
def test_a_field_of_a_wrong_type_is_refused(plan, tmp_path, field, value):
    payload = {**msgspec.to_builtins(plan), field: value}
    path = tmp_path / "plan.json"
    path.write_bytes(sealed(payload, plan.key))
    with pytest.raises(PlanError, match="does not fit the schema"):
        load_plan(path)


def test_a_file_whose_key_is_not_that_of_its_plan_is_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(sealed(plan, replace(plan.key, torch="9.9")))
    with pytest.raises(PlanError, match="another key"):
        load_plan(path)


@pytest.mark.parametrize(
    "path", ["no/such/plan.json", "", ".", "/dev/null", "a\0b", "x" * 5000], ids=repr
)
def test_a_path_that_is_no_plan_is_a_plan_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError):
        load_plan(path)


@pytest.mark.parametrize(
    "place",
    [(), ("evidence",), ("evidence", "baseline"), ("evidence", "trials", 0), ("signature",)],
)
def test_a_field_that_is_unknown_is_no_plan(plan, tmp_path, place):
    payload = msgspec.to_builtins(plan)
    inner = payload
    for step in place:
        inner = inner[step]
    inner["surprise"] = 1
    path = tmp_path / "plan.json"
    path.write_bytes(sealed(payload, payload["key"]))
    with pytest.raises(PlanError, match="surprise"):
        load_plan(path)
