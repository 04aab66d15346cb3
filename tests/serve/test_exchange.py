"""Exported plans are imported whole or not at all."""

from __future__ import annotations

import os
import stat

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from steadytorch.errors import PlanError, UnsupportedError, UsageError
from steadytorch.plan.files import MAX_BYTES
from steadytorch.plan.fingerprint import ENVIRONMENT
from steadytorch.plan.store import Store
from steadytorch.serve import exchange
from steadytorch.serve.exchange import export_plans, import_plans, misfit
from steadytorch.serve.plan import Plan, load_plan

from .plans import digested


@pytest.fixture
def plans(plan):
    """The plan of this machine, and one of another."""
    other = replace(plan, key=replace(plan.key, driver="570.1", device_name="another"))
    return [plan, other]


@pytest.fixture
def here(plans, tmp_path):
    store = Store(tmp_path / "here", second="")
    for each in plans:
        store.put(each.key, each)
    return store


@pytest.fixture
def exported(here, tmp_path):
    export_plans(tmp_path / "plans.steady", store=here.root)
    return tmp_path / "plans.steady"


@pytest.fixture
def there(tmp_path):
    return tmp_path / "there"


def _stored(root):
    return [entry.payload for entry in Store(root, second="").entries(Plan)]


# -- there and back -----------------------------------------------------------------------------


def test_exported_plans_are_imported(plans, exported, there):
    imported = import_plans(exported, there)
    assert {each.plan.id for each in imported} == {each.id for each in plans}
    assert sorted(_stored(there), key=str) == sorted(plans, key=str)
    for each in imported:
        assert load_plan(each.plan.path) == each.plan
        assert not each.kept


def test_an_imported_plan_serves(plan, exported, there, model, x):
    by_id = {each.plan.id: each.plan for each in import_plans(exported, there)}
    tuned = by_id[plan.id].apply(model)
    torch.testing.assert_close(tuned(x).detach(), model(x).detach())


def test_plans_named_by_id_are_exported_alone(plans, here, there, tmp_path):
    export_plans(tmp_path / "one", [plans[0].id, plans[0].id[:6].upper()], here.root)
    assert [each.plan.id for each in import_plans(tmp_path / "one", there)] == [plans[0].id]


def test_a_file_is_a_head_and_the_files_of_the_store(here, exported):
    head, *lines = exported.read_bytes().splitlines()
    assert head == b'{"plans":2,"schema":1}'
    assert lines == [entry.path.read_bytes() for entry in here.entries()]


def test_an_export_is_private_and_replaces_what_was_there(here, tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    export_plans(path, store=here.root)
    assert path.read_bytes().startswith(b'{"plans":2')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_files_that_are_no_plans_are_left_out_and_named(here, there, tmp_path):
    (bad, _) = (entry.path for entry in here.entries())
    bad.write_bytes(b"garbage")
    entries = export_plans(tmp_path / "some", store=here.root)
    assert [entry.path for entry in entries if entry.problem] == [bad]
    assert len(import_plans(tmp_path / "some", there)) == 1


def test_a_file_that_is_no_plan_is_not_exported_by_its_id(here, tmp_path):
    bad = next(here.entries()).path
    bad.write_bytes(b"garbage")
    with pytest.raises(PlanError, match="digest does not match"):
        export_plans(tmp_path / "some", [bad.stem], here.root)


def test_nothing_to_export_is_said(tmp_path, there):
    with pytest.raises(PlanError, match="no plans to export"):
        export_plans(tmp_path / "none", store=there)
    with pytest.raises(PlanError, match="no plan with id"):
        export_plans(tmp_path / "none", ["0123"], there)
    assert not (tmp_path / "none").exists()


# -- whether they fit ---------------------------------------------------------------------------


def test_an_import_says_which_plans_fit_and_where_others_differ(plans, exported, there):
    differing = {each.plan.id: each.misfit for each in import_plans(exported, there)}
    assert differing[plans[0].id] == ()
    found = {(d.field, d.old, d.new) for d in differing[plans[1].id]}
    key = plans[0].key
    assert found == {
        ("driver", "570.1", key.driver),
        ("device_name", "another", key.device_name),
    }


@pytest.mark.parametrize("field", ENVIRONMENT)
def test_every_field_of_the_machine_is_compared(plan, field):
    value = getattr(plan.key, field)
    other = value + 1 if isinstance(value, int) else "other"
    (found, *_) = misfit(replace(plan.key, **{field: other}))
    assert (found.field, found.old) == (field, other)


@pytest.mark.parametrize("field", ["workload", "signature", "objective", "ambient", "inputs"])
def test_fields_of_the_request_are_not_compared_with_the_machine(plan, field):
    other = {} if isinstance(getattr(plan.key, field), dict) else "other"
    assert misfit(replace(plan.key, **{field: other})) == ()


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "", "\x1b[2J", "cuda:-1"])
def test_an_unknown_device_is_a_misfit(plan, device):
    assert misfit(replace(plan.key, device=device))[0].field == "device"


def test_a_plan_that_is_there_stays_as_it_is(plan, exported, there):
    mine = replace(plan, name="mine")
    Store(there).put(mine.key, mine)
    kept = {each.plan.id: each.kept for each in import_plans(exported, there)}
    assert kept[plan.id]
    assert sum(kept.values()) == 1
    assert mine in _stored(there)


def test_a_bad_file_that_is_there_is_replaced(plan, exported, there):
    path = Store(there).put(plan.key, plan)
    path.write_bytes(b"garbage")
    assert not any(each.kept for each in import_plans(exported, there))
    assert load_plan(path).name == plan.name


# -- files that are wrong -----------------------------------------------------------------------


def test_a_file_cut_anywhere_imports_nothing(exported, there):
    data = exported.read_bytes()
    ends = {at for at, byte in enumerate(data) if byte == ord("\n")}
    # The last line break is optional.
    for length in sorted({*range(0, len(data) - 1, 7), *ends - {len(data) - 1}}):
        exported.write_bytes(data[:length])
        with pytest.raises(PlanError):
            import_plans(exported, there)
    assert not there.exists()


def test_a_byte_changed_anywhere_imports_nothing(exported, there):
    data = exported.read_bytes()
    for at in [*range(30), *range(30, len(data), 7), len(data) - 1]:
        exported.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(PlanError):
            import_plans(exported, there)
    assert not there.exists()


HEAD = b'{"plans":1,"schema":1}\n'
WRONG = {
    "empty": (b"", "first line"),
    "text": (b"hello", "first line"),
    "binary": (b"\x80\x04\x95pickle", "first line"),
    "deep": (b"[" * 200_000, "first line"),
    "a plan file": (b'{"key":{},"payload":{},"schema":1,"sha256":""}', "first line"),
    "nan": (b'{"plans":NaN,"schema":1}', "first line"),
    "beyond": (b'{"plans":1e999,"schema":1}', "first line"),
    "another schema": (b'{"plans":0,"schema":2}', "has schema 2"),
    "missing": (HEAD, "holds 0 of 1 plans"),
    "negative": (b'{"plans":-1,"schema":1}', "holds 0 of -1 plans"),
    "garbage": (HEAD + b"garbage", "digest does not match"),
    "forged": (HEAD + digested(b'{"key":{},"payload":{},"schema":1}'), "does not fit the schema"),
    "deep plan": (HEAD + digested(b'{"key":' + b"[" * 200_000 + b"}"), "does not fit"),
    "long plan": (HEAD + b"0" * (MAX_BYTES + 1), "larger than"),
    "more": (HEAD + b"a\nb", "holds 2 of 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_export_gives_one_line_with_the_reason(tmp_path, there, name):
    content, said = WRONG[name]
    path = tmp_path / "wrong\x1b[2J"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=said) as caught:
        import_plans(path, there)
    assert str(caught.value).isprintable()
    assert not there.exists()


def test_a_file_too_large_is_refused_unread(tmp_path, there):
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(PlanError, match="larger than"):
        import_plans(path, there)


@settings(
    max_examples=3 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=st.binary(max_size=300), headed=st.booleans())
def test_any_bytes_import_nothing(tmp_path, content, headed):
    path = tmp_path / "bytes"
    path.write_bytes(HEAD + content if headed else content)
    with pytest.raises(PlanError):
        import_plans(path, tmp_path / "there")


def test_a_plan_under_a_key_that_is_not_its_own_is_refused(plan, tmp_path, there):
    from .plans import sealed

    path = tmp_path / "lie"
    path.write_bytes(HEAD + sealed(plan, replace(plan.key, torch="9.9")))
    with pytest.raises(PlanError, match="names another key"):
        import_plans(path, there)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "none", "null byte"])
def test_anything_but_a_regular_file_of_this_user_is_refused(exported, there, tmp_path, kind):
    path = tmp_path / kind
    if kind == "link":
        path.symlink_to(exported)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "null byte":
        path = "a\0b"
    with pytest.raises(PlanError, match=r"was refused|does not exist") as caught:
        import_plans(path, there)
    assert str(caught.value).isprintable()


# -- places that cannot be written --------------------------------------------------------------


def test_a_device_is_not_replaced_by_an_export(here, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, "/dev/null", tmp_path):
        before = os.stat(path).st_mode
        with pytest.raises(UsageError, match="not a regular file"):
            export_plans(path, store=here.root)
        assert os.stat(path).st_mode == before


def test_an_export_that_cannot_be_written_leaves_the_old_one(here, exported, monkeypatch):
    before = exported.read_bytes()

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UsageError, match="No space left on device"):
        export_plans(exported, store=here.root)
    monkeypatch.undo()
    assert exported.read_bytes() == before


def test_more_than_a_file_holds_is_refused(here, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="export fewer"):
        export_plans(tmp_path / "large", store=here.root)
    assert not (tmp_path / "large").exists()


def test_a_store_that_cannot_be_written_takes_no_import(exported, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"import stopped after 0 plans.*cannot be written"):
        import_plans(exported, tmp_path / "file" / "plans")


def test_an_imported_path_is_not_believed(plan, tmp_path, there):
    lying = replace(plan, path="/etc/passwd")
    export_from = Store(tmp_path / "from", second="")
    export_from.put(plan.key, lying)
    export_plans(tmp_path / "file", store=export_from.root)
    (imported,) = import_plans(tmp_path / "file", there)
    assert imported.plan.path.startswith(str(there))
    assert msgspec.json.decode(tmp_path.joinpath("file").read_bytes().splitlines()[1])
