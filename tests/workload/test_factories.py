from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import cloudpickle
import pytest
import torch

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.workload.factories import call_factory, explain_missing_factory
from steadytorch.workload.serialization import load, save
from steadytorch.workload.workload import Workload

HEADER = "import torch\nfrom torch import nn\nfrom steadytorch.workload.workload import Workload\n"


class Folder:
    """A user's folder: writes files and calls a factory of the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, code: str, name: str = "model.py") -> str:
        target = self.path / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(HEADER + code)
        return str(target)

    def call(self, code: str, batch: int | None = None, train: bool = False) -> Workload:
        return call_factory(f"{self.write(code)}:factory", batch, train)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


def test_a_pair_becomes_a_workload_named_after_file_and_function(folder: Folder):
    workload = folder.call("def factory(): return nn.Linear(3, 1), torch.ones(2, 3)")
    assert (workload.name, str(workload.signature())) == ("model.py:factory", "2x3:float32")
    assert workload.model.training


def test_a_workload_is_returned_as_it_is(folder: Folder):
    workload = folder.call("def factory(): return Workload(torch.sum, torch.ones(2), {'dim': 0})")
    assert (workload.name, workload.step_function()()) == ("model.py:factory", 2)


def test_a_name_given_by_the_user_stays(folder: Folder):
    code = "def factory(): return Workload(torch.relu, torch.ones(2), name='mine')"
    assert folder.call(code).name == "mine"


def test_a_training_workload_needs_no_flag(folder: Folder):
    code = """
def factory():
    loss = lambda y: y.mean()
    return Workload.training(nn.Linear(1, 1), torch.ones(1, 1), loss, torch.optim.SGD)
"""
    assert folder.call(code).is_training
    assert folder.call(code, train=True).is_training


def test_training_asks_the_factory_for_a_training_workload(folder: Folder):
    with pytest.raises(UsageError, match=r"model\.py:factory returned a model without a loss.*: "):
        folder.call("def factory(): return nn.Linear(3, 1), torch.ones(2, 3)", train=True)


@pytest.mark.parametrize("signature", ["batch", "batch=1", "*, batch=1", "**options"])
def test_batch_is_passed_to_a_factory_that_takes_it(folder: Folder, signature: str):
    value = "options['batch']" if signature == "**options" else "batch"
    workload = folder.call(f"def factory({signature}): return nn.ReLU(), torch.ones({value})", 5)
    assert workload.inputs[0].shape == (5,)


def test_batch_is_refused_for_a_factory_that_does_not_take_it(folder: Folder):
    with pytest.raises(UsageError, match=r"batch 5 .* model\.py:factory has no argument named b"):
        folder.call("def factory(size=1): return nn.ReLU(), torch.ones(size)", 5)


def test_a_factory_that_needs_a_batch_says_so(folder: Folder):
    with pytest.raises(UsageError, match=r"model\.py:factory needs a batch size"):
        folder.call("def factory(batch): return nn.ReLU(), torch.ones(batch)")


def test_a_factory_that_needs_more_is_refused(folder: Folder):
    with pytest.raises(
        UsageError, match=r"needs arguments \(width, depth\): factories receive only batch"
    ):
        folder.call("def factory(width, depth, batch=1): return nn.ReLU(), torch.ones(1)", 2)


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        ("nn.ReLU()", "a ReLU:"),
        ("None", "a NoneType:"),
        ("(nn.ReLU(), torch.ones(1), {})", "a tuple of 3:"),
        ("(torch.ones(1), nn.ReLU())", "a tuple of 2:"),
    ],
)
def test_what_is_no_workload_is_named(folder: Folder, returned: str, seen: str):
    with pytest.raises(UsageError, match=f"factory returned {seen} a factory returns a Workload"):
        folder.call(f"def factory(): return {returned}")


def test_a_missing_factory_is_answered_with_near_ones(folder: Folder):
    with pytest.raises(
        UsageError, match=r"no factory 'factory' in model\.py \(did you mean factor"
    ):
        folder.call("def factori(): pass")


def test_a_missing_factory_is_answered_with_what_is_there(folder: Folder):
    with pytest.raises(
        UsageError, match=r"no factory 'factory' in model\.py; it defines make, Net"
    ):
        folder.call("def make(): pass\nclass Net: pass")


def test_a_factory_that_is_no_function_is_refused(folder: Folder):
    with pytest.raises(UsageError, match=r"'factory' in model\.py is a int, not a function"):
        folder.call("factory = 3")


def test_a_missing_file_is_named_with_where_it_was_looked_for(folder: Folder):
    with pytest.raises(
        UsageError, match=f"file not found: sub/model.py .* looked up from {folder.path}"
    ):
        call_factory("sub/model.py:factory", None, False)


@pytest.mark.parametrize("spec", ["model.py:", ":factory", ":"])
def test_half_a_name_is_refused(folder: Folder, spec: str):
    with pytest.raises(UsageError, match=r"is incomplete: use file\.py:factory or"):
        call_factory(spec, None, False)


def test_a_path_alone_is_told_apart_from_one_that_is_not_there(folder: Folder):
    with pytest.raises(UsageError, match="needs a factory name"):
        explain_missing_factory(folder.write(""))
    with pytest.raises(UsageError, match=r"file not found: other\.py"):
        explain_missing_factory("other.py")


def test_a_syntax_error_is_shown_with_file_and_line(folder: Folder):
    with pytest.raises(UsageError, match=r"model\.py:4: invalid syntax: def factory\(:"):
        folder.call("def factory(:")


def test_bytes_that_are_no_python_are_one_line(folder: Folder):
    (folder.path / "model.py").write_bytes(b"\x00\xff")
    with pytest.raises(UsageError) as caught:
        call_factory("model.py:factory", None, False)
    assert "model.py" in message(caught)
    assert "\n" not in message(caught)


def test_an_error_while_importing_shows_the_users_lines_alone(folder: Folder):
    with pytest.raises(UsageError) as caught:
        folder.call("def helper():\n    return 1 / 0\nhelper()")
    assert message(caught).splitlines() == [
        "model.py:factory raised ZeroDivisionError: division by zero",
        f"  {folder.path}/model.py:6 in <module>: helper()",
        f"  {folder.path}/model.py:5 in helper: return 1 / 0",
    ]


def test_an_error_in_the_factory_keeps_its_lines(folder: Folder):
    with pytest.raises(UsageError, match=r"raised ValueError: one\ntwo\n  .*:5 in factory: raise"):
        folder.call("def factory():\n    raise ValueError('one\\ntwo')")


def test_a_long_way_to_an_error_is_shortened(folder: Folder):
    code = "def deep(n): return deep(n - 1) if n else 1 / 0\ndef factory(): return deep(50)"
    with pytest.raises(UsageError) as caught:
        folder.call(code)
    lines = message(caught).splitlines()
    assert len(lines) == 8
    assert lines[4] == "  ... 46 more"


def test_leaving_the_interpreter_is_an_error_like_others(folder: Folder):
    with pytest.raises(UsageError, match="raised SystemExit: 4"):
        folder.call("raise SystemExit(4)")


def test_an_interrupt_is_not_swallowed(folder: Folder):
    with pytest.raises(KeyboardInterrupt):
        folder.call("raise KeyboardInterrupt")


def test_an_error_of_our_own_keeps_its_kind(folder: Folder):
    code = "from steadytorch.errors import UnsupportedError\nraise UnsupportedError('no such card')"
    with pytest.raises(UnsupportedError, match=r"^no such card$"):
        folder.call(code)


def test_a_broken_file_leaves_no_module_behind(folder: Folder):
    before = set(sys.modules)
    with pytest.raises(UsageError):
        folder.call("1 / 0")
    assert set(sys.modules) == before


def test_an_edited_file_is_read_again(folder: Folder):
    code = "def factory(): return nn.ReLU(), torch.ones({})"
    assert folder.call(code.format(1)).inputs[0].shape == (1,)
    assert folder.call(code.format(2)).inputs[0].shape == (2,)


def test_files_next_to_it_can_be_imported_even_late(folder: Folder):
    folder.write("def make(): return nn.ReLU()", "steady_test_late.py")
    code = "def factory():\n    import steady_test_late as s\n    return s.make(), torch.ones(1)"
    assert folder.call(code).name == "model.py:factory"


def test_threads_that_load_one_file_take_turns_and_both_travel_by_value(folder, monkeypatch):
    meeting = Barrier(2)
    monkeypatch.setattr(sys, "met", [], raising=False)

    def inside():
        try:
            meeting.wait(0.2)
            sys.met.append(True)  # type: ignore[attr-defined]
        except BrokenBarrierError:
            meeting.reset()

    monkeypatch.setattr(sys, "inside", inside, raising=False)
    spec = folder.write(
        "import sys\nsys.inside()\nclass Own(nn.Linear):\n    pass\n"
        "def factory():\n    return Own(2, 2), torch.ones(1, 2)\n"
    )
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call_factory, f"{spec}:factory", None, False) for _ in range(2)]
        workloads = [call.result() for call in calls]
    assert sys.met == []  # type: ignore[attr-defined]
    for workload in workloads:
        assert workload.model.__class__.__module__ in cloudpickle.list_registry_pickle_by_value()


def test_the_search_path_is_as_it_was(folder: Folder):
    before = list(sys.path)
    folder.call("def factory(): return nn.ReLU(), torch.ones(1)")
    with pytest.raises(UsageError):
        folder.call("1 / 0")
    assert sys.path == before


def test_a_file_shadows_no_module_of_its_name(folder: Folder):
    path = folder.write("def factory(): return torch.relu, torch.ones(1)", "torch_like.py")
    Path(path).rename(folder.path / "json.py")
    call_factory("./json.py:factory", None, False)
    assert hasattr(sys.modules["json"], "dumps")


def test_a_module_below_the_working_directory_is_found(folder: Folder):
    folder.write("", "steady_test_package/__init__.py")
    folder.write(
        "from .b import Net\ndef factory(): return Net(), torch.ones(1)", "steady_test_package/a.py"
    )
    folder.write("class Net(nn.ReLU): pass", "steady_test_package/b.py")
    workload = call_factory("steady_test_package.a:factory", None, False)
    assert workload.name == "steady_test_package.a:factory"


def test_a_module_that_is_not_there_is_one_line(folder: Folder):
    with pytest.raises(UsageError, match=f"'nowhere.at.all' is neither .* from {folder.path}"):
        call_factory("nowhere.at.all:factory", None, False)


def test_a_module_that_lacks_another_shows_which(folder: Folder):
    folder.write("import nowhere_at_all", "steady_test_lacking.py")
    with pytest.raises(UsageError, match="ModuleNotFoundError: No module named 'nowhere_at_all'\n"):
        call_factory("steady_test_lacking:factory", None, False)


def test_a_loaded_file_and_those_next_to_it_travel_by_value(folder: Folder):
    folder.write(
        "SCALE = 2.0\nclass Scaled(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x) * SCALE",
        "steady_test_layers.py",
    )
    workload = folder.call("""
from steady_test_layers import Scaled
SHIFT = 1.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = Scaled(3, 2)
    def forward(self, x): return self.scaled(x) + SHIFT
def factory(): return nn.Sequential(Net()), torch.randn(4, 3)
""")
    save(workload, folder.path / "workload.pt")
    for code in ("model.py", "steady_test_layers.py"):
        (folder.path / code).unlink()
    opened = run_elsewhere(
        "from steadytorch.workload.serialization import load; import pathlib, torch\n"
        "torch.save(load(pathlib.Path('workload.pt')).step_function()(), 'output.pt')"
    )
    assert (opened.returncode, opened.stderr) == (0, "")
    assert torch.equal(torch.load("output.pt"), workload.step_function()())


def run_elsewhere(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_can_be_imported_anyway_travels_by_name(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    path = folder.write("def factory(): return Net(), torch.ones(1)\nclass Net(nn.ReLU): pass")
    Path(path).rename(folder.path / "steady_test_installed.py")
    monkeypatch.syspath_prepend(folder.path)
    save(call_factory("steady_test_installed:factory", None, False), folder.path / "workload.pt")
    assert b"steady_test_installed" in (folder.path / "workload.pt").read_bytes()
    monkeypatch.delitem(sys.modules, "steady_test_installed")
    (folder.path / "steady_test_installed.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="steady_test_installed"):
        load(folder.path / "workload.pt")


def test_a_factory_may_bring_its_loader(folder: Folder):
    code = """
def factory(batch=2):
    loader = [(torch.ones(batch, 3), torch.zeros(batch, 1))]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return Workload.from_loader(nn.Linear(3, 1), loader, nn.functional.mse_loss, sgd)
"""
    workload = folder.call(code, batch=5, train=True)
    assert (workload.name, str(workload.signature())) == ("model.py:factory", "5x3:float32")
    save(workload, folder.path / "workload.pt")
    step = load(folder.path / "workload.pt").step_function()
    assert step() > step()


@pytest.mark.parametrize(
    "code",
    [
        "from .layers import LAYER\ndef factory(): return LAYER, torch.ones(1, 3)",
        "def factory():\n    from .layers import LAYER\n    return LAYER, torch.ones(1, 3)",
    ],
    ids=["at import", "when called"],
)
def test_relative_imports_in_a_file_name_the_way_out(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: str
):
    for name in ("steady_outer/__init__.py", "steady_outer/inner/__init__.py"):
        folder.write("", name)
    folder.write("LAYER = nn.Linear(3, 1)", "steady_outer/inner/layers.py")
    path = folder.write(code, "steady_outer/inner/model.py")
    way_out = "use steady_outer.inner.model:factory"
    with pytest.raises(UsageError) as caught:
        call_factory(f"{path}:factory", None, False)
    assert message(caught).splitlines()[0].endswith(f"relative imports need a package: {way_out}")
    monkeypatch.chdir("steady_outer")
    with pytest.raises(UsageError) as caught:
        call_factory(f"{path}:factory", None, False)
    assert message(caught).splitlines()[0].endswith(f"{way_out} and start in {folder.path}")
    monkeypatch.chdir(folder.path)
    assert call_factory("steady_outer.inner.model:factory", None, False).inputs[0].shape == (1, 3)


def test_other_failed_imports_are_left_as_they_are(folder: Folder):
    with pytest.raises(UsageError) as caught:
        folder.call("from torch import no_such_thing\ndef factory(): pass")
    assert "relative imports" not in message(caught)
