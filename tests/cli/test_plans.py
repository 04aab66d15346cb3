"""`steady plans` from the outside: what it prints, what it leaves, and how it ends."""

from __future__ import annotations

import os
from types import SimpleNamespace

import msgspec
import pytest

from steadytorch.cli import options
from steadytorch.errors import UsageError
from steadytorch.measure.race import MachineClaim
from steadytorch.plan.engines import Kept, store_of_engines
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.record import Evidence, Speedup, Timing
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan, load_plan
from steadytorch.tune import reverify as engine
from steadytorch.tune.reverify import Reverified
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session

from .conftest import only_line

TIMING = Timing("latency", 1e6, None, 1.2e6, None, 150)
EVIDENCE = Evidence(
    baseline=TIMING,
    winner=TIMING,
    speedup=Speedup(2.0, 1.9, 2.1, "process", "faster", 20),
    break_even_calls=10,
    regime="memory-bound",
    reference="float64",
    trials=(),
    not_applicable={},
    not_tried={},
    search_s=1.0,
)


def _plan(spec="tiny.py:small", **key_fields):
    """A plan for the workload, keyed as `steady tune` would key it; no search."""
    loaded = options.load(spec, batch=None, inputs=(), train=False, seed=0)
    session = Session(loaded, SearchOptions(), "cpu")
    return Plan(
        name=loaded.name,
        signature=loaded.signature(),
        candidate=(TransformSpec("inference_mode"),),
        evidence=EVIDENCE,
        key=msgspec.structs.replace(session.key, **key_fields),
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
    )


@pytest.fixture
def store(folder):
    return Store(folder / "plans", second="")


@pytest.fixture
def kept(store):
    """One plan of this machine in the store, and one of another."""
    mine, other = _plan(), _plan(driver="570.1")
    for each in (mine, other):
        store.put(each.key, each)
    return SimpleNamespace(mine=mine, other=other, ids={mine.id, other.id})


def _ids(store):
    return {entry.key.digest[:12] for entry in store.entries() if entry.key}


# -- a miss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", Key.__struct_fields__)
def test_a_miss_in_mode_strict_names_the_field_that_differs(steady, store, field):
    plan = _plan()
    value = getattr(plan.key, field)
    changed = {**value, "other": "1"} if isinstance(value, dict) else "other"
    if field == "tolerance":
        changed = 0.5
    elif isinstance(value, bool):
        changed = not value
    elif isinstance(value, int) or field in ("max_memory_bytes", "sm_count"):
        changed = (value or 0) + 1
    stored = msgspec.structs.replace(plan.key, **{field: changed})
    store.put(stored, msgspec.structs.replace(plan, key=stored))
    ended = steady("tune", "tiny.py:small", "--mode", "strict", "--store", "plans")
    assert ended.code == 2
    line = only_line(ended.err)
    named = f"{field}.other was 1, is None" if isinstance(value, dict) else f"{field} was {changed}"
    assert ("nearest plan: other" if field == "signature" else named) in line


def test_a_miss_is_said_once_before_the_search(steady, monkeypatch):
    def search(self, watcher):
        raise UsageError("enough")

    monkeypatch.setattr(Session, "search", search)
    ended = steady("tune", "tiny.py:small", "--store", "plans")
    assert "\nno plan is stored for this workload\n" in ended.out


# -- list -----------------------------------------------------------------------------------------


def test_a_plan_that_was_moved_aside_is_listed_as_such(steady, store, kept):
    store.find(kept.mine.id).path.write_bytes(b"garbage")
    store.get(kept.mine.key, Plan)
    ended = steady("plans", "list", "--store", "plans")
    assert (ended.code, ended.err) == (0, "")
    assert "1 unusable file moved aside to " in " ".join(ended.out.split())
    assert kept.other.id in ended.out


# -- rm -------------------------------------------------------------------------------------------


def test_plans_are_removed_by_id(steady, store, kept):
    ended = steady("plans", "rm", kept.mine.id[:6], "--store", "plans")
    assert (ended.code, ended.err) == (0, "")
    assert "1 removed from" in ended.out
    assert _ids(store) == {kept.other.id}


def test_one_unknown_id_removes_nothing(steady, store, kept):
    ended = steady("plans", "rm", kept.mine.id, "0123456789ab", "--store", "plans")
    assert (ended.code, ended.out) == (2, "")
    assert "no plan with id '0123456789ab'" in only_line(ended.err)
    assert _ids(store) == kept.ids


def test_a_file_that_is_no_plan_is_removed_by_its_name(steady, store, kept):
    bad = store.find(kept.mine.id).path
    bad.write_bytes(b"garbage")
    assert steady("plans", "rm", kept.mine.id, "--store", "plans").code == 0
    assert not bad.exists()


def test_all_are_removed_with_what_was_moved_aside_and_engines(steady, store, kept):
    store.find(kept.mine.id).path.write_bytes(b"garbage")
    store.get(kept.mine.key, Plan)
    assert len(store.quarantined()) == 1
    engines = store_of_engines(store)
    assert engines is not None
    engines.put(kept.mine.key, Kept((), ""))
    ended = steady("plans", "rm", "--all", "--yes", "--store", "plans")
    assert (ended.code, ended.err) == (0, "")
    assert [p for p in store.root.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(("answer", "left"), [("n", 2), ("y", 0)])
def test_all_asks_first(steady, store, kept, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: answer)
    ended = steady("plans", "rm", "--all", "--store", "plans")
    assert ended.code == 0
    assert ("removed no files" in ended.out) is bool(left)
    assert len(_ids(store)) == left


def test_where_nobody_can_answer_all_needs_yes(steady_process, store, kept):
    ended = steady_process("plans", "rm", "--all", "--store", "plans", stdin=-3)
    assert ended.returncode == 2
    assert "add --yes" in only_line(ended.stderr)
    assert _ids(store) == kept.ids


def test_summaries_of_the_commands_are_whole(steady):
    ended = steady("plans", "--help")
    assert "..." not in ended.out.partition("Commands:")[2]


def test_only_all_asks_and_the_help_says_so(steady):
    assert "With --all: do not ask first." in steady("plans", "rm", "--help").out


@pytest.mark.parametrize("words", [[], ["0123", "--all"]])
def test_ids_or_all(steady, words):
    ended = steady("plans", "rm", *words, "--store", "plans")
    assert (ended.code, ended.out) == (2, "")
    assert "either an ID or --all" in only_line(ended.err)


def test_what_cannot_be_removed_is_said(steady, store, kept, monkeypatch):
    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refused)
    ended = steady("plans", "rm", kept.mine.id, "--store", "plans")
    assert ended.code == 3
    assert "was not removed: Permission denied" in only_line(ended.err)
    assert "0 removed" in ended.out


# -- export and import ----------------------------------------------------------------------------


def test_plans_move_from_store_to_store(steady, store, kept, folder):
    ended = steady("plans", "export", "all.steady", "--store", "plans")
    assert (ended.code, ended.err) == (0, "")
    assert "2 plans in all.steady" in ended.out
    ended = steady("plans", "import", "all.steady", "--store", "others")
    assert (ended.code, ended.err) == (0, "")
    assert "does not fit here: driver was 570.1, is " in " ".join(ended.out.split())
    assert "2 plans, 1 of them for this machine" in ended.out
    assert _ids(Store(folder / "others")) == kept.ids
    replayed = steady("tune", "tiny.py:small", "--mode", "strict", "--store", "others")
    assert replayed.code == 0
    assert kept.mine.id in replayed.out


def test_one_plan_is_exported_by_its_id(steady, kept, folder):
    assert steady("plans", "export", "one", kept.mine.id, "--store", "plans").code == 0
    again = steady("plans", "import", "one", "--store", "plans")
    assert again.code == 0
    assert "already stored, left unchanged" in again.out


def test_plans_are_pushed_once_and_served_from_there(steady, kept, folder):
    ended = steady("plans", "push", f"file://{folder}/shared", "--store", "plans")
    assert ended.code == 0
    added = len(list((folder / "shared").rglob("*.json")))
    assert added > 0
    assert f"{added} plan" in ended.out
    again = steady("plans", "push", f"file://{folder}/shared", kept.mine.id, "--store", "plans")
    assert "0 plans added, 1 already there" in again.out


def test_a_push_that_fails_says_why(steady, kept, folder):
    (folder / "file").write_text("")
    ended = steady("plans", "push", f"file://{folder}/file", kept.mine.id, "--store", "plans")
    assert ended.code == 3
    assert "cannot be written" in only_line(ended.err)


def test_an_export_into_no_folder_is_refused(steady, kept):
    ended = steady("plans", "export", "no/such/file", "--store", "plans")
    assert ended.code == 2
    assert "there is no folder no/such" in only_line(ended.err)


@pytest.mark.parametrize("name", ["none", "tiny.py", "."])
def test_what_is_no_export_is_not_imported(steady, folder, name):
    ended = steady("plans", "import", name, "--store", "others")
    assert (ended.code, ended.out) == (2, "")
    assert only_line(ended.err).startswith(name)
    assert not (folder / "others").exists()


def test_a_store_that_cannot_be_written_is_said(steady, kept, folder):
    steady("plans", "export", "all", "--store", "plans")
    ended = steady("plans", "import", "all", "--store", "tiny.py/plans")
    assert ended.code == 3
    assert "import stopped after 0 plans" in ended.err


# -- hostile names --------------------------------------------------------------------------------


def test_names_in_plans_and_of_files_reach_the_terminal_as_text(steady, store, kept, folder):
    hostile = "[red]\x1b[2J\x1b]0;title\x07\u202eevil"
    plan = msgspec.structs.replace(kept.mine, name=hostile)
    path = store.put(plan.key, plan)
    path.with_name("\x1b[2J.json").write_bytes(b"garbage")
    for words in (
        ["list"],
        ["show", plan.id],
        ["export", "all"],
        ["import", "all"],
        ["verify", "--all"],
        ["verify", plan.id],
    ):
        ended = steady("plans", *words, "--store", "plans")
        for text in (ended.out, ended.err):
            assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert load_plan(path).name == hostile


# -- verify ---------------------------------------------------------------------------------------


@pytest.fixture
def reverified(monkeypatch):
    """Results in place of minutes of measuring; notes what was asked."""
    asked = []

    def give(result):
        def reverify(plan, workload, **options):
            asked.append((plan.id, workload.name, options))
            return msgspec.structs.replace(result, plan=plan)

        monkeypatch.setattr(engine, "reverify", reverify)
        return asked

    return give


GOOD = Reverified(
    plan=None,  # type: ignore[arg-type] - put in its place above
    error=1e-7,
    claim=MachineClaim(-0.5, -0.52, -0.48, "faster", 5, "machine"),
    baseline_ns=2e6,
    plan_ns=1e6,
)
BAD = msgspec.structs.replace(GOOD, failed="output 0 holds NaN")


def test_a_plan_that_holds_ends_with_0(steady, kept, reverified):
    asked = reverified(GOOD)
    words = ("--workload", "tiny.py:small", "--processes", "3", "--seed", "7", "--store", "plans")
    ended = steady("plans", "verify", kept.mine.id, *words)
    assert (ended.code, ended.err) == (0, "")
    assert "2.00x as fast as the untouched workload" in " ".join(ended.out.split())
    ((name, workload, given),) = asked
    assert (name, workload) == (kept.mine.id, "tiny.py:small")
    assert (given["processes"], given["seed"], given["device"]) == (3, 7, None)


def test_a_plan_that_fails_ends_with_1(steady, kept, reverified):
    reverified(BAD)
    words = ("--workload", "tiny.py:small", "--store", "plans", "--quiet")
    ended = steady("plans", "verify", kept.mine.id, *words)
    assert (ended.code, ended.out) == (1, "")
    assert only_line(ended.err) == f"plan {kept.mine.id} failed: output 0 holds NaN"


def test_all_bundled_plans_are_verified_and_others_passed_over(steady, store, kept, reverified):
    bundled = _plan("resnet18")
    store.put(bundled.key, bundled)
    asked = reverified(BAD)
    ended = steady("plans", "verify", "--all", "--store", "plans")
    assert ended.code == 1
    assert [(name, workload) for name, workload, _ in asked] == [(bundled.id, "resnet18")]
    assert ended.out.count("skipped: ") == 2
    assert "pass it with --workload" in " ".join(ended.out.split())


def test_where_no_plan_can_be_verified_all_ends_with_3(steady, kept, reverified):
    reverified(GOOD)
    ended = steady("plans", "verify", "--all", "--store", "plans")
    assert ended.code == 3
    assert "no plan in" in only_line(ended.err)


def test_a_plan_of_another_machine_ends_with_3(steady, kept):
    words = ("--workload", "tiny.py:small", "--store", "plans")
    ended = steady("plans", "verify", kept.other.id, *words)
    assert ended.code == 3
    assert "does not fit here: driver was 570.1" in only_line(ended.err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MINE"], "pass it with --workload"),
        (["MINE", "--workload", "tiny.py:small", "--batch", "5"], "does not fit here: signature"),
        (["MINE", "--workload", "tiny.py:small", "--train"], "train"),
        (["MINE", "--workload", "tiny.py:unfit"], "does not fit here: workload"),
        (["MINE", "--batch", "5"], "name it as well"),
        (["MINE", "--all"], "either an ID or --all"),
        ([], "either an ID or --all"),
        (["--all", "--workload", "tiny.py:small"], "exclude each other"),
        (["0123456789"], "no plan with id"),
        (["MINE", "--processes", "2"], "--processes"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bad_requests_are_one_line(steady, kept, words, said):
    words = [kept.mine.id if word == "MINE" else word for word in words]
    ended = steady("plans", "verify", *words, "--store", "plans")
    assert (ended.code, ended.out) == (2, "")
    assert said in only_line(ended.err)


def test_a_file_that_is_no_plan_cannot_be_shown_nor_verified(steady, store, kept):
    store.find(kept.mine.id).path.write_bytes(b"garbage")
    for command in ("show", "verify"):
        ended = steady("plans", command, kept.mine.id, "--store", "plans")
        assert (ended.code, ended.out) == (2, "")
        assert "digest does not match" in only_line(ended.err)


def test_a_verification_from_end_to_end(steady, store):
    """In real processes: a plan that cannot keep the tolerance it is kept for."""
    plan = _plan(precision="bf16", tolerance=1e-9)
    lower = (TransformSpec("cast_weights", (("dtype", "bf16"),)),)
    store.put(plan.key, msgspec.structs.replace(plan, candidate=lower))
    ended = steady("plans", "verify", plan.id, "--workload", "tiny.py:small", "--store", "plans")
    assert ended.code == 1
    line = only_line(ended.err)
    assert line.startswith(f"plan {plan.id} failed: relative error ")
    assert line.endswith("exceeds 1.0e-09")
    assert "round 1 of 5" in ended.out
    assert "tune again, or remove it with steady plans rm" in " ".join(ended.out.split())
