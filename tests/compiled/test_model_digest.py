from __future__ import annotations

import copy
import enum
import functools
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadytorch.compiled import model_digest
from steadytorch.compiled.model_digest import changed_source, digest, sources_of
from steadytorch.errors import UnsupportedError
from steadytorch.workload.loading import load_workload


class Kind(enum.Enum):
    A = 1
    B = 2


class Config:
    def __init__(self, width=4):
        self.width = width


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4), persistent=False)
        self.loose = torch.ones(2, dtype=torch.float16)
        self.scale, self.names, self.kind = 2.0, ["a", {"b": (1, None)}, {1, 2}], Kind.A
        self.config, self.array = Config(), np.arange(3)
        self.activation = F.relu
        self.partial = functools.partial(F.softmax, dim=-1)
        self.inner = lambda x, by=3: x * by
        self.bound = self.config.__init__
        self.type, self.device = torch.float32, torch.device("cpu")


def _edit(tensor):
    with torch.no_grad():
        tensor.flatten()[0] += 1


CHANGES = {
    "a weight": lambda net: _edit(net.linear.weight),
    "a running mean": lambda net: _edit(net.norm.running_mean),
    "a buffer that is not saved": lambda net: _edit(net.table),
    "a tensor that is no buffer": lambda net: _edit(net.loose),
    "a number": lambda net: setattr(net, "scale", 2.0000001),
    "a zero's sign": lambda net: setattr(net.norm, "eps", -0.0),
    "something deep in a container": lambda net: net.names[1].update(b=(1, 0)),
    "a set": lambda net: net.names[2].add(3),
    "an enumeration": lambda net: setattr(net, "kind", Kind.B),
    "an attribute of an object": lambda net: setattr(net.config, "width", 5),
    "an array": lambda net: net.array.__setitem__(0, 7),
    "a function": lambda net: setattr(net, "activation", F.gelu),
    "an argument of a partial": lambda net: setattr(net, "partial", functools.partial(F.softmax)),
    "a lambda": lambda net: setattr(net, "inner", lambda x, by=3: x + by),
    "a default of a lambda": lambda net: setattr(net, "inner", lambda x, by=4: x * by),
    "an element type": lambda net: setattr(net, "type", torch.float64),
    "a type of a weight": lambda net: net.linear.double(),
    "the mode": lambda net: net.train(),
    "a layer": lambda net: setattr(net, "linear", nn.Identity()),
    "a new attribute": lambda net: setattr(net, "more", None),
    "a shape": lambda net: setattr(net, "loose", net.loose.view(1, 2)),
}


@pytest.fixture
def net():
    return Net().eval()


def test_equal_contents_have_one_digest(net):
    assert digest(net) == digest(net) == digest(Net().eval()) == digest(copy.deepcopy(net))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_anything_is_seen(net, change):
    before = digest(net)
    CHANGES[change](net)
    assert digest(net) != before


def test_layout_and_device_attributes_are_not_contents(net):
    conv = nn.Conv2d(3, 4, 3)
    assert digest(copy.deepcopy(conv).to(memory_format=torch.channels_last)) == digest(conv)
    before = digest(net)
    net.device = torch.device("meta")
    assert digest(net) == before


def test_tied_weights_differ_from_equal_ones():
    tied, equal = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None
    tied[1].weight = tied[0].weight
    equal = copy.deepcopy(tied)
    equal[1].weight = nn.Parameter(tied[0].weight.detach().clone())
    assert digest(tied) != digest(equal)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.int8])
def test_any_element_type_has_a_digest(dtype):
    module = nn.Module()
    module.register_buffer("b", torch.ones(3, 2).to(dtype).t())
    other = nn.Module()
    other.register_buffer("b", torch.ones(2, 3).to(dtype))
    assert digest(module) == digest(other)


def test_no_dimension_no_element_and_no_tensor_have_one():
    module = nn.Module()
    empty = digest(module)
    module.register_buffer("a", torch.tensor(1.0))
    module.register_buffer("b", torch.ones(0, 3))
    assert digest(module) != empty


def test_pieces_are_the_same_bytes_however_they_are_cut(net, monkeypatch):
    whole = digest(net)
    monkeypatch.setattr(model_digest, "CHUNK_BYTES", 20)
    assert digest(net) == whole


@pytest.mark.slow
def test_another_process_finds_the_same(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.linear, self.names = nn.Linear(2, 2), {'a', 'b', 'c', 'd'}\n"
        "        self.inner = lambda x: x in {'a', 'b', 'c'}\n"
    )
    program = (
        "from net import Net; from steadytorch.compiled.model_digest import digest; "
        "print(digest(Net()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(model_digest.__file__).parents[2])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


READING = """
import json
from dataclasses import dataclass
import torch
from torch import nn
from config import CONFIG, SCALE, other
@dataclass
class Options:
    width: float = CONFIG["width"]
OPTIONS, TABLE, LAYER = Options(), torch.full((2,), CONFIG["table"]), nn.Linear(2, 2, bias=False)
with torch.no_grad():
    LAYER.weight.fill_(CONFIG["weight"])
def factor(by=CONFIG["default"]):
    return by
class Net(nn.Module):
    power = CONFIG["class"]
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        scale = SCALE["a"]["b"] + OPTIONS.width + self.power + factor() + other.LIMIT
        return LAYER(self.linear(x)) * scale + TABLE + (1 if "x" in {"x", "y"} else 0)
"""


def test_what_forward_reads_elsewhere_is_part_of_the_contents(tmp_path):
    (tmp_path / "net.py").write_text(READING)
    (tmp_path / "other.py").write_text("import config\nLIMIT = config.CONFIG['limit']\n")
    (tmp_path / "config.py").write_text(
        "import json, sys\nCONFIG = json.loads(sys.argv[1])\nSCALE = {'a': {'b': CONFIG['deep']}}\n"
        "import other\n"
    )
    program = (
        "from net import Net; from steadytorch.compiled.model_digest import digest; "
        "print(digest(Net()))"
    )
    names = ("width", "table", "weight", "default", "class", "limit", "deep")

    def found(seed, **changed):
        values = json.dumps({**dict.fromkeys(names, 1.0), **changed})
        paths = {"PYTHONPATH": str(Path(model_digest.__file__).parents[2]), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program, values]
        return subprocess.run(
            command, cwd=tmp_path, env=paths, capture_output=True, check=True, text=True
        ).stdout

    assert found("1") == found("2")
    assert len({found("1", **{name: 2.0}) for name in names} | {found("1")}) == 1 + len(names)


def test_a_model_that_reads_the_environment_is_not_compared():
    class Reading(nn.Module):
        def forward(self, x):
            return x * float(os.environ.get("SCALE", "1"))

    with pytest.raises(UnsupportedError, match="reads the environment"):
        digest(Reading())


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        (lambda net: setattr(net, "lock", threading.Lock()), "holds a lock"),
        (lambda net: setattr(net, "items", iter([])), "holds a list_iterator"),
        (lambda net: net.linear.register_forward_hook(lambda *a: None), "a module has a hook"),
        (lambda net: net.register_forward_pre_hook(lambda *a: None), "a module has a hook"),
        (lambda net: setattr(net, "loose", torch.ones(2).to_sparse()), "cannot be compared"),
        (lambda net: setattr(net, "loose", torch.ones(2, device="meta")), "cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_a_reason(net, hold, reason):
    hold(net)
    with pytest.raises(UnsupportedError, match=reason):
        digest(net)


def test_a_hook_on_all_modules_is_a_reason(net):
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        with pytest.raises(UnsupportedError, match="a module has a hook"):
            digest(net)
    finally:
        handle.remove()


def test_a_model_with_too_many_objects_is_a_reason(net, monkeypatch):
    monkeypatch.setattr(model_digest, "MOST_OBJECTS", 10)
    with pytest.raises(UnsupportedError, match="more than 10 objects"):
        digest(net)


def test_a_cycle_of_references_ends(net):
    net.names.append(net.names)
    net.me = (net,)
    assert digest(net) == digest(net)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module on disk whose function uses another module and a global variable."""
    (tmp_path / "helper_of_it.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "program_of_it.py").write_text(
        "from helper_of_it import double\n"
        "OFFSET, TABLE = 1, []\n"
        "def forward(x):\n    return double(x) + OFFSET + len(TABLE)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("program_of_it")
    for name in ("program_of_it", "helper_of_it"):
        sys.modules.pop(name, None)


def test_sources_are_the_files_that_ran_outside_of_pytorch(program):
    sources = sources_of(functools.partial(program.forward, torch.ones(1)))
    assert set(sources) == {"program_of_it.py", "program_of_it.py:OFFSET", "helper_of_it.py"}
    assert changed_source(sources) is None
    assert sys.getprofile() is None


@pytest.mark.parametrize("name", ["program_of_it", "helper_of_it"])
def test_an_edited_file_is_another_source(program, tmp_path, name):
    sources = sources_of(functools.partial(program.forward, 1))
    file = tmp_path / f"{name}.py"
    file.write_text(file.read_text() + "\n")
    assert changed_source(sources) == f"{name}.py"
    file.unlink()
    assert changed_source(sources) == f"{name}.py"


def test_a_variable_of_another_value_is_another_source(program):
    sources = sources_of(functools.partial(program.forward, 1))
    program.OFFSET = 1.0
    assert changed_source(sources) == "program_of_it.py:OFFSET"


def test_a_module_that_is_not_loaded_yet_is_found(program):
    sources = sources_of(functools.partial(program.forward, 1))
    del sys.modules["helper_of_it"]
    assert changed_source(sources) is None
    assert changed_source({"no_such_module_of_it": "0"}) == "no_such_module_of_it"


def test_a_file_is_the_same_however_it_is_loaded(tmp_path, monkeypatch):
    """Plans of a factory loaded by its path are served where its file is imported or run."""
    (tmp_path / "net_of_it.py").write_text(
        "import torch\nfrom torch import nn\nSCALE = 2.0\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.kept = [Net.forward]\n"
        "    def forward(self, x):\n        return SCALE * x\n"
        "def factory():\n    return Net(), torch.ones(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    by_path = load_workload(f"{tmp_path}/net_of_it.py:factory", device="cpu").module
    kept, sources = digest(by_path), sources_of(functools.partial(by_path, torch.ones(1)))
    before = {name for name in sys.modules if name.startswith("steady_net_of_it")}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    imported = importlib.import_module("net_of_it")
    monkeypatch.delitem(sys.modules, "net_of_it")
    monkeypatch.setitem(sys.modules, "net_of_it", imported)
    assert digest(imported.Net()) == kept
    assert changed_source(sources) is None
    imported.SCALE = 3.0
    assert changed_source(sources) == "net_of_it.py:SCALE"


def test_modules_of_packages_keep_their_names(tmp_path, monkeypatch):
    """Two packages may each have a module with one name and a class with one name."""
    for package in ("one_of_it", "two_of_it"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "nets.py").write_text(
            "from torch import nn\nclass Net(nn.Module):\n    pass\n"
        )
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    one, two = (importlib.import_module(f"{name}_of_it.nets") for name in ("one", "two"))
    assert digest(one.Net()) != digest(two.Net())


def test_code_without_a_file_is_a_reason():
    space: dict = {"__name__": "typed"}
    exec("def typed(x):\n    return x\n", space)
    with pytest.raises(UnsupportedError, match="has no file: <string>"):
        sources_of(functools.partial(space["typed"], 1))
    assert sys.getprofile() is None


def test_code_of_a_dataclass_is_that_of_the_module_which_declares_it(program, tmp_path):
    (tmp_path / "output_of_it.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Output:\n    value: int = 0\n"
    )
    made = importlib.import_module("output_of_it")
    sources = sources_of(functools.partial(made.Output, 1))
    assert set(sources) == {"output_of_it.py"}
    assert changed_source(sources) is None


def test_code_generated_by_torch_fx_is_not_a_source():
    traced = torch.fx.symbolic_trace(nn.ReLU())
    assert sources_of(functools.partial(traced, torch.ones(1))) == {}


def test_exceptions_of_the_call_propagate():
    with pytest.raises(ZeroDivisionError):
        sources_of(lambda: 1 / 0)
    assert sys.getprofile() is None


def test_a_model_sent_to_a_worker_has_the_same_contents(net):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert digest(pickle.loads(pickle.dumps(module))) == digest(module)
