"""Benchmark mode for PyTorch workloads: measure, verify, store and replay execution plans."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from steadytorch.results.shown import show_with

__version__ = "0.1.0"

_EXPORTS = {
    "Plan": "serve.plan",
    "PlanError": "errors",
    "SteadyError": "errors",
    "UnsupportedError": "errors",
    "UsageError": "errors",
    "Workload": "workload.workload",
    "benchmark_mode": "runtime.benchmark_mode",
    "compare": "bench.compare",
    "conv": "tune.engines",
    "doctor": "doctor",
    "explain": "explain.session",
    "export_plans": "serve.exchange",
    "import_plans": "serve.exchange",
    "gate": "bench.gate",
    "judge": "measure.race",
    "load_plan": "serve.plan",
    "load_workload": "workload.loading",
    "measure": "bench.measure",
    "optimize": "tune.optimize",
    "prefetch": "runtime.prefetch",
    "report": "report.html",
    "reverify": "tune.reverify",
    "summarize": "measure.measurement",
    "track": "bench.track",
    "tune": "tune.session",
    "tune_modules": "tune.modules",
    "watch": "watching.watch",
}

__all__ = [  # noqa: RUF022 - the version first, then the names in order
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

if TYPE_CHECKING:
    from steadytorch.bench.compare import compare
    from steadytorch.bench.gate import gate
    from steadytorch.bench.measure import measure
    from steadytorch.bench.track import track
    from steadytorch.doctor import doctor
    from steadytorch.errors import PlanError, SteadyError, UnsupportedError, UsageError
    from steadytorch.explain.session import explain
    from steadytorch.measure.measurement import summarize
    from steadytorch.measure.race import judge
    from steadytorch.report.html import report
    from steadytorch.runtime.benchmark_mode import benchmark_mode
    from steadytorch.runtime.prefetch import prefetch
    from steadytorch.serve.exchange import export_plans, import_plans
    from steadytorch.serve.plan import Plan, load_plan
    from steadytorch.tune.engines import conv
    from steadytorch.tune.modules import tune_modules
    from steadytorch.tune.optimize import optimize
    from steadytorch.tune.reverify import reverify
    from steadytorch.tune.session import tune
    from steadytorch.watching.watch import watch
    from steadytorch.workload.loading import load_workload
    from steadytorch.workload.workload import Workload


def __getattr__(name: str) -> Any:
    """Imports public names on first use, because importing PyTorch takes seconds."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'steadytorch' has no attribute {name!r}")
    value = getattr(import_module(f"steadytorch.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Stops submodule imports from overwriting public functions that have the same name.

    Without this class, importing `steadytorch.tune.session` would overwrite the function
    `steadytorch.tune`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _as_text(result: Any) -> str:
    """Renders a result as text; the renderer is imported only when a result is shown."""
    from steadytorch.report.shown import as_text

    return as_text(result)


def _as_html(result: Any) -> str:
    """Renders a result as HTML; the renderer is imported only when a notebook shows a result."""
    from steadytorch.report.shown import as_html

    return as_html(result)


show_with(_as_text, _as_html)
