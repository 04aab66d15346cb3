"""What users may rely on; a change here is a change of the interface, and belongs in a release."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import steadytorch

NAMES = [
    "__version__",
    "Plan",
    "PlanError",
    "SteadyError",
    "UnsupportedError",
    "UsageError",
    "Workload",
    "benchmark_mode",
    "compare",
    "conv",
    "doctor",
    "explain",
    "export_plans",
    "gate",
    "import_plans",
    "judge",
    "load_plan",
    "load_workload",
    "measure",
    "optimize",
    "prefetch",
    "report",
    "reverify",
    "summarize",
    "track",
    "tune",
    "tune_modules",
    "watch",
]

SIGNATURES = {
    "Workload": (
        "(model: 'Any', inputs: 'Any' = (), kwargs: 'Mapping[str, Any]' = <factory>, "
        "name: 'str' = '', training_step: 'TrainingStep | None' = None, untouched: 'Any' = None, "
        "feed: 'Feed | None' = None) -> None"
    ),
    "Workload.training": (
        "(model: 'nn.Module', inputs: 'Any', loss: 'Loss', "
        "optimizer: 'torch.optim.Optimizer | OptimizerFactory', *, "
        "targets: 'Any' = (), kwargs: 'Mapping[str, Any] | None' = None, "
        "name: 'str' = '') -> 'Workload'"
    ),
    "Workload.from_loader": (
        "(model: 'Any', loader: 'Iterable[Any]', loss: 'TargetLoss | None' = None, "
        "optimizer: 'torch.optim.Optimizer | OptimizerFactory | None' = None, *, "
        "name: 'str' = '') -> 'Workload'"
    ),
    "Plan.apply": (
        "(self, model: 'nn.Module', *, alias_outputs: 'bool' = False, "
        "bundle: 'bool' = False, verify_every: 'int | None' = None, "
        "agree: 'bool' = True, group: 'Any' = None) -> 'TunedModule'"
    ),
    "Plan.batches": (
        "(self, loader: 'Iterable[BatchT]', device: 'str | torch.device | None' = None) "
        "-> 'Iterable[BatchT]'"
    ),
    "compare": (
        "(a: 'Workload | tuple[Any, Any] | str | Path', "
        "b: 'Workload | tuple[Any, Any] | str | Path', *, "
        "candidates: 'tuple[Candidate, Candidate]' = ((), ()), processes: 'int' = 1, "
        "metric: 'str' = 'latency', device: 'str | None' = None, seed: 'int' = 0, "
        "budget: 'str | float' = '5m', "
        "progress: 'Callable[[str], None]' = PROGRESS) -> 'CompareResult'"
    ),
    "conv": (
        "(workload: 'Workload | tuple[Any, Any]', *, candidate: 'Candidate' = (), "
        "budget: 'str | float' = '60s', "
        "deterministic: 'bool' = False, device: 'str | None' = None, "
        "store: 'Store | str | Path | None' = None, "
        "progress: 'Callable[[str], None]' = PROGRESS) -> 'ConvReport'"
    ),
    "doctor": "(device: 'str' = 'auto', plugins: 'bool' = False) -> 'CheckUp'",
    "explain": (
        "(subject: 'Workload | tuple[Any, Any] | str | Path | TracePaths', *, "
        "device: 'str | None' = None, budget: 'str | float' = '20s', steps: 'int' = 5, "
        "pause: 'str | float | None' = None, "
        "candidate: 'Candidate' = (), "
        "progress: 'Callable[[str], None]' = PROGRESS) -> 'Explanation | RankComparison'"
    ),
    "optimize": (
        "(model: 'nn.Module', mode: 'str' = 'replay', *, store: 'str | Path | None' = None, "
        "objective: 'str' = 'auto', precision: 'str' = 'same', "
        "tolerance: 'float | None' = None, budget: 'str | float' = '3m', "
        "max_memory: 'str | int | None' = None, background: 'bool' = False, "
        "buckets: 'Mapping[str, Any] | None' = None, canary: 'bool' = True, "
        "verify_every: 'int | None' = None, alias_outputs: 'bool' = False, "
        "bundle: 'bool' = False, seed: 'int' = 0, "
        "agree: 'bool' = True, group: 'Any' = None) -> 'TunedModule'"
    ),
    "gate": (
        "(workloads: 'Sequence[str]', *, base: 'str', folder: 'str | Path' = '.', "
        "base_env: 'str | None' = None, install: 'bool' = False, threshold: 'float' = 0.01, "
        "processes: 'int' = 40, budget: 'str | float | None' = None, metric: 'str' = 'latency', "
        "batch: 'int | None' = None, inputs: 'Sequence[str]' = (), train: 'bool' = False, "
        "device: 'str' = 'auto', seed: 'int' = 0, "
        "progress: 'Callable[[str], None]' = PROGRESS) -> 'GateResult'"
    ),
    "track": "(paths: 'Sequence[str | Path]') -> 'TrackResult'",
    "benchmark_mode": "(on: 'bool' = True, *, limit: 'int' = 10) -> 'None'",
    "prefetch": (
        "(loader: 'Iterable[BatchT]', device: 'str | torch.device | None' = None) "
        "-> 'Prefetched[BatchT]'"
    ),
    "export_plans": (
        "(path: 'str | os.PathLike[str]', ids: 'Sequence[str]' = (), "
        "store: 'str | os.PathLike[str] | None' = None) -> 'list[Stored]'"
    ),
    "import_plans": (
        "(path: 'str | os.PathLike[str]', store: 'str | os.PathLike[str] | None' = None) "
        "-> 'list[Imported]'"
    ),
    "reverify": (
        "(plan: 'Plan', workload: 'Workload | tuple[Any, Any]', *, device: 'str | None' = None, "
        "processes: 'int' = 5, seed: 'int' = 0, "
        "progress: 'Callable[[str], None]' = PROGRESS) -> 'Reverified'"
    ),
    "judge": (
        "(pairs: 'Sequence[tuple[float, float]]', *, "
        "looks: 'Sequence[int]' = (12, 18, 27, 40, 60), "
        "alpha: 'float' = 0.01, tie: 'float' = 0.005) -> 'Judgement'"
    ),
    "load_plan": "(path: 'str | Path') -> 'Plan'",
    "load_workload": (
        "(spec: 'str', *, batch: 'int | None' = None, inputs: 'Sequence[str]' = (), "
        "device: 'str' = 'cpu', train: 'bool' = False, seed: 'int' = 0) -> 'Workload'"
    ),
    "measure": (
        "(workload: 'Workload | tuple[Any, Any]', *, processes: 'int' = 1, "
        "budget: 'str | float' = '20s', "
        "device: 'str | None' = None, candidate: 'Candidate' = (), "
        "progress: 'Callable[[str], None]' = PROGRESS) -> 'MeasureResult'"
    ),
    "report": (
        "(result: 'str | Path', output: 'str | Path | None' = None, *, "
        "other: 'str | Path | None' = None, embed: 'bool' = False) -> 'Path'"
    ),
    "summarize": (
        "(samples_ns: 'Sequence[int]', metric: 'str' = 'period', *, "
        "causes: 'Mapping[int, str] | None' = None) -> 'Measurement'"
    ),
    "tune": (
        "(workload: 'Workload | tuple[Any, Any]', *, objective: 'str' = 'auto', "
        "precision: 'str' = 'same', "
        "tolerance: 'float | None' = None, budget: 'str | float' = '3m', "
        "max_memory: 'str | int | None' = None, device: 'str | None' = None, "
        "devices: 'str | Sequence[str] | None' = None, "
        "store: 'str | Path | None' = None, mode: 'str' = 'replay', seed: 'int' = 0, "
        "bundle: 'bool' = False, watcher: 'ProgressListener | None' = None, "
        "agree: 'bool' = True, group: 'Any' = None) -> 'Plan'"
    ),
    "tune_modules": (
        "(pipe: 'Any', call: 'Callable[[], Any]', *, objective: 'str' = 'auto', "
        "precision: 'str' = 'same', tolerance: 'float | None' = None, "
        "budget: 'str | float' = '3m', max_memory: 'str | int | None' = None, "
        "store: 'str | Path | None' = None, mode: 'str' = 'replay', "
        "least_share: 'float' = 0.05, seed: 'int' = 0, bundle: 'bool' = False) -> 'TunedPipeline'"
    ),
    "watch": (
        "(loader: 'Iterable[T] | None' = None, *, live: 'bool | None' = None, "
        "keep_slow: 'int' = 0, traces: 'str | Path' = 'steady-traces') -> 'Watch[T]'"
    ),
}

EXIT_CODES = {"SteadyError": 1, "UsageError": 2, "UnsupportedError": 3, "PlanError": 2}

PLAN_FIELDS = (
    *("name", "signature", "candidate", "evidence", "key", "created", "version", "path"),
    *("trains", "libraries", "compiler"),
)
PLAN_EXTRAS = ("apply", "batches", "id", "origin", "resolve")

HEAVY = ("torch", "numpy", "scipy", "rich", "plotly", "jinja2")


def _resolved(dotted):
    found = steadytorch
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def test_the_names_are_these():
    assert steadytorch.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name):
    found = getattr(steadytorch, name)
    assert getattr(found, "__name__", name) == name


def test_the_names_are_listed():
    assert set(NAMES) <= set(dir(steadytorch))


def test_star_import_gives_all_of_them():
    space = {}
    exec("from steadytorch import *", space)
    assert set(NAMES) <= space.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="optimise"):
        steadytorch.optimise  # noqa: B018


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_frozen(name):
    shown = re.sub(r"<function .*? at 0x\w+>", "PROGRESS", str(inspect.signature(_resolved(name))))
    assert shown == SIGNATURES[name]


def test_functions_are_not_hidden_by_the_rooms_of_their_name():
    import steadytorch.measure.race
    import steadytorch.tune.session

    assert inspect.isfunction(steadytorch.measure)
    assert inspect.isfunction(steadytorch.tune)
    assert inspect.isfunction(steadytorch.report)


def test_a_page_needs_no_pytorch():
    code = "import steadytorch.report.html, steadytorch.report.pages, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in found.stdout.split()


def test_every_callable_has_a_frozen_signature():
    errors = {*EXIT_CODES, "Plan"}  # a Plan is made by tune and load_plan, not by its constructor
    callables = {name for name in NAMES if callable(getattr(steadytorch, name))}
    assert callables - errors == {name for name in SIGNATURES if "." not in name}


@pytest.mark.parametrize("name", EXIT_CODES)
def test_errors_are_of_one_tree_and_keep_their_exit_codes(name):
    kind = getattr(steadytorch, name)
    assert issubclass(kind, steadytorch.SteadyError)
    assert kind.exit_code == EXIT_CODES[name]


def test_the_fields_of_a_plan_are_frozen():
    assert steadytorch.Plan.__struct_fields__ == PLAN_FIELDS
    assert all(hasattr(steadytorch.Plan, name) for name in PLAN_EXTRAS)


@pytest.mark.parametrize(
    "code",
    [
        "import steadytorch",
        "from steadytorch.cli import steady; steady.main(['--help'], standalone_mode=False)",
        "from steadytorch.cli import steady; steady.main(['--version'], standalone_mode=False)",
        *(
            f"from steadytorch.cli import steady; steady.main({words}, standalone_mode=False)"
            for words in (
                *(["tune", "--help"], ["plans", "--help"], ["doctor", "-h"], ["demo", "-h"]),
                *(["measure", "--help"], ["compare", "--help"], ["report", "--help"]),
                *(["gate", "--help"], ["track", "--help"]),
            )
        ),
    ],
    ids=[
        "import",
        "help",
        "version",
        "tune",
        "plans",
        "doctor",
        "demo",
        "measure",
        "compare",
        "report",
        "gate",
        "track",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('loaded', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(found.stdout.rpartition("loaded")[2].split())
    assert "steadytorch" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_modules_that_are_looked_for_are_the_ones_that_get_loaded():
    found = subprocess.run(
        [sys.executable, "-c", "import steadytorch.tune.session, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"torch", "numpy"} <= set(found.stdout.split())
