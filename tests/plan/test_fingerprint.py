from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.plan.fingerprint import (
    RULES_VERSION,
    Difference,
    Key,
    canonical_json,
    differing_fields,
    format_differences,
    format_nearest,
    in_environment,
    make_key,
    nearest,
    trained_fingerprint,
    workload_fingerprint,
)
from steadytorch.workload.signature import signature
from steadytorch.workload.workload import Workload

FACTS = DeviceFacts(
    device="cuda",
    name="NVIDIA H200",
    compute_capability="9.0",
    sm_count=132,
    driver="590.44",
    cuda="13.0",
    cudnn="9.19.0",
    triton="3.7.0",
    torch="2.13.0",
    python="3.11.7",
    cores_physical=8,
    cores_logical=16,
    cpu_name="a processor",
    isa="AVX512",
    os="Linux",
)
# Sets in the code and in the instance; their order depends on the hash seed.
PROGRAM = """
import sys
from torch import nn
from steadytorch.plan.fingerprint import workload_fingerprint
from steadytorch.workload.workload import Workload

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, mode="one"):
        if mode in {"one", "two", "three", "four", "five"}:
            return self.layer(x)
        return (lambda y: y + 1)(x)

print(workload_fingerprint(Workload(Model())))
"""


def printed(arguments: list[str], seed: int, folder: Path) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("from_file", [True, False])
def test_the_fingerprint_is_the_same_in_every_process(tmp_path: Path, from_file: bool) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    arguments = ["script.py"] if from_file else ["-c", PROGRAM]
    found = {printed(arguments, seed, tmp_path) for seed in (1, 2)}
    assert len(found) == 1
    assert len(found.pop()) == 64


def test_the_fingerprint_tells_workloads_apart() -> None:
    first, second = (workload_fingerprint(Workload(nn.Linear(2, n))) for n in (2, 3))
    assert first != second


def test_a_fingerprint_survives_text_that_utf8_cannot_hold() -> None:
    assert len(workload_fingerprint(Workload(lambda x: "\udcff"))) == 64


def make(**changes: Any) -> Key:
    inputs = changes.pop("inputs", (torch.zeros(8, 3),))
    kwargs = changes.pop("kwargs", {})
    settings: dict[str, Any] = {
        "objective": "latency",
        "precision": "same",
        "tolerance": None,
        "max_memory_bytes": None,
        "ambient": {"cudnn.benchmark": False},
    }
    facts = msgspec.structs.replace(FACTS, **changes.pop("facts", {}))
    workload = Workload(changes.pop("model", nn.Linear(3, 3)), inputs)
    return make_key(workload, signature(inputs, kwargs), facts, **(settings | changes))


def test_a_key_reads_as_people_would_write_it() -> None:
    key = make(kwargs={"scale": 2})
    assert key.signature == "8x3:float32, ['scale']=2"
    assert key.inputs["[0]"] == "[8, 3] float32 strides [3, 1] on cpu"
    assert key.inputs["['scale']"] == "= 2"
    assert key.ambient == {"cudnn.benchmark": "False"}
    assert key.rules == RULES_VERSION


@pytest.mark.parametrize("ignored", ["python", "os", "cores_physical", "cpu_name"])
def test_facts_that_do_not_matter_stay_out(ignored: str) -> None:
    other = 3 if ignored == "cores_physical" else "other"
    assert make(facts={ignored: other}).digest == make().digest


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": (torch.zeros(9, 3),)},
        {"inputs": (torch.zeros(3, 8).t(),)},
        {"inputs": (torch.zeros(8, 3, dtype=torch.float64),)},
        {"inputs": ([torch.zeros(8, 3)],)},
        {"inputs": (torch.zeros(8, 3, device="meta"),)},
        {"kwargs": {"scale": 2}},
        {"model": nn.Linear(3, 4)},
        {"ambient": {}},
        {"max_memory_bytes": 1},
        {"tolerance": 0.5},
        {"objective": "p99"},
        {"precision": "fp16"},
    ],
)
def test_what_matters_gets_another_key_in_the_same_environment(change: dict[str, Any]) -> None:
    assert make(**change).digest != make().digest
    assert make(**change).environment_digest == make().environment_digest


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"name": "NVIDIA B200"},
        {"compute_capability": "10.0"},
        {"sm_count": 16},
        {"mig_profile": "1g.18gb"},
        {"isa": "AVX2"},
        {"torch": "2.14.0"},
        {"cuda": None},
        {"cudnn": "9.20.0"},
        {"triton": None},
        {"driver": None},
    ],
)
def test_another_machine_gets_another_environment(change: dict[str, Any]) -> None:
    assert make(facts=change).environment_digest != make().environment_digest


def test_cores_and_threads_of_a_processor_get_another_key() -> None:
    processor = {"device": "cpu", "cores_logical": 16}
    made = make(facts=processor, ambient={"num_threads": 8})
    assert (made.cores_logical, made.ambient) == (16, {"num_threads": "8"})
    fewer = make(facts=processor | {"cores_logical": 2}, ambient={"num_threads": 8})
    assert fewer.environment_digest != made.environment_digest
    assert make(facts=processor, ambient={"num_threads": 1}).digest != made.digest


def test_a_rank_of_torchrun_with_a_gpu_finds_a_plan_tuned_outside() -> None:
    """A rank has one thread by default, and may be pinned to some cores."""
    made = make(ambient={"num_threads": 16, "cudnn.benchmark": False})
    assert (made.cores_logical, made.ambient) == (None, {"cudnn.benchmark": "False"})
    rank = {"num_threads": 1, "cudnn.benchmark": False}
    pinned = msgspec.structs.replace(FACTS, cores_logical=2)
    assert make(facts={"cores_logical": 2}, ambient=rank) == made
    assert in_environment(made, pinned) == made


@pytest.mark.parametrize("tolerance", [math.inf, math.nan])
def test_a_tolerance_without_bound_is_refused(tolerance: float) -> None:
    with pytest.raises(UsageError, match="finite"):
        make(tolerance=tolerance)


def test_equal_tolerances_give_equal_keys() -> None:
    assert make(tolerance=1).digest == make(tolerance=1.0).digest


def test_settings_that_utf8_cannot_hold_still_have_a_digest() -> None:
    assert len(make(ambient={"PATH": "\udcff"}).digest) == 64


def test_the_digest_does_not_follow_the_order_of_settings() -> None:
    assert make(ambient={"a": 1, "b": 2}).digest == make(ambient={"b": 2, "a": 1}).digest


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=5), st.floats(0, 1))
def test_a_key_and_its_digest_survive_json(
    key: Key, ambient: dict[str, str], tolerance: float
) -> None:
    changed = replace(key, ambient=ambient, tolerance=tolerance)
    again = msgspec.json.decode(canonical_json(changed), type=Key)
    assert again == changed
    assert again.digest == changed.digest


def test_equal_keys_do_not_differ(key: Key) -> None:
    assert differing_fields(key, replace(key)) == []


@pytest.mark.parametrize("field", Key.__struct_fields__)
def test_every_field_is_compared(key: Key, field: str) -> None:
    value = getattr(key, field)
    new: Any = {"other": "1"} if isinstance(value, dict) else "other"
    assert {
        d.field.partition(".")[0].partition("[")[0]
        for d in differing_fields(key, replace(key, **{field: new}))
    } == {field}


def test_settings_and_inputs_are_compared_one_by_one(key: Key) -> None:
    other = replace(key, ambient={"cudnn.benchmark": "True", "new": "1"}, inputs={})
    assert differing_fields(key, other) == [
        Difference("inputs[0]", key.inputs["[0]"], None),
        Difference("ambient.cudnn.benchmark", "False", "True"),
        Difference("ambient.new", None, "1"),
    ]


def _tensor(shape=(64, 3), strides=(3, 1), dtype="float32", device="cpu"):
    return f"{list(shape)} {dtype} strides {list(strides)} on {device}"


# -- near misses --------------------------------------------------------------------------------


def test_the_nearest_key_differs_least(key: Key) -> None:
    near, far = replace(key, torch="2.12"), replace(key, torch="2.11", cuda="12.9")
    assert nearest([far, near], key) == (Difference("torch", "2.12", key.torch),)


def test_a_key_of_another_workload_is_near_if_all_else_is_alike(key: Key) -> None:
    changed = replace(key, workload="1" * 64)
    assert nearest([changed], key) == (Difference("workload", "1" * 64, key.workload),)
    assert nearest([replace(changed, torch="2.12")], key) == ()


def test_a_key_stored_during_the_look_up_is_not_a_near_miss(key: Key) -> None:
    assert nearest([key], key) == ()


def test_differences_are_told_with_both_values_and_counted(key: Key) -> None:
    other = replace(key, torch="1", cuda="2", cudnn="3", triton="4", driver="5")
    assert format_differences(differing_fields(other, key)[:1]) == f"torch was 1, is {key.torch}"
    assert format_differences(differing_fields(other, key)).endswith("; and 1 more")
    assert format_differences([]) == ""


def test_a_workload_is_shown_by_twelve_digits_and_in_words(key: Key) -> None:
    found = format_differences(differing_fields(replace(key, workload="ab" * 32), key))
    ids = f"workload was {'ab' * 6}, is {key.workload[:12]}"
    assert found == f"{ids} (its layers, their modes or their code differ)"


def test_values_are_shown_long_enough_to_differ(key: Key) -> None:
    old, new = (replace(key, inputs={"[0]": _tensor(device=device)}) for device in ("cpu", "cuda"))
    assert format_differences(differing_fields(old, new)) == "inputs[0] device was cpu, is cuda"


def test_shapes_are_shown_once(key: Key) -> None:
    old = replace(key, signature="4x3:float32", inputs={"[0]": _tensor([4, 3], [3, 1])})
    new = replace(key, signature="8x3:float32", inputs={"[0]": _tensor([8, 3], [3, 1])})
    found = format_differences(differing_fields(old, new))
    assert found == "signature was 4x3:float32, is 8x3:float32"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (([4, 3], [3, 1]), ([8, 3], [3, 1]), "inputs[0] differs in shape"),
        (([4, 3], [3, 1]), ([4, 5], [5, 1]), "inputs[0] differs in shape"),
        (([4, 3], [3, 1]), ([4, 3], [1, 4]), "inputs[0] differs in strides"),
        (([4, 3], [3, 1]), ([], []), "inputs[0] differs in shape"),
        (([4], [1], "float16"), ([8], [1]), "inputs[0] differs in shape and dtype"),
    ],
)
def test_the_nearest_plan_is_told_by_what_differs(key: Key, old, new, told) -> None:
    before, after = (replace(key, inputs={"[0]": _tensor(*each)}) for each in (old, new))
    assert format_nearest(differing_fields(before, after)) == f"nearest plan: {told}"
    moved = replace(before, signature="4x3:float32")
    found = format_nearest(differing_fields(moved, after))
    assert found == f"nearest plan: 4x3:float32 ({told})"


def test_many_inputs_that_differ_alike_are_told_together(key: Key) -> None:
    names = [f"[{i}]" for i in range(7)]
    old, new = (
        replace(key, torch=version, inputs={name: _tensor([size], [1]) for name in names})
        for size, version in ((4, "1"), (8, "2"))
    )
    assert format_nearest(differing_fields(old, new)) == (
        "nearest plan: inputs[0], inputs[1], inputs[2], inputs[3] and 3 more differ in shape; "
        "torch was 1, is 2"
    )


def test_other_inputs_differ_in_kind_and_nesting_in_words(key: Key) -> None:
    old = replace(key, inputs={"[0]": "= 3", "structure": "TreeSpec(x)"})
    new = replace(key, inputs={"[0]": "= 4", "structure": "TreeSpec(y)"})
    told = "nearest plan: inputs[0] differs in value; the nesting of the inputs differs"
    assert format_nearest(differing_fields(old, new)) == told
    one, none = replace(key, inputs={"[0]": _tensor()}), replace(key, inputs={})
    assert format_nearest(differing_fields(none, one)) == "nearest plan: inputs[0] differs in kind"
    assert format_nearest([]) == ""


def test_a_key_in_another_environment_keeps_what_was_asked(key: Key) -> None:
    moved = in_environment(replace(key, rules=RULES_VERSION - 1, sm_count=16), FACTS)
    assert moved == replace(key, rules=RULES_VERSION)


def test_steps_that_take_batches_have_a_key_of_their_own():
    model = nn.Linear(2, 1)
    alone, fed = Workload(model, torch.ones(3, 2)), Workload.from_loader(model, [torch.ones(3, 2)])
    one, other = (
        make_key(
            workload,
            workload.signature(),
            FACTS,
            objective="latency",
            precision="same",
            tolerance=None,
            max_memory_bytes=None,
            ambient={},
        )
        for workload in (alone, fed)
    )
    assert differing_fields(one, other) == [Difference("loader", False, True)]
    assert one.digest != other.digest


def test_keys_without_a_loader_are_written_without_one(key):
    assert b"loader" not in canonical_json(key)
    again = msgspec.json.decode(canonical_json(replace(key, loader=True)), type=Key)
    assert again.loader


def test_a_trained_model_is_known_without_its_loss_and_optimizer():
    model = nn.Linear(2, 2).train()
    found = trained_fingerprint(model)
    assert len(found) == 64
    assert found == trained_fingerprint(nn.Linear(2, 2).train())
    step = Workload.training(model, torch.ones(1, 2), torch.sum, torch.optim.SGD)
    others = (
        workload_fingerprint(step),
        workload_fingerprint(Workload(model, torch.ones(1, 2))),
        trained_fingerprint(nn.Linear(2, 3).train()),
        trained_fingerprint(nn.Linear(2, 2).eval()),
        trained_fingerprint(nn.Linear(2, 2).requires_grad_(False).train()),
    )
    assert found not in others
