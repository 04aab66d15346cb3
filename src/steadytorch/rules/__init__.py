"""The registry of rules: the one place that lists them, and where their claims are settled.

The order is that in which they may claim time: what is particular before what is general, so that
a copy from pageable memory is not also counted among the copies.
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
    gc_pause,
    graph_break,
    idle_ramp,
    input_pipeline,
    launch_bound,
    layout_conversion,
    lazy_loading,
    memory_bound,
    neighbour_process,
    pageable_copy,
    queue_full,
    recompilation,
    single_tensor_optimizer,
    slow_kernels,
    synchronisation,
    synchronous_copy,
    tensor_cores_unused,
)

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
        gc_pause,
        input_pipeline,
        synchronisation,
        cpu_contention,
        neighbour_process,
        clock_throttled,
        idle_ramp,
        layout_conversion,
        bias_before_batch_norm,
        single_tensor_optimizer,
        slow_kernels,
        tensor_cores_unused,
        memory_bound,
        launch_bound,
        queue_full,
    )
}
"""Name to rule, in the order of their claims."""


def findings(case: Case) -> tuple[tuple[Finding, ...], tuple[Abstention, ...]]:
    """Asks every rule.

    Where several findings claim the same slices of the ledger, their recoverable times together
    stay within these slices: the rule that comes first has its claim met first.

    Returns:
        Findings by recoverable time and then by cost, the largest first, those that only inform at
        the end; and who could not tell. A rule that fails could not tell.
    """
    found: list[Finding] = []
    abstained: list[Abstention] = []
    for name, rule in REGISTRY.items():
        try:
            verdict = rule(case)
            told = (verdict,) if isinstance(verdict, Abstention) else tuple(verdict)
        except Exception as error:  # a trace may hold anything, and one rule is not all of them
            logger.warning("the rule %s failed", name, exc_info=True)
            told = (_failed(name, error),)
        found.extend(one for one in told if isinstance(one, Finding))
        abstained.extend(one for one in told if isinstance(one, Abstention))
    settled = _settled(found, case.ledger)
    return tuple(sorted(settled, key=_rank)), tuple(abstained)


def _failed(name: str, error: Exception) -> Abstention:
    why = f"the rule failed: {one_line(error)}"
    return Abstention(name, why, "report it, with the trace, as a defect of steadytorch")


def _rank(finding: Finding) -> tuple[bool, int, int]:
    return finding.information, -finding.recoverable_ns[1], -finding.cost_ns


def _settled(found: list[Finding], ledger: Ledger | None) -> list[Finding]:
    """Cuts claims down to what is left of their slices, in order."""
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
