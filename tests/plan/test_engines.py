from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
import torch

from steadytorch.conv.choices import Choice, read_choice, write_choices
from steadytorch.device.facts import DeviceFacts
from steadytorch.plan.engines import FOLDER, Kept, keep_engines, known_engines
from steadytorch.plan.fingerprint import in_environment
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.workload.workload import Workload

from ..serve.plans import make_model, make_plan, sealed

FACTS = DeviceFacts(
    device="cuda",
    name="NVIDIA H200",
    compute_capability="9.0",
    sm_count=132,
    cudnn="9.19.0",
    driver="590.44",
)
FIRST = "fprop/bias/fp16/last/i8x64x28x28/w64x64x1x1/s1x1/p0x0/d1x1/g1"
SECOND = FIRST.replace("w64x64", "w32x64")
ONE, OTHER = read_choice("eng1_k2=3"), read_choice("c4:eng48")
PREFIX = (TransformSpec("channels_last"),)


def using(choices: dict[str, Choice] | str) -> tuple[TransformSpec, ...]:
    text = choices if isinstance(choices, str) else write_choices(choices)
    return (*PREFIX, TransformSpec("cudnn_engines", (("choices", text),)))


def planned(store: Store, choices, created="2026-01-01T00:00:00+00:00", facts=FACTS, **fields):
    """Stores a plan with these engines, and gives its path."""
    plan = make_plan(make_model(), torch.ones(1, 3, 8, 8), using(choices))
    key = msgspec.structs.replace(in_environment(plan.key, facts), **fields)
    path = store.put(key, msgspec.structs.replace(plan, key=key, created=created))
    assert path is not None
    return path


def keep(store: Store, choices, prefix=PREFIX, facts=FACTS):
    workload = Workload(make_model(), torch.ones(1, 3, 8, 8))
    keep_engines(workload, prefix, facts, choices, store)


def kept(store: Store) -> list[Path]:
    assert store.root is not None
    return sorted((store.root / FOLDER).rglob("*.json"))


def test_nothing_is_known_at_first(store):
    assert known_engines(FACTS, store) == {}


def test_the_engines_of_a_plan_are_known(store):
    planned(store, {FIRST: ONE, SECOND: OTHER})
    assert known_engines(FACTS, store) == {FIRST: ONE, SECOND: OTHER}


def test_the_newest_counts_problem_by_problem(store):
    planned(store, {FIRST: OTHER}, "2026-02-01T00:00:00+00:00", precision="fp16")
    planned(store, {FIRST: ONE, SECOND: ONE}, precision="bf16")
    assert known_engines(FACTS, store) == {FIRST: OTHER, SECOND: ONE}


@pytest.mark.parametrize(
    "other",
    [
        {"cudnn": "9.20.0"},
        {"name": "NVIDIA H100"},
        {"compute_capability": "8.0"},
        {"sm_count": 66},
        {"mig_profile": "1g.18gb"},
    ],
)
def test_choices_of_another_device_or_cudnn_are_not_used(store, other):
    planned(store, {FIRST: ONE})
    keep(store, {SECOND: ONE})
    assert known_engines(msgspec.structs.replace(FACTS, **other), store) == {}


def test_another_driver_or_pytorch_still_knows_them(store):
    planned(store, {FIRST: ONE})
    newer = msgspec.structs.replace(FACTS, driver="600.1", torch="2.12.0")
    assert known_engines(newer, store) == {FIRST: ONE}


def test_engines_without_a_plan_seed_the_next_search(store):
    keep(store, {FIRST: ONE})
    assert known_engines(FACTS, Store(store.root)) == {FIRST: ONE}


def test_choosing_again_replaces_what_was_kept(store):
    keep(store, {FIRST: ONE})
    keep(store, {FIRST: OTHER})
    assert len(kept(store)) == 1
    assert known_engines(FACTS, store) == {FIRST: OTHER}


def test_choices_under_other_transforms_are_kept_too(store):
    keep(store, {FIRST: ONE})
    keep(store, {SECOND: OTHER}, prefix=())
    assert known_engines(FACTS, store) == {FIRST: ONE, SECOND: OTHER}


def test_stored_engines_are_not_a_plan(store):
    keep(store, {FIRST: ONE})
    assert list(store.entries(Plan)) == []


def test_no_choices_leave_no_file(store):
    keep(store, {})
    assert kept(store) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    keep(Store(tmp_path / "file"), {FIRST: ONE})
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "choices",
    [
        "{",
        '{"x": "eng1"}',
        f'{{"{FIRST}": "eng1; rm -rf /"}}',
        f'{{"{FIRST}": 1}}',
        "[" * 100_000,
        f'{{"{FIRST}": "eng1"}}' + " " * (1 << 18),
    ],
    ids=["cut", "problem", "engine", "number", "deep", "long"],
)
def test_malformed_choices_are_skipped_with_a_warning(store, caplog, choices):
    planned(store, choices)
    keep(store, {SECOND: ONE})
    assert known_engines(FACTS, store) == {SECOND: ONE}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("skipped 1 stored files that may name engines")


def test_damaged_files_of_either_kind_give_one_warning(store, caplog):
    planned(store, {FIRST: ONE}).write_bytes(b"{}")
    keep(store, {FIRST: ONE})
    path = kept(store)[0]
    path.write_bytes(path.read_bytes()[:-9])
    planned(store, {SECOND: OTHER}, precision="bf16")
    assert known_engines(FACTS, store) == {SECOND: OTHER}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("payload", [{}, {"candidate": 3, "created": ""}, [], None])
def test_another_payload_under_an_honest_digest_is_passed_over(store, caplog, payload):
    keep(store, {FIRST: ONE})
    path = kept(store)[0]
    key = msgspec.json.decode(path.read_bytes())["key"]
    path.write_bytes(sealed(payload, key))
    assert known_engines(FACTS, store) == {}
    assert len(caplog.records) == 1


def test_a_link_is_not_followed(store, caplog, tmp_path):
    keep(store, {FIRST: ONE})
    path = kept(store)[0]
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert known_engines(FACTS, store) == {}
    assert len(caplog.records) == 1


def test_a_plan_without_engines_yields_none(store):
    plan = make_plan(make_model(), torch.ones(1, 3, 8, 8))
    key = in_environment(plan.key, FACTS)
    store.put(key, Kept(PREFIX, "2026-01-01T00:00:00+00:00"))
    assert known_engines(FACTS, store) == {}
