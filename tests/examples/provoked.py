"""What each example is expected to show, for the tests on a CPU and on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from steadytorch.explain.session import explain
from steadytorch.results.explain import Explanation
from steadytorch.workload.loading import load_workload

EXAMPLES = Path(__file__).parents[2] / "examples"

ON_CPU = (
    "allocation-in-loop",
    "benchmark-mode",
    "bias-before-batch-norm",
    "cpu-contention",
    "equal-groups",
    "gc-pause",
    "graph-break",
    "idle-ramp",
    "input-pipeline",
    "memory-bound",
    "memory-growth",
    "recompilation",
    "single-tensor-optimizer",
    "unfused-optimizer",
)
IN_SCRIPT = ("debug-mode", "evaluation", "idle-cores", "interpreter-lock", "script-work")
OF_RANKS = ("late-rank",)
ON_GPU = (
    "autotuning-in-loop",
    "clock-throttled",
    "copies",
    "launch-bound",
    "layout-conversion",
    "lazy-loading",
    "neighbour-process",
    "pageable-copy",
    "queue-full",
    "slow-kernels",
    "synchronisation",
    "synchronous-copy",
    "tensor-cores-unused",
)

OF_THE_MACHINE = frozenset({"cpu-contention", "clock-throttled", "neighbour-process"})
"""True of the machine that runs the tests, whatever runs on it: no example can rule them out."""
FOR_INFORMATION = frozenset({"benchmark-mode", "queue-full"})
BESIDES = {
    # A compiler makes and leaves many objects: memory to ask for and to collect.
    "recompilation": {"gc-pause", "allocation-in-loop"},
    # Comparing algorithms runs them all, loads them, gives them memory and waits for each.
    "autotuning-in-loop": {
        *("allocation-in-loop", "launch-bound", "layout-conversion", "lazy-loading"),
        *("memory-bound", "slow-kernels", "synchronisation", "tensor-cores-unused"),
    },
    # Two programs take turns on the GPU, and kernels are interrupted.
    "neighbour-process": {"slow-kernels"},
    # A synchronous copy waits for the GPU; on some hosts the GPU runs dry meanwhile.
    "synchronous-copy": {"synchronisation"},
}
"""What the same cause brings about besides, and the example's docstring or documentation says."""
OF_CODE = frozenset(
    {
        *("benchmark-mode", "bias-before-batch-norm", "equal-groups", "graph-break"),
        *("recompilation", "single-tensor-optimizer", "unfused-optimizer"),
    }
)
"""Depend on what is run. The others depend on times, and need the cores to themselves."""
OPTIONS = {
    "idle-ramp": {"pause": "25ms", "budget": "6s"},
    "lazy-loading": {"budget": "2s"},
    "memory-growth": {"budget": "6s"},
    "clock-throttled": {"budget": "4s"},
    "neighbour-process": {"budget": "4s"},
}


def path_of(finding: str) -> Path:
    """The file of the example of a finding."""
    return EXAMPLES / f"{finding.replace('-', '_')}.py"


def module_of(finding: str) -> ModuleType:
    """The example as a module."""
    path = path_of(finding)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def explained(finding: str, factory: str, device: str, budget: str = "1s") -> Explanation:
    """An example, explained in a worker process as `steady explain` does it."""
    workload = load_workload(f"{path_of(finding)}:{factory}")
    options = {"budget": budget, **OPTIONS.get(finding, {})}
    result = explain(workload, device=device, **options)
    assert result.failed is None
    assert result.steps
    return result


def ids(result: Explanation) -> set[str]:
    return {finding.id for finding in result.findings}


def unexpected(finding: str, result: Explanation) -> set[str]:
    """Findings that neither the example nor the machine accounts for."""
    allowed = OF_THE_MACHINE | FOR_INFORMATION | BESIDES.get(finding, set())
    return ids(result) - allowed - {finding}


def format_findings(result: Explanation) -> str:
    """All findings with their evidence, for the message of a failed test."""
    return "\n".join(f"{f.id}: {f.title}; {'; '.join(f.evidence)}" for f in result.findings)


def could_not_tell(finding: str, result: Explanation) -> str | None:
    """Why the rule abstained; None where it could tell."""
    return next((a.why for a in result.abstained if a.rule == finding), None)
