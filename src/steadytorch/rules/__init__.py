"""Registry of the diagnostic rules; resolves overlaps between their findings.

Rules are registered by priority: specific rules claim time before general ones, so that a pageable
copy is not counted again under `copies`.
"""

from __future__ import annotations

import logging

import msgspec

from steadytorch.errors import one_line
from steadytorch.findings.finding import Abstention, Case, Finding, Rule
from steadytorch.ledger.ledger import Ledger
from steadytorch.rules import (
    allocation_in_loop,
    autotuning_in_loop,
    benchmark_mode,
    bias_before_batch_norm,
    clock_throttled,
    copies,
    cpu_contention,
    debug_mode,
    equal_groups,
    evaluation,
    gc_pause,
    graph_break,
    idle_cores,
    idle_ramp,
    input_pipeline,
    interpreter_lock,
    late_rank,
    launch_bound,
    layout_conversion,
    lazy_loading,
    memory_bound,
    memory_growth,
    neighbour_process,
    pageable_copy,
    queue_full,
    recompilation,
    script_work,
    single_tensor_optimizer,
    slow_kernels,
    synchronisation,
    synchronous_copy,
    tensor_cores_unused,
    unfused_optimizer,
)
from steadytorch.traces.events import Trace
from steadytorch.traces.quality import quality

__all__ = ["REGISTRY", "findings"]

logger = logging.getLogger(__name__)

REGISTRY: dict[str, Rule] = {
    module.NAME: module.rule
    for module in (
        pageable_copy,
        synchronous_copy,
        copies,
        recompilation,
        graph_break,
        lazy_loading,
        autotuning_in_loop,
        benchmark_mode,
        allocation_in_loop,
        debug_mode,
        gc_pause,
        input_pipeline,
        script_work,
        evaluation,
        late_rank,
        interpreter_lock,
        memory_growth,
        synchronisation,
        cpu_contention,
        idle_cores,
        neighbour_process,
        clock_throttled,
        idle_ramp,
        layout_conversion,
        bias_before_batch_norm,
        single_tensor_optimizer,
        unfused_optimizer,
        equal_groups,
        slow_kernels,
        tensor_cores_unused,
        memory_bound,
        launch_bound,
        queue_full,
    )
}
"""Rules by name, in claim order."""


def findings(case: Case) -> tuple[tuple[Finding, ...], tuple[Abstention, ...]]:
    """Run every diagnostic rule on the collected evidence (a case).

    If findings claim time in the same ledger slices, rules earlier in `REGISTRY` take precedence.
    All recoverable times together never exceed the time in the claimed slices.

    Returns:
        Findings: a leak first, as it ends the run, then by recoverable time and by cost, largest
        first; informational ones come last. Then the abstentions. A rule that raises abstains.
    """
    found: list[Finding] = []
    abstained: list[Abstention] = []
    for name, rule in REGISTRY.items():
        try:
            verdict = rule(case)
            told = (verdict,) if isinstance(verdict, Abstention) else tuple(verdict)
        except Exception as error:  # one failing rule must not stop the others
            logger.warning("the rule %s failed", name, exc_info=True)
            told = (_failed(name, error),)
        found.extend(one for one in told if isinstance(one, Finding))
        abstained.extend(one for one in told if isinstance(one, Abstention))
    settled = _settled(_trusted(found, case.trace), case.ledger)
    return tuple(sorted(settled, key=_rank)), tuple(abstained)


def _trusted(found: list[Finding], trace: Trace | None) -> list[Finding]:
    """Lowers the confidence of findings about slices that faults of the trace make unreliable."""
    distrusted = set() if trace is None else set(quality(trace).distrusted)
    return [
        msgspec.structs.replace(one, confidence="low") if distrusted & {*one.slices} else one
        for one in found
    ]


def _failed(name: str, error: Exception) -> Abstention:
    why = f"the rule failed: {one_line(error)}"
    return Abstention(name, why, "report this as a steadytorch bug and attach the trace")


def _rank(finding: Finding) -> tuple[bool, bool, int, int]:
    leak = finding.id == memory_growth.NAME
    return finding.information, not leak, -finding.recoverable_ns[1], -finding.cost_ns


def _settled(found: list[Finding], ledger: Ledger | None) -> list[Finding]:
    """Limit each finding's recoverable time to what earlier findings left in its slices."""
    if ledger is None:
        return found
    left = {name: int(ledger.mean(name)) for name in ledger.names}
    settled = []
    for finding in found:
        low, high = finding.recoverable_ns
        slices = [name for name in finding.slices if name in left]
        if slices:
            high = min(high, sum(left[name] for name in slices))
            finding = msgspec.structs.replace(finding, recoverable_ns=(min(low, high), high))
        for name in slices:
            taken = min(high, left[name])
            left[name] -= taken
            high -= taken
        settled.append(finding)
    return settled
