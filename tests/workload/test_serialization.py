from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from steadytorch.workload import serialization
from steadytorch.workload.workload import Workload

SAVE = """
import functools, pathlib, torch
from torch import nn
from steadytorch.workload.serialization import save
from steadytorch.workload.workload import Workload

torch.manual_seed(0)
GAIN = 3.0
main = "a name that the opening process uses too"

def gain(x):
    assert main.startswith("a name")
    return x * GAIN

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return gain(self.linear(x))

target = torch.randn(2, 4)
workload = Workload.training(
    nn.Sequential(Block()),
    torch.randn(2, 4),
    lambda output: (output - target).square().mean(),
    functools.partial(torch.optim.SGD, lr=0.1),
)
save(workload, pathlib.Path("workload.pt"))
step = workload.step_function()
print(*[step().item() for _ in range(3)])
"""
OPEN = """
import pathlib, torch
from steadytorch.workload.serialization import load

def main():
    workload = load(pathlib.Path("workload.pt"))
    {change}
    step = workload.step_function()
    print(*[step().item() for _ in range(3)])

main()
"""


def python(directory: Path, code: str, *, as_input: bool = False) -> str:
    """Output of a fresh interpreter for code passed in either way."""
    done = subprocess.run(
        [sys.executable, "-"] if as_input else [sys.executable, "-c", code],
        input=code if as_input else "",
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where a `-c` script saved its workload, and its losses."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, python(folder, SAVE)


def test_a_model_of_the_main_script_trains_alike_elsewhere(saved: tuple[Path, str]):
    folder, losses = saved
    assert python(folder, OPEN.format(change="")) == losses


@pytest.mark.slow
def test_a_model_of_a_script_on_standard_input_trains_alike_elsewhere(tmp_path: Path):
    losses = python(tmp_path, SAVE, as_input=True)
    assert python(tmp_path, OPEN.format(change="")) == losses


@pytest.mark.slow
def test_what_came_by_value_can_be_captured_whole(saved: tuple[Path, str]):
    folder, losses = saved
    compiled = "torch.compile(workload.model, backend='eager', fullgraph=True)"
    change = f"workload = workload.with_model({compiled})"
    assert python(folder, OPEN.format(change=change)) == losses


@pytest.mark.slow
def test_a_module_that_came_by_value_is_one_with_its_functions(tmp_path: Path):
    (tmp_path / "layers.py").write_text("SCALE = 2.0\ndef scaled(x): return x * SCALE\n")
    python(
        tmp_path,
        "import cloudpickle, layers, pathlib, torch\n"
        "from steadytorch.workload.serialization import save\n"
        "from steadytorch.workload.workload import Workload\n"
        "cloudpickle.register_pickle_by_value(layers)\n"
        "save(Workload(lambda x: layers.scaled(x), torch.ones(1)), pathlib.Path('workload.pt'))",
    )
    (tmp_path / "layers.py").unlink()
    printed = python(
        tmp_path,
        "import pathlib, sys\n"
        "from steadytorch.workload.serialization import load\n"
        "workload = load(pathlib.Path('workload.pt'))\n"
        "sys.modules['layers'].SCALE = 5.0\n"
        "print(workload.step_function()().item())",
    )
    assert printed == "5.0\n"


def test_code_within_an_importable_module_leaves_it_alone(tmp_path: Path):
    printed = python(
        tmp_path,
        "import functools, json, pathlib, torch, types\n"
        "from steadytorch.workload.serialization import load, save\n"
        "from steadytorch.workload.workload import Workload\n"
        "inner = eval('lambda x: x + len(dumps([]))', json.__dict__)\n"
        "save(Workload(inner, torch.ones(1)), pathlib.Path('workload.pt'))\n"
        "import sys; before = sys.modules['json']\n"
        "print(load(pathlib.Path('workload.pt')).step_function()().item())\n"
        "print(sys.modules['json'] is before)",
    )
    assert printed == "3.0\nTrue\n"


def test_a_module_with_a_type_of_its_own_travels_by_name(tmp_path: Path):
    """As in many scripts: `import torch.backends.cudnn as cudnn`."""
    printed = python(
        tmp_path,
        "import pathlib, torch\n"
        "import torch.backends.cudnn as cudnn\n"
        "from steadytorch.workload.serialization import load, save\n"
        "from steadytorch.workload.workload import Workload\n"
        "def model(x):\n"
        "    return x + int(isinstance(cudnn.enabled, bool))\n"
        "save(Workload(model, torch.ones(1)), pathlib.Path('workload.pt'))\n"
        "print(load(pathlib.Path('workload.pt')).step_function()().item())",
    )
    assert printed == "2.0\n"


def test_a_loader_of_the_main_script_travels_along(tmp_path: Path):
    printed = python(
        tmp_path,
        "import pathlib, torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "from steadytorch.workload.serialization import save\n"
        "from steadytorch.workload.workload import Workload\n"
        "class Squares(Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, place): return torch.tensor(float(place**2))\n"
        "workload = Workload.from_loader(torch.neg, DataLoader(Squares(), batch_size=2))\n"
        "save(workload, pathlib.Path('workload.pt'))\n"
        "step = workload.step_function()\n"
        "print(*[step().tolist() for _ in range(4)])",
    )
    change = "step = workload.step_function(); print(*[step().tolist() for _ in range(4)]); return"
    assert python(tmp_path, OPEN.format(change=change)) == printed
    assert printed.split("] [")[1] == "-4.0, -9.0"


@pytest.mark.slow
def test_workers_of_a_loader_that_came_by_value_are_started_where_it_is_opened(tmp_path: Path):
    python(
        tmp_path,
        "import pathlib, torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "from steadytorch.workload.serialization import save\n"
        "from steadytorch.workload.workload import Workload\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, place): return torch.tensor(float(place))\n"
        "loader = DataLoader(Numbers(), batch_size=2, num_workers=1)\n"
        "save(Workload.from_loader(torch.neg, loader), pathlib.Path('workload.pt'))\n",
    )
    change = "step = workload.step_function(); print(*[step().tolist() for _ in range(3)]); return"
    printed = python(tmp_path, OPEN.format(change=change))
    assert printed == "[-0.0, -1.0] [-2.0, -3.0] [-0.0, -1.0]\n"


def test_modules_of_a_model_are_those_that_its_layers_are_imported_from(tmp_path: Path):
    (tmp_path / "layers.py").write_text("from torch import nn\nclass Layer(nn.Identity): pass\n")
    printed = python(
        tmp_path,
        "import layers, sys, torch, types\n"
        "from steadytorch.workload.serialization import modules_of\n"
        "from steadytorch.workload.workload import Workload\n"
        "class Own(torch.nn.Module): pass\n"
        "class Lost(torch.nn.Module): __module__ = None\n"
        "sys.modules['made'] = made = types.ModuleType('made')\n"
        "exec('class Here(__import__(\"torch\").nn.Module): pass', made.__dict__)\n"
        "inner = torch.nn.Sequential(layers.Layer(), torch.nn.ReLU(), Own(), Lost(), made.Here())\n"
        "print(*modules_of(Workload(inner, torch.ones(1))))\n"
        "print(modules_of(Workload(torch.neg, torch.ones(1))))",
    )
    assert printed == "layers torch.nn.modules.activation torch.nn.modules.container\n[]\n"


class Squared(nn.Module):
    def forward(self, x):
        return x.square()


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.bias


def _gradients(workload: Workload) -> list[torch.Tensor]:
    workload.model(*workload.inputs).sum().backward()
    return [parameter.grad for parameter in workload.model.parameters()]


def test_parametrized_layers_are_the_same_when_opened(tmp_path: Path):
    normed, shifted = parametrizations.weight_norm(nn.Linear(4, 4)), Shifted(4, 4)
    for name in ("weight", "bias", "weight"):
        parametrize.register_parametrization(shifted, name, Squared())
    others = [copy.deepcopy(normed), parametrizations.spectral_norm(nn.Linear(4, 4)), shifted]
    model = nn.Sequential(normed, *others, normed).eval()
    given = Workload(model, torch.randn(2, 4))
    serialization.save(given, tmp_path / "workload.pt")
    opened = serialization.load(tmp_path / "workload.pt")
    assert opened.model[0] is opened.model[-1]
    assert opened.model[0] is not normed
    assert all(map(parametrize.is_parametrized, opened.model))
    torch.testing.assert_close(opened.model(*opened.inputs), model(*given.inputs), rtol=0, atol=0)
    torch.testing.assert_close(_gradients(opened), _gradients(given), rtol=0, atol=0)
